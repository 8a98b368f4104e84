"""Frozen configurations. They hold no arrays and import no jax, so every one of them is hashable and static."""

import dataclasses
import math
import numbers
from typing import Any

VERIFY_RULES = ("rejection", "coupled")  # of speculative decoding
MOST_DRAFT_TOKENS = 64  # each place of a block holds a copy of the sampling state and a row of logits
CACHE_LAYOUTS = ("auto", "full", "paged")
SINK_POSITIONS = ("cache", "text")
EVICTIONS = ("snapkv", "h2o")  # ways to keep a part of a cache
MOST_RECENT = 32  # latest tokens that eviction spares unless told otherwise
SMOOTHING = 7  # positions over which the attention to a prompt is pooled before some are kept
CACHE_DTYPES = ("auto", "float32", "bfloat16", "float16", "int8", "fp8", "int8_channel", "int4")  # of keys and values
GROUPED_DTYPES = ("int8_channel", "int4")  # those whose keys have a scale a channel over a group of tokens
GROUP_LEN = 128  # tokens a group, unless said
GROUP_LENS = (4, 8, 16, 32, 64, 128, 256)  # tokens a group: attention reads 256 slots at a time, so a divisor of that
MASK_FREE = None  # a layer without a window sees every earlier position


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_count(name: str, value: Any, least: int, alternative: str = "") -> None:
    """Refuses what is no whole number of at least ``least``; ``alternative`` says what else may stand there."""
    is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    check(is_count, f"{name}: expected a count of at least {least}{alternative}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float, says: str, *, exclusive: bool = False) -> None:
    """Refuses what is no finite number from ``low`` to ``high`` (``exclusive``: over ``low``); ``says`` is in words."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    inside = is_number and low <= float(value) <= high and not (exclusive and value == low)
    check(bool(inside), f"{name}: expected {says}, got {value!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeConfig:
    """Describes rotary position embedding (Su et al. 2021) for one layer.

    Attributes:
      theta: base of the geometric series of wavelengths.
      scaling: ``"none"``; ``"linear"`` (every frequency divided by ``factor``); ``"llama3"`` (low frequencies
        divided by ``factor``, high ones kept, those between blended; Llama 3.1 model card).
      factor: see ``scaling``.
      low_freq_factor, high_freq_factor: edges of the blended band, ``llama3`` only.
      original_max_positions: trained length before scaling, in tokens, ``llama3`` only.
    """

    theta: float = 10_000.0
    scaling: str = "none"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def __post_init__(self) -> None:
        known = ("none", "linear", "llama3")
        check(self.scaling in known, f"rope scaling: expected one of {', '.join(known)}, got {self.scaling!r}")
        check(self.theta > 0, f"rope theta: expected a number over 0, got {self.theta}")
        check(self.factor > 0, f"rope factor: expected a number over 0, got {self.factor}")
        if self.scaling == "llama3":
            check(
                self.high_freq_factor > self.low_freq_factor > 0,
                f"rope llama3: expected high_freq_factor > low_freq_factor > 0, "
                f"got {self.high_freq_factor} and {self.low_freq_factor}",
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """Describes what may differ between the layers of one model.

    Attributes:
      window: a query at position q sees keys at positions over ``q - window``; ``None`` for no window.
      num_sinks: the first positions of a text, which stay visible whatever the window (Xiao et al. 2024).
      sink_positions: what a query's distance to the sinks is counted in: ``"cache"`` (the sinks, and the window behind
        them, numbered as they are held, so that no distance reaches the sum of both) or ``"text"`` (it grows with the
        text, past what any model was trained for).
      rope: rotary embedding of this layer; ``None`` for a layer without one.
    """

    window: int | None = MASK_FREE
    num_sinks: int = 0
    sink_positions: str = SINK_POSITIONS[0]
    rope: RopeConfig | None = RopeConfig()

    def __post_init__(self) -> None:
        check(
            self.window is None or self.window >= 1,
            f"window: expected a count of at least 1 or none, got {self.window}",
        )
        check(self.num_sinks >= 0, f"num_sinks: expected a count of at least 0, got {self.num_sinks}")
        known = " or ".join(SINK_POSITIONS)
        check(self.sink_positions in SINK_POSITIONS, f"sink_positions: expected {known}, got {self.sink_positions!r}")
        check(
            self.sink_positions == SINK_POSITIONS[0] or (self.num_sinks > 0 and self.window is not None),
            f"sink_positions: expected a window with sinks beside {self.sink_positions}, got none; leave it out",
        )

    @property
    def turns_sinks(self) -> bool:
        """Whether queries meet the sinks from another position than their own; see ``models.sinks``."""
        is_counted_anew = self.num_sinks > 0 and self.window is not None and self.sink_positions == SINK_POSITIONS[0]
        return is_counted_anew and self.rope is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Describes a decoder-only transformer: shapes and the choices in which families differ.

    Attributes:
      vocab_size: V. hidden_size: D. intermediate_size: F. num_heads: N. num_kv_heads: K. head_dim: H.
      layers: one entry a layer, so L is ``len(layers)``.
      activation: of the gated feed-forward, ``"silu"`` or ``"gelu_tanh"``.
      norm_eps: added to the mean square under the root of every RMSNorm.
      norm_offset: added to every norm scale (0 for Llama; 1 for Gemma, whose files hold scale - 1).
      query_scale: factor on q·k; ``None`` for ``head_dim ** -0.5``.
      embedding_scale: factor on embedded tokens (Gemma: ``sqrt(hidden_size)``).
      tie_embeddings: whether the output head is the embedding matrix.
      qkv_bias, output_bias, feed_forward_bias: which linear layers have a bias.
      qk_norm: RMSNorm over the head width of queries and keys, before rope.
      post_norms: a second RMSNorm after attention and after the feed-forward, before the residual sum.
      attention_soft_cap, final_soft_cap: ``cap * tanh(x / cap)`` on scores (after the scale, before the mask)
        and on logits; ``None`` for none.
      max_positions: the length that the model was trained for, in tokens. Information: nothing is clipped to it.
      family: the name under which ``models/families`` knows the model.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    layers: tuple[LayerConfig, ...]
    activation: str = "silu"
    norm_eps: float = 1e-5
    norm_offset: float = 0.0
    query_scale: float | None = None
    embedding_scale: float = 1.0
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    feed_forward_bias: bool = False
    qk_norm: bool = False
    post_norms: bool = False
    attention_soft_cap: float | None = None
    final_soft_cap: float | None = None
    max_positions: int = 2048
    family: str = "llama"

    def __post_init__(self) -> None:
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            check_count(name, getattr(self, name), 1)
        check(len(self.layers) >= 1, "layers: expected at least one layer, got none")
        check(
            self.num_heads % self.num_kv_heads == 0,
            f"num_kv_heads: expected a divisor of num_heads {self.num_heads}, got {self.num_kv_heads}",
        )
        check(self.head_dim % 2 == 0, f"head_dim: expected an even number (rope rotates pairs), got {self.head_dim}")
        check(
            self.activation in ("silu", "gelu_tanh"),
            f"activation: expected silu or gelu_tanh, got {self.activation!r}",
        )
        for name in ("attention_soft_cap", "final_soft_cap"):
            cap = getattr(self, name)
            check(cap is None or cap > 0, f"{name}: expected a number over 0 or none, got {cap}")

    @property
    def num_layers(self) -> int:
        """L, the number of layers."""
        return len(self.layers)

    @property
    def attention_scale(self) -> float:
        """The factor on q·k."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale


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
        and as many as ``slack`` tokens can be rolled back.
      page_len: Z, tokens a page, only beside the layout ``"paged"``; ``None`` for 64.
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
            self.layout != "paged",
            f"cache dtype: expected one that stores token by token in pages, such as int8, got {self.dtype}; take "
            "another dtype, or another layout",
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Says how the next token is chosen. The default is greedy.

    The order is fixed: logit bias, allowed and banned ids, penalties, no-repeat n-grams, minimum length, the
    caller's own transforms, temperature, top-k, top-p, min-p, typical-p, renormalise, draw.

    Attributes:
      temperature: divides the logits; 0 is exact argmax (the lowest id of a tie).
      top_k: keep the k most likely tokens; anything outside ``1 .. V-1`` keeps all.
      top_p: keep the fewest, most likely tokens whose sum reaches p (Holtzman et al. 2020); 1 keeps all, 0 one.
      min_p: keep tokens with at least ``min_p`` times the greatest probability (Nguyen et al. 2024); 0 keeps all.
      typical_p: keep the tokens nearest to the expected surprise, up to this sum (Meister et al. 2023); 1 keeps all.
      repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output
        (Keskar et al. 2019); 1 does nothing.
      presence_penalty: subtracted once from the logit of each token in the output.
      frequency_penalty: subtracted for each occurrence of the token in the output.
      no_repeat_ngram_size: bans tokens that would complete an n-gram for the second time (prompt and output);
        0 is off.
      min_new_tokens: stop tokens cannot be drawn before so many tokens are out.
      logit_bias: pairs (token id, number to add).
      allowed_token_ids: when not empty, no other token can be drawn.
      banned_token_ids: these tokens cannot be drawn.
      seed: of the draws. ``None`` draws a fresh one; 0 is a seed like any other.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    min_new_tokens: int = 0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None

    def __post_init__(self) -> None:
        at_least_0, share = "a finite number of at least 0", "a number from 0 to 1"
        check_number("temperature", self.temperature, 0, math.inf, at_least_0)
        for name in ("top_p", "min_p", "typical_p"):
            check_number(name, getattr(self, name), 0, 1, share)
        over_0 = "a finite number over 0"
        check_number("repetition_penalty", self.repetition_penalty, 0, math.inf, over_0, exclusive=True)
        for name in ("presence_penalty", "frequency_penalty"):
            check_number(name, getattr(self, name), -math.inf, math.inf, "a finite number")
        is_whole = isinstance(self.top_k, numbers.Integral) and not isinstance(self.top_k, bool)
        check(is_whole, f"top_k: expected a whole number (0 keeps all), got {self.top_k!r}")
        for name in ("no_repeat_ngram_size", "min_new_tokens"):
            check_count(name, getattr(self, name), 0)
        if self.seed is not None:
            check_count("seed", self.seed, 0, " and under 2**63, or none")
            check(self.seed < 2**63, f"seed: expected a whole number from 0 to 2**63 - 1 or none, got {self.seed}")
        for name in ("logit_bias", "allowed_token_ids", "banned_token_ids"):
            value = getattr(self, name)
            check(isinstance(value, (tuple, list)), f"{name}: expected a tuple, got {value!r}")
        for pair in self.logit_bias:
            is_pair = isinstance(pair, (tuple, list)) and len(pair) == 2
            check(is_pair, f"logit_bias: expected pairs (token id, number), got {pair!r}")
            check_number(f"logit_bias of token {pair[0]}", pair[1], -math.inf, math.inf, "a finite number")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeConfig:
    """Says how a draft speeds decoding up (speculative decoding; Leviathan et al. 2023).

    Attributes:
      draft: ``"ngram"`` (what followed the latest tokens before), ``"layer_skip"`` (the target's first layers), or the
        weights of a smaller model with the same tokens: a packaged name, a path or a hub id. ``None`` for no draft.
      num_draft_tokens: the most tokens that are proposed at once.
      verify: ``"rejection"`` accepts most and keeps the law of the text; ``"coupled"`` keeps the text of each seed.
      adaptive: propose fewer tokens, or none, while few are accepted.
    """

    draft: str | None = None
    num_draft_tokens: int = 4
    verify: str = "rejection"
    adaptive: bool = True

    def __post_init__(self) -> None:
        check(self.draft != "", "draft: expected ngram, layer_skip, weights or null, got an empty text")
        check_count("num_draft_tokens", self.num_draft_tokens, 1, f" and at most {MOST_DRAFT_TOKENS}")
        check(
            self.num_draft_tokens <= MOST_DRAFT_TOKENS,
            f"num_draft_tokens: expected a count from 1 to {MOST_DRAFT_TOKENS}, got {self.num_draft_tokens}",
        )
        check(self.verify in VERIFY_RULES, f"verify: expected one of {', '.join(VERIFY_RULES)}, got {self.verify!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Says how many devices lie along each mesh axis; ``data`` splits rows, ``model`` splits heads and widths."""

    data: int = 1
    model: int = 1

    def __post_init__(self) -> None:
        for name in ("data", "model"):
            check_count(f"mesh {name}", getattr(self, name), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Says what one run uses: a model, and what the command line starts from. The YAML files of ``configs/`` are these.

    Attributes:
      name: of the config; a file that gives none is named after itself.
      description: a sentence for people.
      weights: a hub id, or the path of a folder or file; ``None`` when the config names none.
      no_weights: why there are none, in half a sentence; only beside ``weights: null``.
      architecture: shapes for planning. Beside weights it is a promise: weights of another shape are refused.
      sampling, speculative, cache, mesh: see their classes.
      streaming: a window for layers that have none; ``None`` leaves the model as it is.
      max_new_tokens: the most tokens that a run writes.
      prompt: used when the caller gives none.
    """

    name: str = ""
    description: str = ""
    weights: str | None = None
    no_weights: str | None = None
    architecture: ModelConfig | None = None
    sampling: SamplingConfig = SamplingConfig()
    speculative: SpeculativeConfig = SpeculativeConfig()
    cache: CacheConfig = CacheConfig()
    streaming: StreamingConfig | None = None
    mesh: MeshConfig = MeshConfig()
    max_new_tokens: int = 64
    prompt: str | None = None

    def __post_init__(self) -> None:
        check_count("max_new_tokens", self.max_new_tokens, 1)
        check(self.weights != "", "weights: expected a hub id, a path or null, got an empty text")
        check(self.prompt != "", "prompt: expected some text or null, got an empty text")
        check(
            self.weights is not None or self.architecture is not None,
            "expected weights, an architecture or both, got neither",
        )
        check(
            self.weights is None or self.no_weights is None,
            f"no_weights: expected none beside weights {self.weights!r}, got {self.no_weights!r}",
        )
