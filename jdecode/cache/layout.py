"""Layouts: which slot holds which position.

A layout is static (frozen, hashable) and knows nothing of how a slot is stored; that is the codec's part.
"""

from typing import Protocol, runtime_checkable

import jax

EVERYTHING = 2**31 - 1
"""As ``max_rollback``: all that a row holds."""


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


@runtime_checkable
class PlacingLayout(Protocol):
    """Decides by what the slots hold where a token goes, for layers that do not keep every position.

    Each layer has one of its own, for layers keep different positions.
    """

    @property
    def capacity(self) -> int:
        """S, the slots a row."""
        ...

    @property
    def max_len(self) -> int | None:
        """``None``: no bound that is the same for all rows, see ``longest``."""
        ...

    @property
    def max_block_len(self) -> int:
        """The longest block that may be appended."""
        ...

    @property
    def max_rollback(self) -> int:
        """How many of a row's latest tokens can be taken back without losing one that is still visible."""
        ...

    def place(
        self, position_BT: jax.Array, length_B: jax.Array, position_BS: jax.Array, received_BS: jax.Array | None
    ) -> jax.Array:
        """Returns the slots of a block, int32 (B, T), distinct within a row; past the last where there is none.

        Args:
          position_BT: int32, of the block's tokens; those that count on past ``length_B`` are padding.
          length_B: int32, the tokens that each row has seen after the block.
          position_BS: int32, what the slots hold before it.
          received_BS: float32, the attention that each slot got so far, where the layer counts it.
        """
        ...

    def longest(self, position_BS: jax.Array) -> jax.Array | None:
        """Returns the longest text that each row can hold, in tokens, int32 (B,); ``None`` for no bound."""
        ...


AnyLayout = Layout | PlacingLayout
