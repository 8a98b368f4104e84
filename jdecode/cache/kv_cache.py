"""The key/value cache: an immutable pytree that a model takes and returns.

Every layer has rows of keys and of values (stored by the codec). Layers of one layout share the table that says which
absolute position each slot holds. ``length_B`` counts the tokens that each row has seen: batches are ragged by nature.

A block of T tokens passes through a cache in three steps::

    block = open_block(cache, T, num_tokens_B)              positions, slots, the position tables after the block
    stored, segments = layer(cache, block, i).append(k, v)  once a layer; attention runs over the segments
    stored = layer(cache, block, i).observe(stored, q, …)   and is counted, where the cache keeps by it
    cache = close_block(cache, block, [stored, ...])        the cache after the block

``append`` writes the block and lets it attend over the written cache where that is safe. A block too long for a ring
(see ``layout_ring``) attends to the old ring and to itself instead, and then its tail is written. Either way token i
sees exactly what ``attention.visibility`` says.

A codec may store tokens by groups (``grouped``). A layer then has its latest tokens beside its groups, and a block
writes the groups that settle with it before it attends.

Rollback is a length: ``truncate`` lowers ``length_B``. The slots of the cut tokens keep positions past the new length,
where no query sees them, and the next block overwrites them (or, where it attends to the old ring, hides them).

Layers of a paged layout have a pool of pages instead of rows (``page_pool``), all by one table: the slots of a row, its
positions and its mask are those of a full layout, and only what reads or writes stored bytes goes through the table
(``paged_rows``). The device loop never changes the table; ``take_rows`` and ``with_pages`` do, between its runs.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.attention import received, visibility
from jdecode.attention import segment as segment_lib
from jdecode.cache import codec as codec_lib
from jdecode.cache import grouped, layout_paged, page_forks, page_pool, paged_rows
from jdecode.cache import layout as layout_lib
from jdecode.cache import slots as slots_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStore:
    """The rows of one layer, or its pools.

    Attributes:
      keys, values: of each slot, as the codec stores them (``segment.Rows``, and ``codec.StoredRows`` where it stores
        slot by slot).
      received_BS: float32, the attention that each slot got so far, summed over queries and heads; ``None`` where
        nobody counts it.
      recent: where keys and values are stored by groups, the latest tokens as they are.
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
        return isinstance(self.layouts[self.layout_idx[layer_idx]], layout_paged.PagedLayout)

    def rows(self, layer_idx: int, stored: Any) -> segment_lib.Rows:
        """Returns keys or values of a layer as attention reads them: through the table where they lie in pages."""
        return self._paged(stored) if self.has_pages(layer_idx) else stored

    def write(
        self,
        layer_idx: int,
        codec: codec_lib.RowCodec,
        stored: Any,
        slot_BT: jax.Array,
        new: Any,
    ) -> Any:
        """Returns keys or values of a layer with an encoded block in its slots. See ``codec.RowCodec.write``."""
        if self.has_pages(layer_idx):
            return self._paged(stored).write(slot_BT, new)
        return codec.write(stored, slot_BT, new)

    def _paged(self, pool: codec_lib.StoredRows) -> paged_rows.PagedRows:
        assert self.pages_BC is not None
        return paged_rows.PagedRows(pool=pool, page_BC=self.pages_BC)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Block:
    """T tokens a row, about to enter a cache.

    Attributes:
      position_BT: int32, absolute positions; padding at the end of a row counts on.
      stored_position_BT: the same, ``EMPTY`` for padding.
      length_B: int32, the tokens that each row has seen after the block.
      slots: one (B, T) a layout; padding and tokens that lose their slot within the block are past the last slot.
      positions: the cache's position tables after the block.
      settled: the groups that settle with the block; ``None`` for a codec without groups.
    """

    position_BT: jax.Array
    stored_position_BT: jax.Array
    length_B: jax.Array
    slots: tuple[jax.Array, ...]
    positions: tuple[jax.Array, ...]
    settled: grouped.Settled | None = None


