"""RMSNorm (Zhang and Sennrich 2019), plain and in the 1 + w form of Gemma."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdecode.models import linear


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last axis and multiplies by ``scale + offset``, in float32.

    Attributes:
      epsilon: added to the mean square.
      offset: 0, or 1 where files hold ``scale - 1``.
      axis: the logical name of the last axis.
    """

    epsilon: float
    offset: float = 0.0
    axis: str = "embed"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        ones = nn.initializers.constant(1.0 - self.offset)
        scale = linear.parameter(self, "scale", ones, x.shape[-1:], (self.axis,))
        x32 = x.astype(jnp.float32)
        root = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.epsilon)
        scale = (scale.astype(jnp.float32) + self.offset).reshape((1,) * (x.ndim - 1) + (-1,))
        return (x32 * root * scale).astype(x.dtype)
