"""The Walsh-Hadamard rotation of the head width: it spreads outliers over the channels, and changes no score.

Keys have a few channels that are far larger than the others, and one scale for all of a head's channels must cover
them, so that the rest is stored in few steps. A rotation R of queries and keys alike changes no score, for
``(R q) . (R k) = q . k``; after it all channels are of about one size. (Used for quantised caches by Ashkboos et al.
2024, "QuaRot", section 4.)
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np


def rotate(x_BTNH: jax.Array) -> jax.Array:
    """Rotates each head: float32, computed in float32. Twice is as good as never.

    A width that is no power of two is rotated in runs of its greatest divisor that is one: 96 in three runs of 32.
    """
    matrix_XX = hadamard(x_BTNH.shape[-1] & -x_BTNH.shape[-1])
    x_BTNRX = x_BTNH.astype(jnp.float32).reshape(*x_BTNH.shape[:-1], -1, matrix_XX.shape[0])
    return jnp.matmul(x_BTNRX, matrix_XX, precision=jax.lax.Precision.HIGHEST).reshape(x_BTNH.shape)


@functools.cache
def hadamard(size: int) -> np.ndarray:
    """Returns the orthonormal Hadamard matrix of Sylvester's construction, float32; ``size`` is a power of two."""
    idx = np.arange(size)
    num_common_ones = np.bitwise_count(idx[:, None] & idx[None, :])
    return np.where(num_common_ones % 2, -1.0, 1.0).astype(np.float32) / np.float32(np.sqrt(size))
