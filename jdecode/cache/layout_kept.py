"""The layout of a compressed prompt: the tokens that were kept of it, and after them every new one.

::

    slot      0 .. M-1                                  M .. M+R-1
    holds     kept positions, ascending; holes first    new positions: p = n + (s - M)

n is the length of the row's prompt. Its last token is always kept, in slot M - 1, so n is what that slot says and rows
need no other state. Keys keep their positions: the mask and rope go by them, and the gaps are no matter.
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True, kw_only=True)
class KeptLayout:
    """Holds M positions of a prompt and the R after it. See ``layout.PlacingLayout``.

    Attributes:
      num_kept: M.
      num_new: R.
      layer: whose it is: each layer keeps positions of its own.
    """

    num_kept: int
    num_new: int
    layer: int

    @property
    def capacity(self) -> int:
        """M + R."""
        return self.num_kept + self.num_new

    @property
    def max_len(self) -> int | None:
        """``None``: rows differ, see ``longest``."""
        return None

    @property
    def max_block_len(self) -> int:
        """Any block: nothing is overwritten."""
        return self.capacity

    @property
    def max_rollback(self) -> int:
        """R: new tokens alone. What was evicted of the prompt does not come back."""
        return self.num_new

    def place(
        self, position_BT: jax.Array, length_B: jax.Array, position_BS: jax.Array, received_BS: jax.Array | None
    ) -> jax.Array:
        """Puts the i-th new token into slot M + i."""
        del length_B, received_BS
        return self.num_kept + position_BT - self._prompt_len(position_BS)[:, None]

    def longest(self, position_BS: jax.Array) -> jax.Array:
        """Returns n + R."""
        return self._prompt_len(position_BS) + self.num_new

    def _prompt_len(self, position_BS: jax.Array) -> jax.Array:
        return position_BS[:, self.num_kept - 1] + 1
