"""The layout with a budget: M slots in all, and a new token takes the slot of the one that got least attention.

Empty slots go first. Then the held ones, by the attention that they got from every query since they were written, the
least first and the lower slot of a tie; but never one of the latest ``num_recent`` positions, the block's own among
them (Zhang et al. 2023, "H2O", section 4.2). A block of T tokens evicts T slots, is written, and attends then: each of
its queries sees what is left, by positions.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import visibility


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvictingLayout:
    """Holds M positions of a text without end. See ``layout.PlacingLayout``.

    Attributes:
      budget: M.
      num_recent: the latest positions, which are never evicted; under M.
      layer: whose it is: each layer keeps positions of its own.
    """

    budget: int
    num_recent: int
    layer: int

    @property
    def capacity(self) -> int:
        """M."""
        return self.budget

    @property
    def max_len(self) -> int | None:
        """No bound."""
        return None

    @property
    def max_block_len(self) -> int:
        """M."""
        return self.budget

    @property
    def max_rollback(self) -> int:
        """None: the slots of evicted tokens are written again."""
        return 0

    def place(
        self, position_BT: jax.Array, length_B: jax.Array, position_BS: jax.Array, received_BS: jax.Array | None
    ) -> jax.Array:
        """Returns the slots that are given up, in the order in which they are.

        Raises:
          ValueError: the block is longer than the budget.
        """
        T = position_BT.shape[1]
        if self.budget < T:
            raise ValueError(f"block: expected at most the {self.budget} tokens of the budget, got {T}; feed fewer")
        assert received_BS is not None
        held_BS = visibility.held(position_BS)
        is_recent_BS = held_BS & (position_BS >= length_B[:, None] - self.num_recent)
        worth_BS = jnp.where(held_BS, jnp.where(is_recent_BS, jnp.inf, received_BS), -jnp.inf)
        # Enough are left to choose from: of M slots, at most num_recent - T held ones are recent before the block.
        return jax.lax.top_k(-worth_BS, T)[1]

    def longest(self, position_BS: jax.Array) -> None:
        """Returns no bound."""
        del position_BS
