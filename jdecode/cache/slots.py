"""Writes into slots, row by row of a batch."""

import jax


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
