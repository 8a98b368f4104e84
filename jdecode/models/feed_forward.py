"""The gated feed-forward layer (Shazeer 2020)."""

import functools

import jax
from flax import linen as nn

from jdecode import config as config_lib
from jdecode.models import linear

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True)}


class FeedForward(nn.Module):
    """Computes ``down(activation(gate(x)) * up(x))``: (B, T, D) to (B, T, D)."""

    config: config_lib.ModelConfig
    dtype: str

    @nn.compact
    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        config = self.config
        D, F = config.hidden_size, config.intermediate_size
        layer = functools.partial(linear.Linear, has_bias=config.feed_forward_bias, dtype=self.dtype)
        gate_BTF = layer((F,), (D,), ("mlp", "embed"), name="gate")(x_BTD)
        up_BTF = layer((F,), (D,), ("mlp", "embed"), name="up")(x_BTD)
        hidden_BTF = ACTIVATIONS[config.activation](gate_BTF) * up_BTF
        return layer((D,), (F,), ("embed", "mlp"), name="down")(hidden_BTF)
