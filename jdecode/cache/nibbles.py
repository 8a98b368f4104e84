"""Two numbers of 4 bits in a byte."""

import jax
import jax.numpy as jnp

LEAST, MOST = -8, 7
"""The numbers that 4 bits hold."""


def pack(code_H: jax.Array) -> jax.Array:
    """Packs numbers (int8, any shape, the last axis even): uint8, half as many.

    Byte j holds number j in its low half and number ``j + H / 2`` in its high half, so that to unpack is to lay two
    halves end to end, and no byte is shared by two heads.
    """
    low, high = jnp.split((code_H - LEAST).astype(jnp.uint8), 2, axis=-1)
    return low | (high << 4)


def unpack(packed_X: jax.Array) -> jax.Array:
    """Undoes ``pack``: int8, twice as many on the last axis."""
    return jnp.concatenate([packed_X & 15, packed_X >> 4], axis=-1).astype(jnp.int8) + jnp.int8(LEAST)
