"""Forks of paged rows: who keeps which page when rows are taken, repeated or left out.

A page that is full is never written again, so all rows that hold it share it. The page in which a text ends, and the
pages after it, belong to one row each::

    two forks of a text of 2 Z + 1 tokens      row 0   | 0 | 1 | 2 | 3 |
                                               row 1   | 0 | 1 | 4 | 5 |      page 4 begins as a copy of page 2

So nobody ever has to copy a page before a write, and the device loop knows nothing of sharing. What rows share is
theirs to read: a row may not be taken back into it (``check_rollback``).

Pages are full of what is stored. Where that is whole groups of tokens, a text ends at its last settled group
(``codec.KVCodec.stored_len``): the page in which a later group will be written belongs to one row, though all of its
tokens are known.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import core

from jdecode import shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Fork:
    """The tables of R rows in a pool of their own.

    Attributes:
      pages_RC: int32, the page of each column in the new pool; ids past it where it is too small.
      shared_R: int32, how many of a row's first tokens lie in pages up to the last that another row holds too.
      source_P: int32, for each page of the new pool the page of the old one that it begins as; past the old pool for
        none.
    """

    pages_RC: jax.Array
    shared_R: jax.Array
    source_P: jax.Array


def fork(
    pages_BC: jax.Array, stored_len_B: jax.Array, row_idx: jax.Array, *, page_len: int, num_old: int, num_new: int
) -> Fork:
    """Plans the pool of the rows ``row_idx``.

    Args:
      pages_BC: int32, the table of the old rows.
      stored_len_B: int32, how many of their tokens are stored in pages.
      row_idx: int32 (R,), which of them the new ones are; rows may repeat.
      page_len: Z. Static.
      num_old, num_new: pages of the two pools; ``least_pages`` are enough. Static.
    """
    old_RC = jnp.take(pages_BC, row_idx, axis=0)
    length_R1 = jnp.take(stored_len_B, row_idx)[:, None]
    column_1C = jnp.arange(old_RC.shape[1], dtype=jnp.int32)[None, :]
    is_full_RC = column_1C < length_R1 // page_len
    is_last_RC = (column_1C == length_R1 // page_len) & (length_R1 % page_len > 0)
    # Of all that list a full page, the first holds it.
    place_RC = jnp.arange(old_RC.size, dtype=jnp.int32).reshape(old_RC.shape)
    listed_RC = jnp.where(is_full_RC, old_RC, num_old)
    first_P = jnp.full(num_old, old_RC.size, jnp.int32).at[listed_RC].min(place_RC, mode="drop")
    first_RC = jnp.minimum(first_P.at[listed_RC].get(mode="fill", fill_value=old_RC.size), place_RC)
    is_holder_RC = first_RC == place_RC
    new_X = jnp.cumsum(is_holder_RC.reshape(-1), dtype=jnp.int32) - 1
    pages_RC = new_X[first_RC]
    filled_RC = jnp.where(is_holder_RC & (is_full_RC | is_last_RC), pages_RC, num_new)
    source_P = jnp.full(num_new, num_old, jnp.int32).at[filled_RC].set(old_RC, mode="drop")
    held_P = jnp.zeros(num_new, jnp.int32).at[jnp.where(is_full_RC, pages_RC, num_new)].add(1, mode="drop")
    is_shared_RC = is_full_RC & (held_P.at[pages_RC].get(mode="fill", fill_value=0) > 1)
    shared_R = page_len * jnp.max(jnp.where(is_shared_RC, column_1C + 1, 0), axis=1)
    return Fork(pages_RC=pages_RC, shared_R=shared_R, source_P=source_P)


def least_pages(pages_BC: np.ndarray, stored_len_B: np.ndarray, row_idx: np.ndarray, page_len: int) -> int:
    """Returns how many pages the rows ``row_idx`` need for texts as long as the table is wide. On the host."""
    num_columns = pages_BC.shape[1]
    num_full = stored_len_B[row_idx] // page_len
    shared = {int(page) for row, full in zip(row_idx, num_full, strict=True) for page in pages_BC[row, :full]}
    return len(shared) + int((num_columns - num_full).sum())


def padded_pages(num_pages: int) -> int:
    """Rounds a number of pages up to one of eight between a power of two and the next: few programs are compiled."""
    return shapes.round_up(num_pages, max(shapes.power_of_two_at_least(num_pages) // 16, 1))


def check_rollback(shared_B: jax.Array, length_B: jax.Array) -> None:
    """Refuses to take rows back into pages that other rows read too. Does nothing where the numbers are traced.

    Raises:
      ValueError: a length is under what the row shares.
    """
    if isinstance(shared_B, core.Tracer) or isinstance(length_B, core.Tracer):
        return
    for row, (shared, length) in enumerate(zip(np.asarray(shared_B), np.asarray(length_B), strict=True)):
        if length < shared:
            raise ValueError(
                f"row {row}: expected a length of at least the {shared} tokens whose pages other rows share, got "
                f"{length}; take the row alone first (take_rows)"
            )
