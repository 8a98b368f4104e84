"""Attention of a block over itself, band by band: what training uses.

Token i of a block sees tokens 0 .. i of the same block, or the last ``window`` of those. So a band of queries needs one
run of keys, whose bounds are known when the program is compiled::

    band of queries   keys it reads, no window     keys it reads, window 2
    0 1               0 1                          0 1
    2 3               0 1 2 3                      1 2 3
    4 5               0 1 2 3 4 5                  3 4 5

Half of the T x T scores are never formed, and with a window all but a stripe. Unlike ``blockwise``, whose trip count
is known only on the device, every loop here is unrolled, and so the whole can be differentiated in reverse.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import segment as segment_lib
from jdecode.attention import visibility

BAND_LEN = 128
"""Queries a band. Narrower ones form fewer scores in vain, wider ones make larger products."""

_HIDDEN = -1e30
"""The score of a hidden key. Finite: the difference of two infinities is NaN."""


def attend(
    q_BTNH: jax.Array,
    query_position_BT: jax.Array,
    segments: Sequence[segment_lib.Segment],
    *,
    scale: float,
    window: int | None = None,
    num_sinks: int = 0,
    soft_cap: float | None = None,
    band_len: int = BAND_LEN,
) -> jax.Array:
    """Computes what ``reference.attend`` computes, for a block that attends to itself alone.

    Args:
      segments: the block, and nothing else (``Segment.is_block``).
      band_len: queries a band. Static.

    Raises:
      ValueError: there is a cache to attend over.
    """
    if len(segments) != 1 or not segments[0].is_block:
        raise ValueError(
            "attention: banded expects a block without a cache, got a cache or sinks inside one; use blockwise or "
            "reference, which read them"
        )
    (segment,) = segments
    B, T, N, H = q_BTNH.shape
    K = segment.keys.num_heads
    q_BKGTH = (scale * q_BTNH).astype(q_BTNH.dtype).reshape(B, T, K, N // K, H).transpose(0, 2, 3, 1, 4)
    k_BTKH, v_BTKH = segment.keys.block(0, T), segment.values.block(0, T)
    # Zero times NaN is NaN, so what padding happens to hold must not reach the product.
    v_BTKH = jnp.where(visibility.held(segment.position_BS)[:, :, None, None], v_BTKH, jnp.zeros((), v_BTKH.dtype))
    band_len = band_len if window is None else min(band_len, max(window, 16))
    bands = []
    for start in range(0, T, band_len):
        end = min(start + band_len, T)
        first = 0 if window is None or num_sinks else max(0, start - window + 1)
        mask_BTC = visibility.visible(
            query_position_BT[:, start:end], segment.position_BS[:, first:end], window=window, num_sinks=num_sinks
        )
        bands.append(_band(q_BKGTH[:, :, :, start:end], k_BTKH[:, first:end], v_BTKH[:, first:end], mask_BTC, soft_cap))
    out_BKGTH = jnp.concatenate(bands, axis=3)
    return out_BKGTH.transpose(0, 3, 1, 2, 4).reshape(B, T, N, H).astype(q_BTNH.dtype)


def _band(q_BKGTH, k_BCKH, v_BCKH, mask_BTC, soft_cap: float | None) -> jax.Array:
    """Attends from one band of queries over its C keys: float32 (B, K, G, T, H)."""
    mask_BKGTC = mask_BTC[:, None, None]
    score_BKGTC = jnp.einsum("BKGTH,BCKH->BKGTC", q_BKGTH, k_BCKH, preferred_element_type=jnp.float32)
    score_BKGTC = jnp.where(mask_BKGTC, visibility.soft_capped(score_BKGTC, soft_cap), _HIDDEN)
    max_BKGT1 = jax.lax.stop_gradient(score_BKGTC.max(axis=-1, keepdims=True))
    weight_BKGTC = jnp.exp(score_BKGTC - max_BKGT1)
    # A query that sees nothing has the maximum _HIDDEN and would weigh every key alike; one that sees NaN keeps NaN.
    weight_BKGTC = jnp.where(max_BKGT1 <= _HIDDEN, 0.0, weight_BKGTC)
    sum_BKGT1 = weight_BKGTC.sum(axis=-1, keepdims=True)
    out_BKGTH = jnp.einsum(
        "BKGTC,BCKH->BKGTH", weight_BKGTC.astype(v_BCKH.dtype), v_BCKH, preferred_element_type=jnp.float32
    )
    return out_BKGTH / jnp.where(sum_BKGT1 == 0, 1.0, sum_BKGT1)