def open_block(cache: KVCache, block_len: int, num_tokens_B: jax.Array | None) -> Block:
    """Plans where a block of T tokens goes.

    Args:
      block_len: T. Static.
      num_tokens_B: int32, how many tokens of each row are real, the rest being padding at its end; ``None`` for all.
    """
    position_BT, stored_position_BT, length_B = _block_positions(cache.length_B, block_len, num_tokens_B)
    slots, positions = [], []
    for idx, (layout, position_BS) in enumerate(zip(cache.layouts, cache.positions, strict=True)):
        written_BT = stored_position_BT != visibility.EMPTY
        if isinstance(layout, layout_lib.PlacingLayout):
            slot_BT = layout.place(position_BT, length_B, position_BS, _received(cache, idx))
        else:
            slot_BT = layout.slot(position_BT)
            written_BT &= layout.survives(position_BT, length_B[:, None])
        if cache.max_len is not None:  # in a ring, too, what is past the end must overwrite nothing
            written_BT &= position_BT < cache.max_len
        if cache.shared_B is not None and layout is cache.paged_layout:
            written_BT &= position_BT >= cache.shared_B[:, None]
        # Past the last slot, and distinct: such writes are dropped. (Clamping or -1 would hit a live slot.)
        dropped_BT = layout.capacity + jnp.broadcast_to(jnp.arange(block_len, dtype=jnp.int32), position_BT.shape)
        slot_BT = jnp.where(written_BT, slot_BT, dropped_BT)
        slots.append(slot_BT)
        positions.append(slots_lib.scatter(position_BS, slot_BT, stored_position_BT))
    grouping = cache.codec.grouping
    return Block(
        position_BT=position_BT,
        stored_position_BT=stored_position_BT,
        length_B=length_B,
        slots=tuple(slots),
        positions=tuple(positions),
        settled=None if grouping is None else grouped.settle(grouping.settling, cache.length_B, length_B, block_len),
    )


def _received(cache: KVCache, idx: int) -> jax.Array | None:
    """Returns the attention that the slots of the layer of a layout got."""
    own = [store.received_BS for store, of in zip(cache.stores, cache.layout_idx, strict=True) if of == idx]
    return own[0] if own else None


def open_block_without_cache(batch_size: int, block_len: int, num_tokens_B: jax.Array | None) -> Block:
    """Plans a block that starts at position 0 and attends to itself alone."""
    start_B = jnp.zeros(batch_size, jnp.int32)
    position_BT, stored_position_BT, length_B = _block_positions(start_B, block_len, num_tokens_B)
    return Block(
        position_BT=position_BT, stored_position_BT=stored_position_BT, length_B=length_B, slots=(), positions=()
    )


