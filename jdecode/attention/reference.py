"""Attention as its equation reads, with the whole T x S matrix in memory. Every other backend is tested against it."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import segment as segment_lib
from jdecode.attention import visibility


def attend(
    q_BTNH: jax.Array,
    query_position_BT: jax.Array,
    segments: Sequence[segment_lib.Segment],
    *,
    scale: float,
    window: int | None = None,
    num_sinks: int = 0,
    soft_cap: float | None = None,
) -> jax.Array:
    """Computes ``softmax(mask(cap(scale * q k^T))) v`` (Vaswani et al. 2017, §3.2.1), for grouped heads.

    Query head n reads key/value head ``n // G`` (Ainslie et al. 2023).

    Args:
      q_BTNH: queries, any float dtype.
      query_position_BT: int32, their absolute positions.
      segments: what to attend over, all of it together.
      scale, window, num_sinks, soft_cap: static; see ``ModelConfig`` and ``visibility.visible``.

    Returns:
      (B, T, N, H) in the dtype of ``q_BTNH``. A query that sees no key gets zeros.
    """
    B, T, N, H = q_BTNH.shape
    K = segments[0].keys.num_heads
    score_BKGTS = jnp.concatenate([_scores(q_BTNH, segment.keys, K) for segment in segments], axis=4)
    score_BKGTS = visibility.soft_capped(scale * score_BKGTS, soft_cap)
    masks = [s.mask(query_position_BT, s.position_BS, window=window, num_sinks=num_sinks) for s in segments]
    mask_BTS = jnp.concatenate(masks, axis=2)
    mask_BKGTS = mask_BTS[:, None, None]
    weight_BKGTS = jax.nn.softmax(jnp.where(mask_BKGTS, score_BKGTS, -jnp.inf), axis=-1, where=mask_BKGTS)
    weight_BKGTS = jnp.where(mask_BKGTS, weight_BKGTS, 0.0)
    out_BKGTH, start = jnp.zeros((B, K, N // K, T, H), jnp.float32), 0
    for segment in segments:
        num_slots = segment.values.num_slots
        values = segment.values.stored(0, num_slots).only(visibility.held(segment.position_BS)).widened()
        out_BKGTH += values.weighted(weight_BKGTS[..., start : start + num_slots])
        start += num_slots
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _scores(q_BTNH: jax.Array, keys: segment_lib.Rows, K: int) -> jax.Array:
    """Returns the products with every slot, float32 (B, K, G, T, S)."""
    B, T, N, H = q_BTNH.shape
    q_BTKGH = keys.queries(q_BTNH.astype(jnp.float32)).reshape(B, T, K, N // K, H)
    return keys.stored(0, keys.num_slots).widened().scores(q_BTKGH.transpose(0, 2, 3, 1, 4))
