"""The codec that stores keys and values as they are, in a float dtype."""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block
from jdecode.cache import slots
from jdecode.parallel import rules

BITS = jnp.dtype("uint16")
"""As what the bits of a number of 16 bits are held."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainRows:
    """Rows in one array, all heads of a slot side by side (see ``attention.segment.Rows``).

    The last axis is K * H wide, not two axes: a TPU pads the last axis to 128 lanes and the one before to 8 sublanes,
    so that three heads of width 64 would take 5.3 times their bytes, and a copy of the cache a step.

    Attributes:
      data_BSX: of ``dtype``, or its bits (``PlainCodec.holds_bits``).
      num_heads: K. Static.
      dtype: of the numbers, by name. Static.
    """

    data_BSX: jax.Array
    num_heads: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.data_BSX.shape[1]

    @property
    def unit(self) -> int:
        """1."""
        return 1

    @property
    def slot_axes(self) -> tuple[int, ...]:
        """Of the one array."""
        return (1,)

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns ``size`` slots from ``start``: (B, size, K, H)."""
        block_BCX = jax.lax.dynamic_slice_in_dim(self.data_BSX, start, size, axis=1)
        if block_BCX.dtype == BITS:
            block_BCX = jax.lax.bitcast_convert_type(block_BCX, self.dtype)
        return block_BCX.reshape(*block_BCX.shape[:2], self.num_heads, -1)

    def stored(self, start: jax.Array | int, size: int) -> kv_block.FloatBlock:
        """Returns the same."""
        return kv_block.FloatBlock(data_BCKH=self.block(start, size))

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Returns them as they are."""
        return q_BTNH


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlainCodec:
    """Stores rows in a float dtype. See ``codec.RowCodec``.

    Attributes:
      dtype: its name, such as ``"bfloat16"``.
      holds_bits: hold numbers of 16 bits as integers. A backend that does not compute in their dtype would convert the
        whole array and back to write a row into it; one that does (a TPU) needs more temporaries with it.
    """

    dtype: str
    holds_bits: bool = False

    @property
    def _held_dtype(self) -> jnp.dtype:
        own = jnp.dtype(self.dtype)
        return BITS if self.holds_bits and own.itemsize == BITS.itemsize else own

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> PlainRows:
        """Allocates zeros."""
        device = None
        if mesh is not None:
            device = rules.sharding(mesh, ("batch", None, "kv_heads"), (batch_size, num_slots, num_heads))
        data_BSX = jnp.zeros((batch_size, num_slots, num_heads * head_dim), self._held_dtype, device=device)
        return PlainRows(data_BSX=data_BSX, num_heads=num_heads, dtype=self.dtype)

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in the stored dtype."""
        return x_BTKH.astype(self.dtype)

    def encode(self, x_BTKH: jax.Array) -> PlainRows:
        """Casts the block."""
        B, T, K, H = x_BTKH.shape
        data_BTX = self.cast(x_BTKH).reshape(B, T, K * H)
        if self._held_dtype == BITS:
            data_BTX = jax.lax.bitcast_convert_type(data_BTX, BITS)
        return PlainRows(data_BSX=data_BTX, num_heads=K, dtype=self.dtype)

    def write(self, rows: PlainRows, slot_BT: jax.Array, new: PlainRows) -> PlainRows:
        """Scatters the block into its slots."""
        return dataclasses.replace(rows, data_BSX=slots.scatter(rows.data_BSX, slot_BT, new.data_BSX))
