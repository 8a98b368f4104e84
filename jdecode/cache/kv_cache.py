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
from jdecode.cache import layout as layout_lib
from jdecode.cache import slots as slots_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerStore:
    """The rows of one layer."""

    keys: codec_lib.StoredRows
    values: codec_lib.StoredRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
    """Keys and values of every layer for B rows of text.

    Attributes:
      stores: one ``LayerStore`` a layer.
      positions: one int32 (B, S) table a layout: the absolute position that each slot holds, or ``EMPTY``.
      length_B: int32, the tokens that each row has seen.
      layouts: the distinct layouts. Static.
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
    """

    position_BT: jax.Array
    stored_position_BT: jax.Array
    length_B: jax.Array
    slots: tuple[jax.Array, ...]
    positions: tuple[jax.Array, ...]


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
        # Past the last slot, and distinct: such writes are dropped. (Clamping or -1 would hit a live slot.)
        dropped_BT = layout.capacity + jnp.broadcast_to(jnp.arange(block_len, dtype=jnp.int32), position_BT.shape)
        slot_BT = jnp.where(written_BT, layout.slot(position_BT), dropped_BT)
        slots.append(slot_BT)
        positions.append(slots_lib.scatter(position_BS, slot_BT, stored_position_BT))
    return Block(
        position_BT=position_BT,
        stored_position_BT=stored_position_BT,
        length_B=length_B,
        slots=tuple(slots),
        positions=tuple(positions),
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
        cache, block, codec = self.cache, self.block, self.cache.codec
        block_len = k_BTKH.shape[1]
        k_BTKH, v_BTKH = segment_lib.faults_in_keys(codec.keys.cast(k_BTKH), codec.values.cast(v_BTKH))
        fresh = LayerStore(keys=codec.keys.encode(k_BTKH), values=codec.values.encode(v_BTKH))
        idx = cache.layout_idx[self.layer_idx]
        layout, old = cache.layouts[idx], cache.stores[self.layer_idx]
        new = LayerStore(
            keys=codec.keys.write(old.keys, block.slots[idx], fresh.keys),
            values=codec.values.write(old.values, block.slots[idx], fresh.values),
        )
        if block_len <= layout.max_block_len:
            return new, (self._stored_segment(new, block.positions[idx], block.length_B),)
        fresh_segment = segment_lib.Segment(
            keys=fresh.keys,
            values=fresh.values,
            position_BS=block.stored_position_BT,
            first_slot=jnp.int32(0),
            end_slot=jnp.int32(block_len),
            is_block=True,
        )
        # The old slots still hold tokens that were taken back; in the fresh block others have their positions.
        is_kept_BS = cache.positions[idx] < cache.length_B[:, None]
        kept_position_BS = jnp.where(is_kept_BS, cache.positions[idx], visibility.EMPTY)
        return new, (self._stored_segment(old, kept_position_BS, cache.length_B), fresh_segment)

    def _stored_segment(self, store: LayerStore, position_BS: jax.Array, length_B: jax.Array) -> segment_lib.Segment:
        layout = self.cache.layouts[self.cache.layout_idx[self.layer_idx]]
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
