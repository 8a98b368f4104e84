"""Layouts: which slot holds which position.

A layout is static (frozen, hashable) and knows nothing of how a slot is stored; that is the codec's part.
"""

from typing import Protocol

import jax


class Layout(Protocol):
    """Maps the positions of a row to its slots."""

    @property
    def capacity(self) -> int:
        """S, the slots a row."""
        ...

    @property
    def max_len(self) -> int | None:
        """The longest text that a row can hold, in tokens; ``None`` for no bound."""
        ...

    @property
    def max_block_len(self) -> int:
        """The longest block that may be written before its own queries attend; see ``kv_cache``."""
        ...

    @property
    def max_rollback(self) -> int:
        """How many of a row's latest tokens can be taken back without losing one that is still visible."""
        ...

    def slot(self, position: jax.Array) -> jax.Array:
        """Maps positions to slots (int32, any shape). Positions past ``max_len`` map to slots past ``capacity``.

        A layer's sinks, positions 0 .. N-1, have the slots of the same numbers (``models.sinks`` looks for them there).
        """
        ...

    def survives(self, position: jax.Array, length: jax.Array) -> jax.Array:
        """Says which positions of a text still have a slot when the text is ``length`` tokens long (broadcasting)."""
        ...
