"""The key/value cache: an immutable pytree that a model takes and returns.

Every layer has rows of keys and of values (stored by the codec). Layers of one layout share the table that says which
absolute position each slot holds. ``length_B`` counts the tokens that each row has seen: batches are ragged by nature.

A block of T tokens passes through a cache in three steps::

    block = open_block(cache, T, num_tokens_B)              positions, slots, the position tables after the block
    stored, segments = layer(cache, block, i).append(k, v)  once a layer; attention runs over the segments
    cache = close_block(cache, block, [stored, ...])        the cache after the block

``append`` writes the block and lets it attend over the written cache where that is safe. A block too long for a ring
(see ``layout_ring``) attends to the old ring and to itself instead, and then its tail is written. Either way token i
sees exactly what ``attention.visibility`` says.

A codec may store tokens by groups (``grouped``). A layer then has its latest tokens beside its groups, and a block
writes the groups that settle with it before it attends.

Rollback is a length: ``truncate`` lowers ``length_B``. The slots of the cut tokens keep positions past the new length,
where no query sees them, and the next block overwrites them (or, where it attends to the old ring, hides them).
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import segment as segment_lib
from jdecode.attention import visibility
from jdecode.cache import codec as codec_lib
from jdecode.cache import grouped
from jdecode.cache import layout as layout_lib
from jdecode.cache import slots as slots_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStore:
    """The rows of one layer; where those are stored by groups, ``recent`` has the latest tokens as they are."""

    keys: segment_lib.Rows
    values: segment_lib.Rows
    recent: "LayerStore | None" = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer for B rows of text.

    Attributes:
      stores: one ``LayerStore`` a layer.
      positions: one int32 (B, S) table a layout: the absolute position that each slot holds, or ``EMPTY``.
      length_B: int32, the tokens that each row has seen.
      layouts: the distinct layouts; that of ``recent`` is one of them. Static.
      layout_idx: for each layer, which of ``layouts`` is its own. Static.
      codec: how rows are stored. Static.
    """

    stores: tuple[LayerStore, ...]
    positions: tuple[jax.Array, ...]
    length_B: jax.Array
    layouts: tuple[layout_lib.Layout, ...] = dataclasses.field(metadata={"static": True})
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
    for layout, position_BS in zip(cache.layouts, cache.positions, strict=True):
        written_BT = (stored_position_BT != visibility.EMPTY) & layout.survives(position_BT, length_B[:, None])
        if cache.max_len is not None:  # in a ring, too, what is past the end must overwrite nothing
            written_BT &= position_BT < cache.max_len
        # Past the last slot, and distinct: such writes are dropped. (Clamping or -1 would hit a live slot.)
        dropped_BT = layout.capacity + jnp.broadcast_to(jnp.arange(block_len, dtype=jnp.int32), position_BT.shape)
        slot_BT = jnp.where(written_BT, layout.slot(position_BT), dropped_BT)
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
        new = _written(codec, old, block.slots[idx], fresh)
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
        layout, block_len = cache.layouts[idx], block.position_BT.shape[1]
        slot_BX, token_BX = settled.slots(layout), settled.slots_of_tokens(grouping.layout, cache.length_B, tokens)

        def encoded(token_BX: jax.Array) -> LayerStore:
            k_BXKH, v_BXKH = grouped.take_tokens(tokens, token_BX)
            return LayerStore(keys=codec.keys.encode(k_BXKH), values=codec.values.encode(v_BXKH))

        if len(tokens) == 1:

            def write_group(turn: jax.Array, own: LayerStore) -> LayerStore:
                token_BZ, slot_BZ = (settled.group(x_BX, turn) for x_BX in (token_BX, slot_BX))
                return _written(codec, own, slot_BZ, encoded(token_BZ))

            # Mostly of no turn. (A condition would copy the rows that pass through it.)
            new = jax.lax.fori_loop(0, settled.num_groups, write_group, old)
        else:
            fresh = encoded(token_BX)
            new = _written(codec, old, slot_BX, fresh)
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

    def _stored_segment(
        self, layout_idx: int, store: LayerStore, position_BS: jax.Array, length_B: jax.Array
    ) -> segment_lib.Segment:
        layout = self.cache.layouts[layout_idx]
        first_slot = jnp.int32(0)
        if self.window is not None and not self.num_sinks and layout.max_len is not None:
            # Slots in the order of positions: those before the window of every row need not be read.
            first_slot = jnp.maximum(self.block.position_BT[:, 0].min() - (self.window - 1), 0)
        return segment_lib.Segment(
            keys=store.keys,
            values=store.values,
            position_BS=position_BS,
            first_slot=first_slot,
            end_slot=jnp.minimum(length_B.max(), layout.capacity),
        )


def _written(codec: codec_lib.KVCodec, old: LayerStore, slot_BT: jax.Array, fresh: LayerStore) -> LayerStore:
    return LayerStore(
        keys=codec.keys.write(old.keys, slot_BT, fresh.keys),
        values=codec.values.write(old.values, slot_BT, fresh.values),
    )


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


def close_block(cache: KVCache, block: Block, stores: Sequence[LayerStore]) -> KVCache:
    """Returns the cache after a block, given each layer's rows after it."""
    return dataclasses.replace(cache, stores=tuple(stores), positions=block.positions, length_B=block.length_B)


def truncate(cache: KVCache, length_B: jax.Array) -> KVCache:
    """Takes back each row's latest tokens, so that it has seen ``length_B`` (int32) tokens.

    No row may lose more than ``cache.max_rollback`` tokens that it has seen at its longest; longer lengths than a
    row's own leave it as it is.
    """
    return dataclasses.replace(cache, length_B=jnp.minimum(cache.length_B, length_B))


def take_rows(cache: KVCache, row_idx: jax.Array) -> KVCache:
    """Returns a cache whose row i is row ``row_idx[i]`` (int32) of this one; rows may repeat."""
    return jax.tree.map(lambda leaf: jnp.take(leaf, row_idx, axis=0), cache)
