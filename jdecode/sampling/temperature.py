"""The temperature: how far the draw may stray from the argmax."""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.sampling import protocol, selection

# Below the smallest normal float32 a temperature is 0: hardware flushes such numbers, and dividing by them gives NaN.
_SMALLEST_TEMPERATURE = float(jnp.finfo(jnp.float32).tiny)


def is_random(temperature_B: jax.Array) -> jax.Array:
    """Returns bool [B]: whether a row draws; the others take the argmax."""
    return temperature_B >= _SMALLEST_TEMPERATURE


@dataclasses.dataclass(frozen=True)
class Temperature:
    """Divides the logits by ``temperature_B``, after subtracting the row's maximum, so that nothing overflows upward.

    A row with temperature 0 becomes the law of its argmax (the lowest id of a tie): 0 there, -inf elsewhere. A row
    without a finite maximum becomes NaN, which the draw reports.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> jax.Array:
        """Returns ``temperature_B``."""
        del batch, vocab
        return params.temperature_B

    def apply(self, logits_BV: jax.Array, state: jax.Array) -> jax.Array:
        """Returns logits whose greatest is 0."""
        top_B1 = jnp.max(logits_BV, axis=-1, keepdims=True)
        id_BV = jax.lax.broadcasted_iota(jnp.int32, logits_BV.shape, 1)
        is_random_B1 = is_random(state)[:, None]
        # Not 0, even where the quotient is not used: it would be NaN, at which jax_debug_nans stops.
        divisor_B1 = jnp.where(is_random_B1, state[:, None], 1)
        argmax_BV = jnp.where(id_BV == selection.first_argmax(logits_BV)[:, None], 0.0, -jnp.inf)
        scaled_BV = jnp.where(is_random_B1, (logits_BV - top_B1) / divisor_B1, argmax_BV)
        return jnp.where(jnp.isfinite(top_B1), scaled_BV, jnp.nan)

    def accept(self, state: jax.Array, token_B: jax.Array, live_B: jax.Array) -> jax.Array:
        """Returns the state as it is."""
        del token_B, live_B
        return state
