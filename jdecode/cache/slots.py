"""Writes into slots, row by row of a batch."""

import jax
import jax.numpy as jnp

from jdecode.attention import visibility


def scatter(data_BS: jax.Array, slot_BT: jax.Array, new_BT: jax.Array, *, axis: int = 1) -> jax.Array:
    """Writes ``new_BT[b, t]`` to ``data_BS[b, slot_BT[b, t]]``; slots past the last are dropped.

    Args:
      data_BS: (B, S, ...), or with the slots along ``axis``.
      slot_BT: int32, distinct within a batch row, none negative.
      new_BT: like ``data_BS``, with T slots.
      axis: of the slots, 1 or more. Static.
    """

    def write_row(row: jax.Array, slot_T: jax.Array, new: jax.Array) -> jax.Array:
        at = row.at[(*[slice(None)] * (axis - 1), slot_T)]
        return at.set(new, mode="drop", unique_indices=True)

    return jax.vmap(write_row)(data_BS, slot_BT, new_BT)


def gather(data_BS: jax.Array, slot_BX: jax.Array, *, axis: int = 1, filler: int = 0) -> jax.Array:
    """Returns ``data_BS[b, slot_BX[b, x]]``, and ``filler`` for slots past the last.

    Args:
      data_BS: (B, S, ...), or with the slots along ``axis``.
      slot_BX: int32, none negative.
      axis: of the slots, 1 or more. Static.
      filler: static.
    """

    def take_row(row: jax.Array, slot_X: jax.Array) -> jax.Array:
        return jnp.take(row, slot_X, axis=axis - 1, mode="fill", fill_value=filler)

    return jax.vmap(take_row)(data_BS, slot_BX)


def end_of_held(position_BS: jax.Array) -> jax.Array:
    """Returns one more than the last slot that holds a position in any row: int32 scalar."""
    return jnp.max(jnp.where(visibility.held(position_BS), jnp.arange(1, position_BS.shape[1] + 1)[None, :], 0))