def _block_positions(start_B: jax.Array, block_len: int, num_tokens_B: jax.Array | None):
    idx_1T = jnp.arange(block_len, dtype=jnp.int32)[None, :]
    position_BT = start_B[:, None] + idx_1T
    if num_tokens_B is None:
        return position_BT, position_BT, start_B + block_len
    stored_position_BT = jnp.where(idx_1T < num_tokens_B[:, None], position_BT, visibility.EMPTY)
    return position_BT, stored_position_BT, start_B + num_tokens_B


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """One layer's view of a cache while a block passes through it."""

    cache: KVCache
    block: Block
    layer_idx: int
    window: int | None
    num_sinks: int

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the block's keys and values; returns the layer's rows after it, and what its queries attend over.

        What is not finite is written into keys alone (``segment.faults_in_keys``), so that a proposal that is refused
        harms nobody, neither in its own block nor as a slot past the length.
        """
        codec, old = self.cache.codec, self.cache.stores[self.layer_idx]
        k_BTKH, v_BTKH = codec.keys.cast(k_BTKH), codec.values.cast(v_BTKH)
        if codec.grouping is None:
            return self._append_tokens(codec, self.cache.layout_idx[self.layer_idx], old, k_BTKH, v_BTKH)
        idx, exact = self.cache.layouts.index(codec.grouping.layout), codec.grouping.exact
        k_BTKH, v_BTKH = exact.keys.cast(k_BTKH), exact.values.cast(v_BTKH)
        assert old.recent is not None
        recent, tokens = self._append_tokens(exact, idx, old.recent, k_BTKH, v_BTKH)
        groups, settled = self._append_groups(codec, codec.grouping, old, tokens)
        return dataclasses.replace(groups, recent=recent), (
            *(_share(segment, codec.grouping, is_settled=True) for segment in settled),
            *(_share(segment, codec.grouping, is_settled=False) for segment in tokens),
        )

    def _append_tokens(
        self, codec: codec_lib.KVCodec, layout_idx: int, old: LayerStore, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the block token by token."""
        cache, block, idx = self.cache, self.block, layout_idx
        block_len, layout = k_BTKH.shape[1], cache.layouts[idx]
        k_BTKH, v_BTKH = segment_lib.faults_in_keys(k_BTKH, v_BTKH)
        fresh = LayerStore(keys=codec.keys.encode(k_BTKH), values=codec.values.encode(v_BTKH))
        new = self._written(codec, old, block.slots[idx], fresh)
        if block_len <= layout.max_block_len:
            return new, (self._stored_segment(idx, new, block.positions[idx], block.length_B),)
        fresh_segment = segment_lib.Segment(
            keys=fresh.keys,
            values=fresh.values,
            position_BS=block.stored_position_BT,
            first_slot=jnp.int32(0),
            end_slot=jnp.int32(block_len),
            is_block=True,
        )
        # The old slots still hold tokens that were taken back; in the fresh block others have their positions.
        kept_position_BS = _before(cache.positions[idx], cache.length_B)
        return new, (self._stored_segment(idx, old, kept_position_BS, cache.length_B), fresh_segment)

    def _append_groups(
        self,
        codec: codec_lib.KVCodec,
        grouping: codec_lib.Grouping,
        old: LayerStore,
        tokens: tuple[segment_lib.Segment, ...],
    ) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the groups that settle with the block, from the exact tokens that it attends over."""
        cache, block, settled = self.cache, self.block, self.block.settled
        assert settled is not None
        idx, old = cache.layout_idx[self.layer_idx], dataclasses.replace(old, recent=None)
        layout, block_len = cast(layout_lib.Layout, cache.layouts[idx]), block.position_BT.shape[1]
        slot_BX, token_BX = settled.slots(layout), settled.slots_of_tokens(grouping.layout, cache.length_B, tokens)

        def encoded(token_BX: jax.Array) -> LayerStore:
            k_BXKH, v_BXKH = grouped.take_tokens(tokens, token_BX)
            return LayerStore(keys=codec.keys.encode(k_BXKH), values=codec.values.encode(v_BXKH))

        if len(tokens) == 1:

            def write_group(turn: jax.Array, own: LayerStore) -> LayerStore:
                token_BZ, slot_BZ = (settled.group(x_BX, turn) for x_BX in (token_BX, slot_BX))
                return self._written(codec, own, slot_BZ, encoded(token_BZ))

            # Mostly of no turn. (A condition would copy the rows that pass through it.)
            new = jax.lax.fori_loop(0, settled.num_groups, write_group, old)
        else:
            fresh = encoded(token_BX)
            new = self._written(codec, old, slot_BX, fresh)
            if block_len > layout.max_block_len:
                fresh_segment = segment_lib.Segment(
                    keys=fresh.keys,
                    values=fresh.values,
                    position_BS=settled.position_BX,
                    first_slot=jnp.int32(0),
                    end_slot=settled.num_groups * settled.group_len,
                )
                position_BS = _before(cache.positions[idx], settled.before_B)
                return new, (self._stored_segment(idx, old, position_BS, settled.before_B), fresh_segment)
        position_BS = _before(block.positions[idx], settled.after_B)
        return new, (self._stored_segment(idx, new, position_BS, settled.after_B),)

    def _written(self, codec: codec_lib.KVCodec, old: LayerStore, slot_BT: jax.Array, fresh: LayerStore) -> LayerStore:
        return LayerStore(
            keys=self.cache.write(self.layer_idx, codec.keys, old.keys, slot_BT, fresh.keys),
            values=self.cache.write(self.layer_idx, codec.values, old.values, slot_BT, fresh.values),
            received_BS=_with_zeros(old.received_BS, slot_BT),
        )

    def _stored_segment(
        self, layout_idx: int, store: LayerStore, position_BS: jax.Array, length_B: jax.Array
    ) -> segment_lib.Segment:
        layout = self.cache.layouts[layout_idx]
        first_slot, end_slot = jnp.int32(0), jnp.minimum(length_B.max(), layout.capacity)
        if isinstance(layout, layout_lib.PlacingLayout):
            end_slot = slots_lib.end_of_held(position_BS)
        if self.window is not None and not self.num_sinks and layout.max_len is not None:
            # Slots in the order of positions: those before the window of every row need not be read.
            first_slot = jnp.maximum(self.block.position_BT[:, 0].min() - (self.window - 1), 0)
        return segment_lib.Segment(
            keys=self.cache.rows(self.layer_idx, store.keys),
            values=self.cache.rows(self.layer_idx, store.values),
            position_BS=position_BS,
            first_slot=first_slot,
            end_slot=end_slot,
        )

    def observe(
        self, store: LayerStore | None, q_BTNH: jax.Array, segments: Sequence[segment_lib.Segment], **attention: Any
    ) -> LayerStore:
        """Adds the attention that the block's queries pay to each slot, where the layer counts it.

        Args:
          store, segments: of ``append``.
          q_BTNH: the block's queries.
          attention: ``scale`` and the others of ``attention.reference.attend``.
        """
        assert store is not None  # as ``append`` gave it
        if store.received_BS is None:
            return store
        (segment,) = segments  # a layer that counts writes first and attends then, whatever the block
        real_BT = self.block.stored_position_BT != visibility.EMPTY
        more_BS = received.received(q_BTNH, self.block.position_BT, real_BT, segment, **attention)
        return dataclasses.replace(store, received_BS=store.received_BS + more_BS)


def _with_zeros(received_BS: jax.Array | None, slot_BT: jax.Array) -> jax.Array | None:
    """Forgets what those got whose slots are written."""
    return None if received_BS is None else slots_lib.scatter(received_BS, slot_BT, jnp.zeros(slot_BT.shape))


def _before(position_BS: jax.Array, end_B: jax.Array) -> jax.Array:
    """Returns positions with ``EMPTY`` for those that are not under ``end_B``."""
    return jnp.where(position_BS < end_B[:, None], position_BS, visibility.EMPTY)


def _share(part: segment_lib.Segment, grouping: codec_lib.Grouping, *, is_settled: bool) -> segment_lib.Segment:
    share = visibility.Share(settling=grouping.settling, is_settled=is_settled)
    return dataclasses.replace(part, share=share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncachedLayer:
    """The view of a layer when there is no cache: a block attends to itself."""

    block: Block

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[None, tuple[segment_lib.Segment, ...]]:
        """Returns the block as the only segment."""
        return None, (segment_lib.whole_segment(k_BTKH, v_BTKH, self.block.stored_position_BT, is_block=True),)

    def observe(
        self, store: LayerStore | None, q_BTNH: jax.Array, segments: Sequence[segment_lib.Segment], **attention: Any
    ) -> None:
        """Has no slots that could count."""
        del store, q_BTNH, segments, attention


def close_block(cache: KVCache, block: Block, stores: Sequence[LayerStore]) -> KVCache:
    """Returns the cache after a block, given each layer's rows after it."""
    return dataclasses.replace(cache, stores=tuple(stores), positions=block.positions, length_B=block.length_B)


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


