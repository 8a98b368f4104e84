"""Groups of tokens: how a cache whose keys are stored by group (``codec_channel``) keeps what has no group yet.

A layer has two stores. The latest tokens lie as they are in a ring that all layers lay out alike (``Grouping.layout``);
a group is quantised and written into the layer's own slots once it is settled, and then it is never touched again::

    position      0 .. Z-1    Z .. 2Z-1    2Z ..                       q
    group         0           1            2, of which 1 + q - 2Z are there
    a query at q  sees these as stored     sees these exactly: q - p < Z + lag

Which of the two a query reads is a function of positions alone (``visibility.Settling``). ``lag`` is at least what a
row can take back, so a settled group holds only tokens that stay; and the ring, of ``Z + lag + slack`` slots, still has
what becomes unsettled when tokens are taken back. So a text comes out the same however it was cut into blocks.

What a row's group is made of are its own exact tokens, so nothing reaches from one group or row to another.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode.attention import segment, visibility
from jdecode.cache import layout as layout_lib
from jdecode.cache import layout_ring


def exact_layout(settling: visibility.Settling, slack: int) -> layout_ring.RingLayout:
    """Returns the ring of the latest tokens, from which up to ``slack + 1`` can be taken back."""
    assert settling.lag > slack
    return layout_ring.RingLayout(window=settling.group_len + settling.lag, slack=slack)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Settled:
    """The groups that settle with a block, those of a row one after the other.

    Attributes:
      position_BX: int32, the positions of as many groups as can settle with a block of T tokens, ``EMPTY`` where
        none does.
      before_B, after_B: int32, how many positions of each row are settled before and after the block.
      group_len: Z. Static.
    """

    position_BX: jax.Array
    before_B: jax.Array
    after_B: jax.Array
    group_len: int = dataclasses.field(metadata={"static": True})

    @property
    def num_groups(self) -> jax.Array:
        """How many groups settle in the row that has most of them: int32."""
        return (self.after_B - self.before_B).max() // self.group_len

    def group(self, x_BX: jax.Array, idx: jax.Array) -> jax.Array:
        """Returns what ``x_BX`` has for group ``idx`` of each row: (B, Z)."""
        return jax.lax.dynamic_slice_in_dim(x_BX, idx * self.group_len, self.group_len, axis=1)

    def slots(self, layout: layout_lib.Layout) -> jax.Array:
        """Returns their slots (B, X); past the last for those that have none, group by group."""
        is_written_BX = self.position_BX != visibility.EMPTY
        is_written_BX &= layout.survives(self.position_BX, self.after_B[:, None])
        dropped_X = layout.capacity + jnp.arange(self.position_BX.shape[1], dtype=jnp.int32)
        return jnp.where(is_written_BX, layout.slot(self.position_BX), dropped_X[None, :])

    def slots_of_tokens(
        self, layout: layout_lib.Layout, length_B: jax.Array, tokens: Sequence[segment.Segment]
    ) -> jax.Array:
        """Returns where their tokens lie as they are (B, X), in the slots of one segment after the other.

        Args:
          layout: of the latest tokens.
          length_B: int32, before the block.
          tokens: the latest tokens with the block among them, or those before the block, and the block.
        """
        slot_BX = layout.slot(self.position_BX)
        if len(tokens) == 1:
            return slot_BX
        fresh_BX = self.position_BX - length_B[:, None]
        return jnp.where(fresh_BX < 0, slot_BX, layout.capacity + fresh_BX)


def settle(settling: visibility.Settling, length_B: jax.Array, new_length_B: jax.Array, block_len: int) -> Settled:
    """Says which groups settle when texts grow from ``length_B`` to ``new_length_B`` tokens, ``block_len`` at most."""
    before_B, after_B = settling.end(length_B), settling.end(new_length_B)
    num_groups = -(-block_len // settling.group_len)
    idx_X = jnp.arange(num_groups * settling.group_len, dtype=jnp.int32)
    position_BX = before_B[:, None] + idx_X[None, :]
    position_BX = jnp.where(position_BX < after_B[:, None], position_BX, visibility.EMPTY)
    return Settled(position_BX=position_BX, before_B=before_B, after_B=after_B, group_len=settling.group_len)


def take_tokens(tokens: Sequence[segment.Segment], slot_BX: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Reads keys and values, (B, X, K, H), out of segments that lie one after the other; slots past the last clamp."""

    def take(rows: Sequence[segment.Rows]) -> jax.Array:
        x_BYKH = jnp.concatenate([own.block(0, own.num_slots) for own in rows], axis=1)
        return jnp.take_along_axis(x_BYKH, slot_BX[:, :, None, None], axis=1, mode="clip")

    return take([part.keys for part in tokens]), take([part.values for part in tokens])
