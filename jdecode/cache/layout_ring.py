"""The ring buffer: a layer with a window needs only the latest positions, and perhaps the first ones (sinks).

::

    slot      0 .. N-1        N .. N+R-1
    holds     sinks: p = s    the latest R positions from N on: p = N + (p - N) mod R

R is the window W plus slack. Two facts follow from ``slot(p) == slot(p + R)``:

* A block of T tokens from position q may be written before it attends iff ``R >= W + T - 1``: its last token
  overwrites position ``q + T - 1 - R``, and its first query still needs ``q - W + 1``.
* A text can be cut back by r tokens iff ``r <= R - W + 1``. The slots of the cut tokens keep positions that are past
  every later query until they are overwritten, so nobody sees them.
"""

import dataclasses

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingLayout:
    """Keeps the latest positions, and the sinks, of a layer with a window. See ``layout.Layout``.

    Attributes:
      window: W, in tokens.
      slack: ring slots beyond the window.
      num_sinks: N, positions that are never overwritten.
    """

    window: int
    slack: int = 0
    num_sinks: int = 0

    @property
    def ring_len(self) -> int:
        """R, the slots that are used again and again."""
        return self.window + self.slack

    @property
    def capacity(self) -> int:
        """N + R."""
        return self.num_sinks + self.ring_len

    @property
    def max_len(self) -> int | None:
        """No bound."""
        return None

    @property
    def max_block_len(self) -> int:
        """R - W + 1."""
        return self.slack + 1

    @property
    def max_rollback(self) -> int:
        """R - W + 1."""
        return self.slack + 1

    def slot(self, position: jax.Array) -> jax.Array:
        """Returns p for sinks, and ``N + (p - N) mod R`` for the others."""
        ring = self.num_sinks + (position - self.num_sinks) % self.ring_len
        return jnp.where(position < self.num_sinks, position, ring)

    def survives(self, position: jax.Array, length: jax.Array) -> jax.Array:
        """Says which positions are sinks or among the latest R."""
        return (position < self.num_sinks) | (position >= length - self.ring_len)
