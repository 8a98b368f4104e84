"""What attention reads: runs of slots, each with its keys, values and positions.

A call may read several segments, for instance an old ring buffer and, beside it, the block that has not been written
yet. How rows of keys and values are stored is hidden behind ``Rows``, so that a quantised or a paged store is read
block by block as a plain one is, and never unpacked as a whole.

A mask hides a key by its score, which is replaced whatever it is, but a value only by a weight of 0, and zero times NaN
is NaN. So values that are not finite never get into a segment: ``faults_in_keys`` writes NaN into the key instead, in
the rows that are written anyway. Backends then need no test of their own: whoever sees the slot gets NaN, by its score,
and whoever does not sees a value of 0 with the weight 0. That holds for slots of tokens that were taken back, too.
"""

import dataclasses
from typing import Protocol

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block, visibility


class Rows(Protocol):
    """Keys, or values, of S slots: K heads of width H a slot. A registered pytree."""

    @property
    def num_slots(self) -> int:
        """S."""
        ...

    @property
    def num_heads(self) -> int:
        """K."""
        ...

    @property
    def unit(self) -> int:
        """Slots that are stored together, so that only runs of whole units can be read; 1 where each stands alone."""
        ...

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns what slots ``start .. start + size - 1`` stand for, as (B, size, K, H) in a float dtype.

        ``start`` is a multiple of ``size``, or ``num_slots - size``. ``size`` is static,
        and a multiple of ``unit``.
        """
        ...

    def stored(self, start: jax.Array | int, size: int) -> kv_block.KVBlock:
        """Returns the same slots as they are stored. Keys are to be met by ``queries``."""
        ...

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Brings queries to the form in which their products with the stored keys are the scores."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ArrayRows:
    """Rows that are an array."""

    data_BSKH: jax.Array

    @property
    def num_slots(self) -> int:
        """S."""
        return self.data_BSKH.shape[1]

    @property
    def num_heads(self) -> int:
        """K."""
        return self.data_BSKH.shape[2]

    @property
    def unit(self) -> int:
        """1."""
        return 1

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns ``size`` slots from ``start``."""
        return jax.lax.dynamic_slice_in_dim(self.data_BSKH, start, size, axis=1)

    def stored(self, start: jax.Array | int, size: int) -> kv_block.FloatBlock:
        """Returns ``size`` slots from ``start``."""
        return kv_block.FloatBlock(data_BCKH=self.block(start, size))

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Returns them as they are."""
        return q_BTNH


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Segment:
    """A run of slots to attend over.

    Attributes:
      keys, values: see ``Rows``. In every slot that holds a position the values are finite, see ``faults_in_keys``.
      position_BS: int32, the absolute position that each slot holds, or ``EMPTY``.
      first_slot, end_slot: int32 scalars. No slot outside ``first_slot .. end_slot - 1`` is visible to any query of
        the call. A promise that saves work: the cost of a call follows these bounds, not S.
      is_block: slot i holds the key of query i of the call (or padding), so S is T, and positions count on by one from
        slot to slot. Static.
      share: which of the visible keys it stands for, where another segment has the others; ``None`` for all. Static.
    """

    keys: Rows
    values: Rows
    position_BS: jax.Array
    first_slot: jax.Array
    end_slot: jax.Array
    is_block: bool = dataclasses.field(default=False, metadata={"static": True})
    share: visibility.Share | None = dataclasses.field(default=None, metadata={"static": True})

    def mask(
        self, query_position_BT: jax.Array, position_BC: jax.Array, *, window: int | None, num_sinks: int
    ) -> jax.Array:
        """Says which of some slots' keys each query gets from this segment: bool, (B, T, C)."""
        mask_BTC = visibility.visible(query_position_BT, position_BC, window=window, num_sinks=num_sinks)
        return mask_BTC if self.share is None else mask_BTC & self.share.covers(query_position_BT, position_BC)


def faults_in_keys(k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Moves what is not finite to the keys, where a mask hides it; see the module's text.

    Number by number, without a sum over H: one NaN in a key is enough to make every score with it NaN.

    Args:
      k_BTKH, v_BTKH: keys and values in the dtype in which they are stored: a cast may overflow.

    Returns:
      Keys with NaN where they or the values were not finite; values with 0 where they were not. All else is as it was.
    """
    is_sound_BTKH = jnp.isfinite(v_BTKH)
    k_BTKH = jnp.where(is_sound_BTKH & jnp.isfinite(k_BTKH), k_BTKH, jnp.asarray(jnp.nan, k_BTKH.dtype))
    return k_BTKH, jnp.where(is_sound_BTKH, v_BTKH, jnp.zeros((), v_BTKH.dtype))


def whole_segment(k_BSKH: jax.Array, v_BSKH: jax.Array, position_BS: jax.Array, *, is_block: bool = False) -> Segment:
    """Makes a segment of arrays, all of whose slots may be visible; ``faults_in_keys`` is applied."""
    k_BSKH, v_BSKH = faults_in_keys(k_BSKH, v_BSKH)
    return Segment(
        keys=ArrayRows(data_BSKH=k_BSKH),
        values=ArrayRows(data_BSKH=v_BSKH),
        position_BS=position_BS,
        first_slot=jnp.int32(0),
        end_slot=jnp.int32(k_BSKH.shape[1]),
        is_block=is_block,
    )
