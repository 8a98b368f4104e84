"""How a key/value cache is laid out and stored, and how much of a text it keeps. Part of ``config``."""

import dataclasses

from jdecode.config_checks import check, check_count

CACHE_LAYOUTS = ("auto", "full", "paged")
EVICTIONS = ("snapkv", "h2o")  # ways to keep a part of a cache
MOST_RECENT = 32  # latest tokens that eviction spares unless told otherwise
SMOOTHING = 7  # positions over which the attention to a prompt is pooled before some are kept
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "int8_channel", "int4")  # of keys and values
GROUPED_DTYPES = ("int8_channel", "int4")  # those whose keys have a scale a channel over a group of tokens
GROUP_LEN = 128  # tokens a group, unless said
GROUP_LENS = (4, 8, 16, 32, 64, 128, 256)  # tokens a group: attention reads 256 slots at a time, so a divisor of that


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheConfig:
    """Says how a key/value cache is laid out and stored.

    Attributes:
      layout: ``"auto"`` gives a ring buffer to each layer with a window, and every slot to the others;
        ``"full"`` gives every slot to every layer (a window is then only a mask); ``"paged"`` is ``"auto"`` with
        every slot in pages, which rows can share.
      dtype: of stored keys and values: ``"auto"`` (the model's compute dtype), ``"float32"``, ``"bfloat16"``,
        ``"float16"``; 8 bits with a scale a token and head, ``"int8"`` and ``"fp8"`` (e4m3); or keys with a scale a
        channel over groups of tokens and values by token, ``"int8_channel"`` and ``"int4"`` (KIVI, Liu et al. 2024).
      slack: ring slots beyond the window. A block of up to ``slack + 1`` tokens is written before it attends,
        and as many as ``slack`` tokens can be rolled back. Beside groups of tokens it can say which are exact
        (``group_lag``); nowhere else does it change a text.
      page_len: Z, tokens a page, only beside the layout ``"paged"``; ``None`` for 64, or for ``group_len`` with the
        dtypes that have groups. A page holds whole groups.
      budget: M, slots that each layer without a window keeps; only beside ``eviction``. Layers with one keep rings.
      eviction: ``None`` keeps every token. ``"snapkv"`` keeps the M tokens of a prompt to which its last ones attend
        most, and every new one; ``"h2o"`` keeps M tokens in all, and each new one takes the place of the one that got
        least attention so far. See ``cache.compress``.
      num_recent: the latest tokens, which always stay; the last ones of a prompt say which others do. ``None`` for
        the least of 32 and half of the budget.
      smoothing: positions (an odd number) over which the attention to a prompt is pooled before tokens are chosen;
        1 for none, ``None`` for 7.
      group_len: tokens a group, for the dtypes that have groups; the latest tokens, a quarter of this at least, are
        exact.
    """

    layout: str = "auto"
    dtype: str = "auto"
    slack: int = 0
    page_len: int | None = None
    budget: int | None = None
    eviction: str | None = None
    num_recent: int | None = None
    smoothing: int | None = None
    group_len: int = GROUP_LEN

    def __post_init__(self) -> None:
        known = ", ".join(CACHE_LAYOUTS)
        check(self.layout in CACHE_LAYOUTS, f"cache layout: expected one of {known}, got {self.layout!r}")
        known = ", ".join(CACHE_DTYPES)
        check(self.dtype in CACHE_DTYPES, f"cache dtype: expected one of {known}, got {self.dtype!r}")
        check_count("cache slack", self.slack, 0)
        if self.page_len is not None:
            check_count("cache page_len", self.page_len, 1, " or none")
            check(
                self.layout == "paged",
                f"cache page_len: expected none beside layout {self.layout}, got {self.page_len}; use layout paged",
            )
        self._check_groups()
        self._check_eviction()

    def _check_groups(self) -> None:
        lens, grouped = ", ".join(map(str, GROUP_LENS)), " and ".join(GROUPED_DTYPES)
        check(self.group_len in GROUP_LENS, f"cache group_len: expected one of {lens}, got {self.group_len!r}")
        if self.dtype not in GROUPED_DTYPES:
            check(
                self.group_len == GROUP_LEN,
                f"cache group_len: acts on the dtypes {grouped}, got {self.group_len} with {self.dtype}; leave it out",
            )
            return
        check(
            (self.page_len or 0) % self.group_len == 0,
            f"cache page_len: expected a multiple of group_len ({self.group_len}) beside {self.dtype}, whose pages "
            f"hold whole groups, got {self.page_len}; give one, or leave it out",
        )
        check(
            self.eviction is None,
            f"cache dtype: expected one that stores token by token beside {self.eviction}, such as int8, got "
            f"{self.dtype}; take another dtype, or leave the eviction out",
        )

    def _check_eviction(self) -> None:
        if self.eviction is None:
            for name in ("budget", "num_recent", "smoothing"):
                got = getattr(self, name)
                check(got is None, f"cache {name}: acts on eviction, and there is none, got {got!r}; give an eviction")
            return
        known = ", ".join(EVICTIONS)
        check(self.eviction in EVICTIONS, f"cache eviction: expected one of {known}, got {self.eviction!r}")
        check_count("cache budget", self.budget, 2)
        check(
            self.layout == "auto",
            f"cache eviction: expected the layout auto beside {self.eviction}, got {self.layout!r}; leave one of them",
        )
        if self.num_recent is not None:
            check_count("cache num_recent", self.num_recent, 1, f" and under the budget {self.budget}")
            check(
                self.num_recent < (self.budget or 0),
                f"cache num_recent: expected a count from 1 to {(self.budget or 0) - 1}, under the budget, got "
                f"{self.num_recent}",
            )
        if self.smoothing is not None:
            check_count("cache smoothing", self.smoothing, 1, ", an odd one")
            check(self.smoothing % 2 == 1, f"cache smoothing: expected an odd count, got {self.smoothing}")

    @property
    def group_lag(self) -> int | None:
        """How many tokens come after a group before it is stored; until then it is exact. ``None`` without groups.

        A quarter of a group, whose tokens weigh most; or what can be taken back, where that is more.
        """
        return max(self.group_len // 4, self.slack + 1) if self.dtype in GROUPED_DTYPES else None

    def without_eviction(self) -> "CacheConfig":
        """Returns the config of a cache that keeps every token."""
        return dataclasses.replace(self, budget=None, eviction=None, num_recent=None, smoothing=None)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StreamingConfig:
    """Gives every layer without a window one, and sinks (StreamingLLM; Xiao et al. 2024). See ``jdecode.streaming``.

    Attributes:
      window: W, in tokens.
      num_sinks: N, the first tokens of a text, which stay visible; the paper's 4 are enough for most models.
    """

    window: int
    num_sinks: int = 4

    def __post_init__(self) -> None:
        check_count("window", self.window, 1)
        check_count("num_sinks", self.num_sinks, 0)
