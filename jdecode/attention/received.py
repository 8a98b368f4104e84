"""How much attention each slot gets: the weights of a block's queries, summed over queries and heads.

It is what methods that keep a part of a cache decide by (Zhang et al. 2023, "H2O", section 4; Li et al. 2024, "SnapKV",
section 4). Attention backends do not give their weights away, and those with a running softmax never have them; so the
scores are formed a second time, keys alone, in two passes over the blocks of slots that are held::

    m, l      the greatest score, and the sum of exp(score - m), of each query     as in ``blockwise``
    received  the sum over queries and heads of exp(score - m) / l                 for each slot
"""

import jax
import jax.numpy as jnp

from jdecode.attention import blockwise, visibility
from jdecode.attention import segment as segment_lib


def received(
    q_BTNH: jax.Array,
    query_position_BT: jax.Array,
    real_BT: jax.Array,
    segment: segment_lib.Segment,
    *,
    scale: float,
    window: int | None = None,
    num_sinks: int = 0,
    soft_cap: float | None = None,
    block_size: int = blockwise.BLOCK_SIZE,
) -> jax.Array:
    """Sums the softmaxed weights of queries by slot.

    Args:
      q_BTNH: queries, any float dtype.
      query_position_BT: int32, their absolute positions.
      real_BT: bool, which of them count.
      segment: all that they attend over.
      scale, window, num_sinks, soft_cap: as in ``reference.attend``. Static.
      block_size: slots a block. Static.

    Returns:
      float32 (B, S); a row adds up to N times its queries that count and see any key.
    """
    B, T, N, H = q_BTNH.shape
    K, S = segment.keys.num_heads, segment.keys.num_slots
    size = min(block_size, S)
    q_BTNH = segment.keys.queries((scale * q_BTNH).astype(q_BTNH.dtype))
    q_BKGTH = q_BTNH.reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    first_block, end_block = segment.first_slot // size, -(-segment.end_slot // size)

    def scores(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the masked scores of a block, (B, K, G, T, C), and its first slot; see ``blockwise``."""
        start = jnp.minimum(index * size, S - size)
        position_BC = jax.lax.dynamic_slice_in_dim(segment.position_BS, start, size, axis=1)
        is_new_C = start + jnp.arange(size) >= index * size  # the last block is moved back to end at the last slot
        position_BC = jnp.where(is_new_C[None, :], position_BC, visibility.EMPTY)
        mask_BTC = visibility.visible(query_position_BT, position_BC, window=window, num_sinks=num_sinks)
        score_BKGTC = visibility.soft_capped(segment.keys.stored(start, size).scores(q_BKGTH), soft_cap)
        return jnp.where((mask_BTC & real_BT[:, :, None])[:, None, None], score_BKGTC, -jnp.inf), start

    def shifted(score_BKGTC: jax.Array, max_BKGT: jax.Array) -> jax.Array:
        # A query that has seen nothing yet has maximum -inf, and -inf - -inf is NaN: shift it by 0 instead.
        return jnp.exp(score_BKGTC - jnp.where(max_BKGT == -jnp.inf, 0.0, max_BKGT)[..., None])

    def normalise(index: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        max_BKGT, sum_BKGT = state
        score_BKGTC, _ = scores(index)
        new_max_BKGT = jnp.maximum(max_BKGT, score_BKGTC.max(axis=-1))
        decay_BKGT = shifted(max_BKGT[..., None], new_max_BKGT)[..., 0]
        return new_max_BKGT, sum_BKGT * decay_BKGT + shifted(score_BKGTC, new_max_BKGT).sum(axis=-1)

    zeros_BKGT = jnp.zeros((B, K, N // K, T), jnp.float32)
    state = (jnp.full_like(zeros_BKGT, -jnp.inf), zeros_BKGT)
    max_BKGT, sum_BKGT = jax.lax.fori_loop(first_block, end_block, normalise, state)
    share_BKGT1 = (1 / jnp.where(sum_BKGT == 0, 1.0, sum_BKGT))[..., None]

    def add(index: jax.Array, total_BS: jax.Array) -> jax.Array:
        score_BKGTC, start = scores(index)
        more_BC = (shifted(score_BKGTC, max_BKGT) * share_BKGT1).sum(axis=(1, 2, 3))
        old_BC = jax.lax.dynamic_slice_in_dim(total_BS, start, size, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(total_BS, old_BC + more_BC, start, axis=1)

    with jax.named_scope("received"):
        return jax.lax.fori_loop(first_block, end_block, add, jnp.zeros((B, S), jnp.float32))
