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
    k_BSKH = jnp.concatenate([s.keys.block(0, s.keys.num_slots) for s in segments], axis=1).astype(jnp.float32)
    v_BSKH = jnp.concatenate([s.values.block(0, s.values.num_slots) for s in segments], axis=1).astype(jnp.float32)
    position_BS = jnp.concatenate([s.position_BS for s in segments], axis=1)
    K = k_BSKH.shape[2]
    q_BTKGH = q_BTNH.astype(jnp.float32).reshape(B, T, K, N // K, H)

    score_BKGTS = visibility.soft_capped(scale * jnp.einsum("BTKGH,BSKH->BKGTS", q_BTKGH, k_BSKH), soft_cap)
    mask_BTS = visibility.visible(query_position_BT, position_BS, window=window, num_sinks=num_sinks)
    mask_BKGTS = mask_BTS[:, None, None]
    weight_BKGTS = jax.nn.softmax(jnp.where(mask_BKGTS, score_BKGTS, -jnp.inf), axis=-1, where=mask_BKGTS)
    weight_BKGTS = jnp.where(mask_BKGTS, weight_BKGTS, 0.0)
    # Zero times NaN is NaN, so what an empty slot happens to hold must not reach the product.
    v_BSKH = jnp.where(visibility.held(position_BS)[:, :, None, None], v_BSKH, 0.0)
    out_BTKGH = jnp.einsum("BKGTS,BSKH->BTKGH", weight_BKGTS, v_BSKH)
    return out_BTKGH.reshape(B, T, N, H).astype(q_BTNH.dtype)
