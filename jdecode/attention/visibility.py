"""The one rule of visibility: a mask is a function of positions, never of slots.

A query at position q sees the key at position p iff p is held, ``p <= q``, and either ``q - p < window`` or p is a
sink. Padding, ring buffers, rejected drafts and unmapped memory need no rule of their own: their slots carry
``EMPTY``, or a position past the query's.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

EMPTY = np.int32(np.iinfo(np.int32).max)
"""The position of a slot that holds nothing: later than every query, so that ``p <= q`` is never true of it."""


def visible(
    query_position_BT: jax.Array, key_position_BS: jax.Array, *, window: int | None, num_sinks: int
) -> jax.Array:
    """Says which keys each query sees.

    Args:
      query_position_BT: int32, absolute positions.
      key_position_BS: int32, absolute positions, or ``EMPTY``.
      window: keys further back than ``window - 1`` positions are hidden; ``None`` hides none. Static.
      num_sinks: positions under it stay visible whatever the window (Xiao et al. 2024, §3.2). Static.

    Returns:
      bool, (B, T, S).
    """
    query_BT1 = query_position_BT[:, :, None]
    key_B1S = key_position_BS[:, None, :]
    seen_BTS = key_B1S <= query_BT1
    if window is None:
        return seen_BTS
    near_BTS = query_BT1 - key_B1S < window
    if num_sinks:
        near_BTS |= key_B1S < num_sinks
    return seen_BTS & near_BTS


def held(key_position_BS: jax.Array) -> jax.Array:
    """Says which slots hold a key: bool, (B, S)."""
    return key_position_BS != EMPTY


def soft_capped(scores: jax.Array, cap: float | None) -> jax.Array:
    """Bounds scores to ``(-cap, cap)`` by ``cap * tanh(scores / cap)`` (Gemma 2 report, §2); ``None`` leaves them."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settling:
    """Says from when on a group of tokens is settled, that is, stored all together. Static.

    Group g holds the positions ``g * group_len .. (g + 1) * group_len - 1``. A query at position q sees it settled iff
    ``(g + 1) * group_len + lag <= q + 1``: when ``lag`` tokens have come after it. That is a function of positions
    alone, so how a text was cut into blocks, and what was taken back, changes nothing.
    """

    group_len: int
    lag: int

    def end(self, length: jax.Array) -> jax.Array:
        """Returns how many positions (int32, of any shape) the latest token of a text of ``length`` sees settled."""
        return jnp.maximum(length - self.lag, 0) // self.group_len * self.group_len


@dataclasses.dataclass(frozen=True, kw_only=True)
class Share:
    """The visible keys that a segment stands for: those of settled groups, or the others. Static."""

    settling: Settling
    is_settled: bool

    def covers(self, query_position_BT: jax.Array, key_position_BS: jax.Array) -> jax.Array:
        """Says which keys the segment stands for: bool, (B, T, S)."""
        is_settled_BTS = key_position_BS[:, None, :] < self.settling.end(query_position_BT + 1)[:, :, None]
        return is_settled_BTS == self.is_settled
