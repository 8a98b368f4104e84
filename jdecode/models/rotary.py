"""Rotary position embedding (Su et al. 2021), in the half-split form: channel i turns with channel i + H/2."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib


def inverse_frequencies(rope: config_lib.RopeConfig, head_dim: int) -> np.ndarray:
    """Returns the angle, in radians a position, by which each of the H/2 pairs turns: float32, (H/2,)."""
    exponent = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
    frequencies = rope.theta**-exponent
    if rope.scaling == "linear":
        frequencies = frequencies / rope.factor
    elif rope.scaling == "llama3":
        frequencies = _llama3_scaled(frequencies, rope)
    return frequencies.astype(np.float32)


def _llama3_scaled(frequencies: np.ndarray, rope: config_lib.RopeConfig) -> np.ndarray:
    """Divides the frequencies whose wavelength exceeds the trained length, and blends over a band (Llama 3.1)."""
    turns = rope.original_max_positions * frequencies / (2 * math.pi)
    kept_share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept_share = np.clip(kept_share, 0.0, 1.0)
    return kept_share * frequencies + (1 - kept_share) * frequencies / rope.factor


def rotate(x_BTNH: jax.Array, position_BT: jax.Array, rope: config_lib.RopeConfig) -> jax.Array:
    """Turns each pair of channels by its frequency times the position.

    Args:
      x_BTNH: queries or keys (any number of heads, any float dtype).
      position_BT: int32, absolute positions.
      rope: static.

    Returns:
      The same shape and dtype; the angles and products are float32.
    """
    frequencies = jnp.asarray(inverse_frequencies(rope, x_BTNH.shape[-1]))
    angle_BT1H = position_BT[:, :, None, None].astype(jnp.float32) * frequencies[None, None, None, :]
    cos_BT1H, sin_BT1H = jnp.cos(angle_BT1H), jnp.sin(angle_BT1H)
    first_BTNH, second_BTNH = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    turned = (first_BTNH * cos_BT1H - second_BTNH * sin_BT1H, second_BTNH * cos_BT1H + first_BTNH * sin_BT1H)
    return jnp.concatenate(turned, axis=-1).astype(x_BTNH.dtype)