def take_rows(cache: KVCache, row_idx: jax.Array, *, num_pages: int | None = None) -> KVCache:
    """Returns a cache whose row i is row ``row_idx[i]`` (int32) of this one; rows may repeat.

    Where a layer has pages, rows share those that are full (``page_forks``), and every other column of every row gets a
    page of its own in a new pool.

    Args:
      num_pages: of the new pool; ``None`` for as many as rows need that share nothing. Fewer are enough where rows
        share, see ``repeat_rows``; columns that get none drop what is written to them. Static.
    """
    take = functools.partial(jnp.take, indices=row_idx, axis=0)
    paged = cache.paged_layout
    if paged is None:
        return jax.tree.map(take, cache)
    assert cache.pages_BC is not None
    pools = [store for idx, store in enumerate(cache.stores) if cache.has_pages(idx)]
    fork = page_forks.fork(
        cache.pages_BC,
        cache.length_B,
        row_idx,
        page_len=paged.page_len,
        num_old=page_pool.num_pages(pools[0].keys),
        num_new=row_idx.shape[0] * paged.num_columns if num_pages is None else num_pages,
    )

    def take_pages(leaf: jax.Array) -> jax.Array:
        return leaf.at[fork.source_P].get(mode="fill", fill_value=0)

    stores = [jax.tree.map(take_pages if cache.has_pages(idx) else take, own) for idx, own in enumerate(cache.stores)]
    taken = dataclasses.replace(cache, stores=tuple(stores), positions=tuple(map(take, cache.positions)))
    return with_pages(taken, fork.pages_RC, fork.shared_R, take(cache.length_B))


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Returns a cache with every row ``times`` times, one beside the other; pages are shared. On the host."""
    row_idx, num_pages = np.repeat(np.arange(cache.batch_size, dtype=np.int32), times), None
    if cache.paged_layout is not None:
        tables = np.asarray(cache.pages_BC), np.asarray(cache.length_B)
        least = page_forks.least_pages(*tables, row_idx, cache.paged_layout.page_len)
        num_pages = min(page_forks.padded_pages(least), len(row_idx) * cache.paged_layout.num_columns)
    return take_rows(cache, jnp.asarray(row_idx), num_pages=num_pages)


def with_pages(cache: KVCache, pages_BC: jax.Array, shared_B: jax.Array, length_B: jax.Array) -> KVCache:
    """Returns a cache whose rows are other texts in the same pools, as a table of the host says.

    Args:
      pages_BC, shared_B, length_B: int32, as in ``KVCache``. No two rows may have one page in columns that ``shared_B``
        leaves open. Layers that have rows of their own keep them, so there a length must be one that they hold.

    Raises:
      ValueError: no layer has pages.
    """
    paged = cache.paged_layout
    if paged is None:
        raise ValueError("with_pages: expected a cache with pages, got none; use the layout paged")
    slot_1S = jnp.arange(paged.capacity, dtype=jnp.int32)[None, :]
    # Made anew: a page that is given to a column may hold anything, NaN too, and no old position may vouch for it.
    position_BS = jnp.where(slot_1S < length_B[:, None], slot_1S, visibility.EMPTY)
    positions = tuple(
        position_BS if layout is paged else own for layout, own in zip(cache.layouts, cache.positions, strict=True)
    )
    return dataclasses.replace(cache, positions=positions, pages_BC=pages_BC, shared_B=shared_B, length_B=length_B)


def copy_pages(cache: KVCache, from_N: jax.Array, to_N: jax.Array) -> KVCache:
    """Copies pages of every layer that has some, pair by pair; see ``page_pool.copy_pages``."""
    stores = tuple(
        LayerStore(
            keys=page_pool.copy_pages(store.keys, from_N, to_N), values=page_pool.copy_pages(store.values, from_N, to_N)
        )
        if cache.has_pages(idx)
        else store
        for idx, store in enumerate(cache.stores)
    )
    return dataclasses.replace(cache, stores=stores)
