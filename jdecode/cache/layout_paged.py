"""The layout with a slot for every position, whose slots lie in pages."""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.cache import layout


@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedLayout:
    """Puts position p into slot p, which is slot ``p mod Z`` of the page in column ``p // Z``. See ``layout.Layout``.

    Attributes:
      capacity: a multiple of ``page_len``.
      page_len: Z, in tokens.
    """

    capacity: int
    page_len: int

    @property
    def num_columns(self) -> int:
        """C, the pages of the longest text."""
        return self.capacity // self.page_len

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
        """Everything, but for what a row shares with others (``cache_rows.take_rows``)."""
        return layout.EVERYTHING

    def slot(self, position: jax.Array) -> jax.Array:
        """Returns the position itself."""
        return position

    def survives(self, position: jax.Array, length: jax.Array) -> jax.Array:
        """Says yes: no position loses its slot."""
        del length
        return jnp.ones_like(position, bool)
