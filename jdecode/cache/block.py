"""Where a block of tokens goes in a cache.

A block of T tokens passes through in three steps::

    block = open_block(cache, T, num_tokens_B)              positions, slots, the position tables after the block
    stored, segments = layer(cache, block, i).append(k, v)  once a layer, see ``layer_view``
    stored = layer(cache, block, i).observe(stored, q, ...) and is counted, where the cache keeps by it
    cache = close_block(cache, block, [stored, ...])        the cache after the block
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import visibility
from jdecode.cache import grouped, kv_cache
from jdecode.cache import layout as layout_lib
from jdecode.cache import slots as slots_lib


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


def open_block(cache: kv_cache.KVCache, block_len: int, num_tokens_B: jax.Array | None) -> Block:
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
            written_BT &= slot_BT < layout.capacity
        else:
            slot_BT = layout.slot(position_BT)
            written_BT &= layout.survives(position_BT, length_B[:, None])
        if cache.max_len is not None:  # in a ring, too, what is past the end must overwrite nothing
            written_BT &= position_BT < cache.max_len
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


def _received(cache: kv_cache.KVCache, idx: int) -> jax.Array | None:
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


def close_block(cache: kv_cache.KVCache, block: Block, stores: Sequence[kv_cache.LayerStore]) -> kv_cache.KVCache:
    """Returns the cache after a block, given each layer's rows after it."""
    return dataclasses.replace(cache, stores=tuple(stores), positions=block.positions, length_B=block.length_B)
