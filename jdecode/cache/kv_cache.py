"""The key/value cache: an immutable pytree that a model takes and returns.

Every layer has rows of keys and of values (stored by the codec). Layers of one layout share the table that says which
absolute position each slot holds. ``length_B`` counts the tokens that each row has seen: batches are ragged by nature.

How a block of tokens passes through a cache is told in ``block`` (where it goes) and ``layer_view`` (what is written
and attended to); ``cache_rows`` takes and repeats rows.

Rollback is a length: ``truncate`` lowers ``length_B``. The slots of the cut tokens keep positions past the new length,
where no query sees them, and the next block overwrites them (or, where it attends to the old ring, hides them).

Layers of a paged layout have a pool of pages instead of rows (``page_pool``), all by one table: the slots of a row, its
positions and its mask are those of a full layout, and only what reads or writes stored bytes goes through the table
(``paged_rows``). The device loop never changes the table; ``cache_rows`` does, between its runs. Pages hold what the
codec stores: where that is groups of tokens, the latest tokens are rows in a ring of their own, beside the pool.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from jdecode.attention import segment as segment_lib
from jdecode.cache import codec as codec_lib
from jdecode.cache import layout as layout_lib
from jdecode.cache import layout_paged, page_forks, paged_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStore:
    """The rows of one layer, or its pools and, where it has any, the rows of its latest tokens.

    Attributes:
      keys, values: of each slot, as the codec stores them (``codec.StoredRows``).
      received_BS: float32, the attention that each slot got so far, summed over queries and heads; ``None`` where
        nobody counts it.
      recent: where keys and values are stored by groups, the latest tokens as they are: rows, never pools.
    """

    keys: Any
    values: Any
    received_BS: jax.Array | None = None
    recent: "LayerStore | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer for B rows of text.

    Attributes:
      stores: one ``LayerStore`` a layer.
      positions: one int32 (B, S) table a layout: the absolute position that each slot holds, or ``EMPTY``.
      length_B: int32, the tokens that each row has seen.
      pages_BC: int32, the page of each column, for layers with pages; ids past the pool where there is none. ``None``
        where no layer has pages.
      shared_B: int32, how many of a row's first tokens lie in pages that are only read: writes there are dropped.
        ``None`` where no layer has pages.
      layouts: the distinct layouts; that of ``recent`` is one of them. Static.
      layout_idx: for each layer, which of ``layouts`` is its own. Static.
      codec: how rows are stored. Static.
    """

    stores: tuple[LayerStore, ...]
    positions: tuple[jax.Array, ...]
    length_B: jax.Array
    pages_BC: jax.Array | None = None
    shared_B: jax.Array | None = None
    layouts: tuple[layout_lib.AnyLayout, ...] = dataclasses.field(metadata={"static": True})
    layout_idx: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    codec: codec_lib.KVCodec = dataclasses.field(metadata={"static": True})

    @property
    def batch_size(self) -> int:
        """B."""
        return self.length_B.shape[0]

    @property
    def max_len(self) -> int | None:
        """The longest text that a row can hold, in tokens; ``None`` where every layer is a ring."""
        return min((layout.max_len for layout in self.layouts if layout.max_len is not None), default=None)

    @property
    def max_rollback(self) -> int:
        """How many of a row's latest tokens ``truncate`` may take back."""
        return min(layout.max_rollback for layout in self.layouts)

    @property
    def num_bytes(self) -> int:
        """Bytes of all leaves."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self))

    @property
    def paged_layout(self) -> layout_paged.PagedLayout | None:
        """The layout whose slots lie in pages, if there is one."""
        paged = [layout for layout in self.layouts if isinstance(layout, layout_paged.PagedLayout)]
        return paged[0] if paged else None

    def has_pages(self, layer_idx: int) -> bool:
        """Says whether a layer has a pool of pages instead of rows."""
        return self._is_paged(self.layout_idx[layer_idx])

    def rows(self, layout_idx: int, stored: Any) -> segment_lib.Rows:
        """Returns keys or values in slots of a layout as attention reads them: through the table if those are pages."""
        return self._paged(stored) if self._is_paged(layout_idx) else stored

    def write(
        self,
        layout_idx: int,
        codec: codec_lib.RowCodec,
        stored: Any,
        slot_BT: jax.Array,
        new: Any,
    ) -> Any:
        """Returns keys or values in slots of a layout with an encoded block in them. See ``codec.RowCodec.write``.

        Slots in pages that are only read (``shared_B``) are dropped.
        """
        if not self._is_paged(layout_idx):
            return codec.write(stored, slot_BT, new)
        assert self.shared_B is not None
        is_own_BT = slot_BT >= self.shared_B[:, None]
        return self._paged(stored).write(jnp.where(is_own_BT, slot_BT, self.layouts[layout_idx].capacity), new)

    def _is_paged(self, layout_idx: int) -> bool:
        return isinstance(self.layouts[layout_idx], layout_paged.PagedLayout)

    def _paged(self, pool: codec_lib.StoredRows) -> paged_rows.PagedRows:
        assert self.pages_BC is not None
        return paged_rows.PagedRows(pool=pool, page_BC=self.pages_BC)


def longest(cache: KVCache) -> jax.Array | None:
    """Returns the longest text that each row can hold, in tokens, int32 (B,); ``None`` for no bound."""
    bounds = [jnp.full(cache.batch_size, cache.max_len)] if cache.max_len is not None else []
    for layout, position_BS in zip(cache.layouts, cache.positions, strict=True):
        if isinstance(layout, layout_lib.PlacingLayout):
            bounds += [bound_B for bound_B in [layout.longest(position_BS)] if bound_B is not None]
    return functools.reduce(jnp.minimum, bounds) if bounds else None


def num_evicted(cache: KVCache) -> jax.Array:
    """Counts the tokens of each row that a layer which keeps a part no longer holds: int32 (B,); 0 where none does."""
    for layout, position_BS in zip(cache.layouts, cache.positions, strict=True):
        if isinstance(layout, layout_lib.PlacingLayout):  # layers keep other tokens, but as many of them
            return cache.length_B - jnp.sum(position_BS < cache.length_B[:, None], axis=1)
    return jnp.zeros_like(cache.length_B)


def truncate(cache: KVCache, length_B: jax.Array) -> KVCache:
    """Takes back each row's latest tokens, so that it has seen ``length_B`` (int32) tokens.

    No row may lose more than ``cache.max_rollback`` tokens that it has seen at its longest, nor a token whose page it
    shares (``cache.shared_B``); longer lengths than a row's own leave it as it is.

    Raises:
      ValueError: a row would lose tokens that it shares. Only where the lengths are not traced.
    """
    length_B = jnp.minimum(cache.length_B, length_B)
    if cache.shared_B is not None:
        page_forks.check_rollback(cache.shared_B, length_B)
    return dataclasses.replace(cache, length_B=length_B)
