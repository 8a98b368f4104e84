"""Attention by blocks of slots with a running softmax: the FlashAttention algorithm (Dao et al. 2022, §3.1) in XLA.

No T x S matrix exists: for each block of slots the scores (T x block) are formed, and three accumulators are updated::

    m  the greatest score so far        (T,)
    l  the sum of exp(score - m)        (T,)
    o  the sum of exp(score - m) * v    (T, H)

When a block raises m, l and o are scaled down by exp(m_old - m_new) (Milakov and Gimelshein 2018). The blocks run from
the segment's ``first_slot`` to its ``end_slot``, known only on the device: a step costs what is held, not what is
reserved.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block, visibility
from jdecode.attention import segment as segment_lib

BLOCK_SIZE = 256
"""Slots a block. Smaller ones pay the loop more often, larger ones read more empty slots at the end."""


def attend(
    q_BTNH: jax.Array,
    query_position_BT: jax.Array,
    segments: Sequence[segment_lib.Segment],
    *,
    scale: float,
    window: int | None = None,
    num_sinks: int = 0,
    soft_cap: float | None = None,
    block_size: int = BLOCK_SIZE,
) -> jax.Array:
    """Computes what ``reference.attend`` computes, block by block; see there for arguments and result."""
    B, T, N, H = q_BTNH.shape
    K = segments[0].keys.num_heads
    q_BTNH = (scale * q_BTNH).astype(q_BTNH.dtype)
    out_BKGTH = jnp.zeros((B, K, N // K, T, H), jnp.float32)
    sum_BKGT = jnp.zeros((B, K, N // K, T), jnp.float32)
    state = (jnp.full_like(sum_BKGT, -jnp.inf), sum_BKGT, out_BKGTH)
    for segment in segments:
        size = min(block_size, segment.keys.num_slots)
        q_BKGTH = segment.keys.queries(q_BTNH).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)

        def add_block(index: jax.Array, state, segment=segment, size=size, q_BKGTH=q_BKGTH):
            keys, values, position_BC = _block(segment, index, size)
            mask_BTC = segment.mask(query_position_BT, position_BC, window=window, num_sinks=num_sinks)
            return _accumulate(state, q_BKGTH, keys, values, mask_BTC, soft_cap)

        first_block, end_block = segment.first_slot // size, -(-segment.end_slot // size)
        state = jax.lax.fori_loop(first_block, end_block, add_block, state)
    _, sum_BKGT, out_BKGTH = state
    out_BKGTH = out_BKGTH / jnp.where(sum_BKGT == 0, 1.0, sum_BKGT)[..., None]
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _block(
    segment: segment_lib.Segment, index: jax.Array, size: int
) -> tuple[kv_block.KVBlock, kv_block.KVBlock, jax.Array]:
    """Returns the keys, values and positions of block ``index``; values of empty slots are zero.

    The last block of a segment is moved back to end at the last slot, and what the block before has counted already
    is marked empty.
    """
    start = jnp.minimum(index * size, segment.keys.num_slots - size)
    position_BC = jax.lax.dynamic_slice_in_dim(segment.position_BS, start, size, axis=1)
    is_new_C = start + jnp.arange(size) >= index * size
    position_BC = jnp.where(is_new_C[None, :], position_BC, visibility.EMPTY)
    values = segment.values.stored(start, size).only(visibility.held(position_BC))
    return segment.keys.stored(start, size), values, position_BC


def _accumulate(state, q_BKGTH, keys: kv_block.KVBlock, values: kv_block.KVBlock, mask_BTC, soft_cap: float | None):
    """Adds one block of C slots to the running maximum, sum and output."""
    max_BKGT, sum_BKGT, out_BKGTH = state
    score_BKGTC = visibility.soft_capped(keys.scores(q_BKGTH), soft_cap)
    score_BKGTC = jnp.where(mask_BTC[:, None, None], score_BKGTC, -jnp.inf)
    new_max_BKGT = jnp.maximum(max_BKGT, score_BKGTC.max(axis=-1))
    # A query that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: shift it by 0 instead.
    shift_BKGT = jnp.where(new_max_BKGT == -jnp.inf, 0.0, new_max_BKGT)
    weight_BKGTC = jnp.exp(score_BKGTC - shift_BKGT[..., None])
    decay_BKGT = jnp.exp(max_BKGT - shift_BKGT)
    sum_BKGT = sum_BKGT * decay_BKGT + weight_BKGTC.sum(axis=-1)
    return new_max_BKGT, sum_BKGT, out_BKGTH * decay_BKGT[..., None] + values.weighted(weight_BKGTC)
