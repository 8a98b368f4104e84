"""What the views of one prefix cache share: the tree on the host, the pages on the device, and the counts."""

import contextlib
import dataclasses
from collections.abc import Iterator

from jdecode import config as config_lib
from jdecode.serving import device_pages, pages, prefix_nodes, prefix_tree


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixCacheStatistics:
    """What a prefix cache did since it was made, and what it holds. No count of the first group ever falls.

    Attributes:
      prompts: read with it, each once however many samples it has.
      hits: of them, those with at least one token that need not be computed.
      tokens_asked: of all prompts.
      tokens_reused: of them, those that were not computed.
      prompts_not_kept: too long for the pages that could be freed.
      pages_evicted: to make room.
      times_emptied: after a failure in the middle of a copy.
      num_pages: that there are.
      pages_held: of them, those with tokens; the others are free.
      num_bytes: of all pages.
    """

    prompts: int = 0
    hits: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    prompts_not_kept: int = 0
    pages_evicted: int = 0
    times_emptied: int = 0
    num_pages: int = 0
    pages_held: int = 0
    num_bytes: int = 0


class PrefixStore:
    """The tree and the pages, which are emptied together.

    Args:
      device: the pages.
      windows: of the model's layers, in tokens.
      page_hash: of the tree; ``None`` for its own.
    """

    def __init__(
        self,
        device: device_pages.DevicePages,
        *,
        windows: tuple[int, ...],
        page_hash: prefix_nodes.PageHash | None = None,
    ) -> None:
        self.device, self.windows, self._page_hash = device, windows, page_hash
        self._counts = PrefixCacheStatistics(num_pages=device.num_pages, num_bytes=device.num_bytes)
        self.tree = self._make_tree()

    @property
    def statistics(self) -> PrefixCacheStatistics:
        """The counts as they are now."""
        return dataclasses.replace(
            self._counts,
            pages_held=self.tree.pool.num_pages - self.tree.pool.num_free,
            pages_evicted=self._counts.pages_evicted + self.tree.statistics.pages_evicted,
        )

    def count(self, **counts: int) -> None:
        """Adds to the counts by name."""
        new = {name: getattr(self._counts, name) + count for name, count in counts.items()}
        self._counts = dataclasses.replace(self._counts, **new)

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Keeps tree and pages true to each other whatever fails inside: lost pages empty the tree as well."""
        try:
            yield
        except BaseException:  # an interrupt, too, may come between a donation and its result
            if not self.device.is_sound():
                self.device.clear()
                self.count(pages_evicted=self.tree.statistics.pages_evicted, times_emptied=1)
                self.tree = self._make_tree()
            raise

    def _make_tree(self) -> prefix_tree.PrefixTree:
        pool = pages.PagePool(num_pages=self.device.num_pages, page_len=self.device.page_len)
        if self._page_hash is None:
            return prefix_tree.PrefixTree(pool, windows=self.windows)
        return prefix_tree.PrefixTree(pool, windows=self.windows, page_hash=self._page_hash)


def windows_of(config: config_lib.ModelConfig) -> tuple[int, ...]:
    """Returns the distinct windows of a model's layers, in tokens."""
    return tuple(sorted({layer.window for layer in config.layers if layer.window is not None}))
