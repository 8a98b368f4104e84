"""The layout with a slot for every position."""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.cache import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class FullLayout:
    """Puts position p into slot p. See ``layout.Layout``."""

    capacity: int

    @property
    def max_len(self) -> int | None:
        """The capacity."""
        return self.capacity

    @property
    def max_block_len(self) -> int:
        """Any block: nothing is overwritten."""
        return self.capacity

    @property
    def max_rollback(self) -> int:
        """Everything."""
        return layout.EVERYTHING

    def slot(self, position: jax.Array) -> jax.Array:
        """Returns the position itself."""
        return position

    def survives(self, position: jax.Array, length: jax.Array) -> jax.Array:
        """Says yes: no position loses its slot."""
        del length
        return jnp.ones_like(position, bool)
