"""Which tokens end a text."""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import shapes
from jdecode.decode import state

LEAST_WIDTH = 8
"""Padded width of short lists of stop ids, so that their number seldom compiles anything."""


def stop_ids(
    end_token_ids: Iterable[int], stop_token_ids: Iterable[int], *, ignore_eos: bool, vocab_size: int
) -> tuple[int, ...]:
    """Unites the model's own end tokens and the caller's.

    Args:
      end_token_ids: all that the model's files name.
      stop_token_ids: the caller's.
      ignore_eos: leaves out the model's own, unless the caller names them too.

    Raises:
      ValueError: one of the caller's ids is not in the vocabulary.
    """
    own = set(stop_token_ids)
    for token_id in sorted(own):
        if not isinstance(token_id, int | np.integer) or not 0 <= token_id < vocab_size:
            raise ValueError(f"stop_token_ids: expected ids from 0 to {vocab_size - 1}, got {token_id!r}")
    return tuple(sorted(own if ignore_eos else own | set(end_token_ids)))


def padded(rows: Sequence[Sequence[int]]) -> jax.Array:
    """Returns lists of stop ids as int32 (B, X), X a power of two, padded with ``state.NO_STOP_ID``."""
    width = max([LEAST_WIDTH, *(shapes.power_of_two_at_least(len(row)) for row in rows)])
    ids_BX = np.full((len(rows), width), state.NO_STOP_ID, np.int32)
    for row, ids in enumerate(rows):
        ids_BX[row, : len(ids)] = ids
    return jnp.asarray(ids_BX)
