"""The codec that stores values in 4 bits with a scale for each run of up to 32 channels of a token.

::

    scale  = (max x - min x) / 15       offset = min x + 8 * scale         one a token, head and run, float16
    data   = round((x - offset) / scale), from -8 to 7, two numbers a byte

Numbers are quantised with the scale and the offset as they are stored, so that their rounding is not added twice. Runs
are of one length, the greatest divisor of H up to 32, so no run reaches past a head. Values over 65,504 in size are not
finite here, as in float16; under about 1e-6 all numbers are near the least ones of float16, and lose precision.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block_grouped
from jdecode.cache import nibbles, slots
from jdecode.parallel import rules

MOST_CHANNELS = 32
"""Of a run. Shorter ones are more exact, and have more scales."""


def run_len(head_dim: int) -> int:
    """Returns the channels of a run: the greatest divisor of H that is no more than ``MOST_CHANNELS``."""
    return max(length for length in range(1, MOST_CHANNELS + 1) if head_dim % length == 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Rows:
    """Rows in 4 bits. See ``attention.segment.Rows``.

    Attributes:
      data_BSX: uint8, two numbers each, all heads of a slot side by side.
      scale_BXS, offset_BXS: int16, the bits of float16 (see ``codec_token.TokenRows``): all runs of all heads, and the
        slots last, since a TPU pads the last axis to 128 lanes.
      num_heads: K. Static.
      dtype: of the products. Static.
    """

    data_BSX: jax.Array
    scale_BXS: jax.Array
    offset_BXS: jax.Array
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
        """Of numbers, scales and offsets."""
        return (1, 2, 2)

    def stored(self, start: jax.Array | int, size: int) -> kv_block_grouped.RunScaledBlock:
        """Returns ``size`` slots from ``start``, as numbers from -8 to 7."""
        block_BCX = jax.lax.dynamic_slice_in_dim(self.data_BSX, start, size, axis=1)
        B, C, _ = block_BCX.shape

        def scales(bits_BXS: jax.Array) -> jax.Array:
            bits_BXC = jax.lax.dynamic_slice_in_dim(bits_BXS, start, size, axis=2)
            x_BXC = jax.lax.bitcast_convert_type(bits_BXC, jnp.float16).astype(jnp.float32)
            return x_BXC.reshape(B, self.num_heads, -1, C)

        return kv_block_grouped.RunScaledBlock(
            data_BCKH=nibbles.unpack(block_BCX.reshape(B, C, self.num_heads, -1)),
            scale_BKRC=scales(self.scale_BXS),
            offset_BKRC=scales(self.offset_BXS),
            dtype=self.dtype,
        )

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns ``size`` slots from ``start`` as float32 numbers."""
        return self.stored(start, size).numbers()

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Returns them as they are."""
        return q_BTNH


@dataclasses.dataclass(frozen=True, kw_only=True)
class Int4Codec:
    """Stores rows in 4 bits with a scale a token, head and run. See ``codec.RowCodec``.

    Attributes:
      dtype: of the products, that in which the model computes.
    """

    dtype: str

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> Int4Rows:
        """Allocates zeros."""
        B, S, K, R = batch_size, num_slots, num_heads, head_dim // run_len(head_dim)

        def zeros(shape: tuple[int, ...], dtype: str, axes: tuple[str | None, ...], sizes: tuple[int, ...]):
            device = None if mesh is None else rules.sharding(mesh, axes, sizes)
            return jnp.zeros(shape, dtype, device=device)

        scales = ((B, K * R, S), "int16", ("batch", "kv_heads", None), (B, K, S))
        return Int4Rows(
            data_BSX=zeros((B, S, K * head_dim // 2), "uint8", ("batch", None, "kv_heads"), (B, S, K)),
            scale_BXS=zeros(*scales),
            offset_BXS=zeros(*scales),
            num_heads=K,
            dtype=self.dtype,
        )

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in float32; what float16 does not hold is infinite."""
        x_BTKH = x_BTKH.astype(jnp.float32)
        return jnp.where(jnp.abs(x_BTKH) <= float(jnp.finfo(jnp.float16).max), x_BTKH, x_BTKH * jnp.inf)

    def encode(self, x_BTKH: jax.Array) -> Int4Rows:
        """Quantises the block."""
        B, T, K, H = x_BTKH.shape
        x_BTYX = x_BTKH.astype(jnp.float32).reshape(B, T, -1, run_len(H))
        least_BTY = x_BTYX.min(axis=-1)
        scale_BTY = ((x_BTYX.max(axis=-1) - least_BTY) / (nibbles.MOST - nibbles.LEAST)).astype(jnp.float16)
        offset_BTY = (least_BTY - nibbles.LEAST * scale_BTY.astype(jnp.float32)).astype(jnp.float16)
        scale_BTY1, offset_BTY1 = (x[..., None].astype(jnp.float32) for x in (scale_BTY, offset_BTY))
        # Not the quotient by a scale of 0.
        code_BTYX = jnp.where(scale_BTY1 > 0, (x_BTYX - offset_BTY1) / scale_BTY1, 0.0)
        code_BTYX = jnp.clip(jnp.round(code_BTYX), nibbles.LEAST, nibbles.MOST).astype(jnp.int8)

        def bits(x_BTY: jax.Array) -> jax.Array:
            return jax.lax.bitcast_convert_type(x_BTY, jnp.int16).swapaxes(1, 2)

        return Int4Rows(
            data_BSX=nibbles.pack(code_BTYX.reshape(B, T, K, H)).reshape(B, T, -1),
            scale_BXS=bits(scale_BTY),
            offset_BXS=bits(offset_BTY),
            num_heads=K,
            dtype=self.dtype,
        )

    def write(self, rows: Int4Rows, slot_BT: jax.Array, new: Int4Rows) -> Int4Rows:
        """Scatters the block into its slots."""
        return dataclasses.replace(
            rows,
            data_BSX=slots.scatter(rows.data_BSX, slot_BT, new.data_BSX),
            scale_BXS=slots.scatter(rows.scale_BXS, slot_BT, new.scale_BXS, axis=2),
            offset_BXS=slots.scatter(rows.offset_BXS, slot_BT, new.offset_BXS, axis=2),
        )
