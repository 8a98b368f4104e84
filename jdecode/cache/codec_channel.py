"""The codecs that store keys with one scale for each channel of a group of tokens (KIVI, Liu et al. 2024, section 3).

Keys have a few channels that are far larger than the others, and they are so in every token. A scale for each channel
holds the outlier in its own steps, and the rest in theirs::

    int8    scale = max |x| / 127                           data = round(x / scale)
    int4    scale = (max x - min x) / 15                    data = round((x - offset) / scale), from -8 to 7
            offset = min x + 8 * scale

over the ``group_len`` tokens of a group, float32. A group is written as a whole, when all of its tokens are known
(``cache/grouped.py``). A channel that is the same in all tokens is stored exactly by int4, and by int8 up to the
rounding of its scale. What is not finite makes the scale NaN, and every score with that group.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block_grouped
from jdecode.cache import nibbles, slots
from jdecode.parallel import rules

NAMES = ("int8", "int4")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelRows:
    """Rows with a scale a channel. See ``attention.segment.Rows``; blocks are whole groups.

    Attributes:
      data_BSX: all heads of a slot side by side, as in ``codec_plain.PlainRows``: int8, or uint8 with two numbers each.
      scale_BUX: float32, for each group, channels as wide as heads are.
      offset_BUX: float32, or ``None`` for int8.
      num_heads: K. Static.
      dtype: of the products. Static.
    """

    data_BSX: jax.Array
    scale_BUX: jax.Array
    offset_BUX: jax.Array | None
    num_heads: int = dataclasses.field(metadata={"static": True})
    dtype: str = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.data_BSX.shape[1]

    @property
    def unit(self) -> int:
        """Z, tokens a group."""
        return self.num_slots // self.scale_BUX.shape[1]

    @property
    def slot_axes(self) -> tuple[int, ...]:
        """Of numbers, scales and, if there are any, offsets."""
        return (1, 1) if self.offset_BUX is None else (1, 1, 1)

    def stored(self, start: jax.Array | int, size: int) -> kv_block_grouped.ChannelScaledBlock:
        """Returns ``size`` slots from ``start``, both multiples of ``unit``."""
        Z, K = self.unit, self.num_heads
        if size % Z or (isinstance(start, int) and start % Z):
            raise ValueError(f"block of slots: expected whole groups of {Z}, got {size} from {start}; align them")

        def heads(x_BSX: jax.Array, start: jax.Array | int, size: int) -> jax.Array:
            block_BCX = jax.lax.dynamic_slice_in_dim(x_BSX, start, size, axis=1)
            return block_BCX.reshape(*block_BCX.shape[:2], K, -1)

        data_BCKH = heads(self.data_BSX, start, size)
        is_packed = self.offset_BUX is not None
        return kv_block_grouped.ChannelScaledBlock(
            data_BCKH=nibbles.unpack(data_BCKH) if is_packed else data_BCKH,
            scale_BUKH=heads(self.scale_BUX, start // Z, size // Z),
            offset_BUKH=None if self.offset_BUX is None else heads(self.offset_BUX, start // Z, size // Z),
            dtype=self.dtype,
        )

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns the same slots as float32 numbers."""
        return self.stored(start, size).numbers()

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Returns them as they are."""
        return q_BTNH


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelCodec:
    """Stores rows with a scale a channel. See ``codec.RowCodec``; what is encoded and written is whole groups.

    Attributes:
      name: of ``NAMES``.
      group_len: Z, tokens a group. Slots are a multiple of it.
      dtype: of the products, that in which the model computes.
    """

    name: str
    group_len: int
    dtype: str

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> ChannelRows:
        """Allocates zeros."""
        B, S, K, H = batch_size, num_slots, num_heads, head_dim

        def zeros(shape: tuple[int, ...], dtype: str) -> jax.Array:
            device = None if mesh is None else rules.sharding(mesh, ("batch", None, "kv_heads"), (*shape[:2], K))
            return jnp.zeros(shape, dtype, device=device)

        scales = (B, S // self.group_len, K * H)
        is_packed = self.name == "int4"
        return ChannelRows(
            data_BSX=zeros((B, S, K * H // 2), "uint8") if is_packed else zeros((B, S, K * H), "int8"),
            scale_BUX=zeros(scales, "float32"),
            offset_BUX=zeros(scales, "float32") if is_packed else None,
            num_heads=K,
            dtype=self.dtype,
        )

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in float32."""
        return x_BTKH.astype(jnp.float32)

    def encode(self, x_BTKH: jax.Array) -> ChannelRows:
        """Quantises T / Z groups."""
        B, T, K, H = x_BTKH.shape
        x_BUZX = self.cast(x_BTKH).reshape(B, T // self.group_len, self.group_len, K * H)
        offset_BUX = None
        if self.name == "int4":
            least_BUX = x_BUZX.min(axis=2)
            scale_BUX = (x_BUZX.max(axis=2) - least_BUX) / (nibbles.MOST - nibbles.LEAST)
            offset_BUX = least_BUX - nibbles.LEAST * scale_BUX
            x_BUZX = x_BUZX - offset_BUX[:, :, None]
            bounds = (nibbles.LEAST, nibbles.MOST)
        else:
            scale_BUX = jnp.abs(x_BUZX).max(axis=2) / 127
            bounds = (-127, 127)
        # Not the quotient by a scale of 0.
        code_BUZX = jnp.where(scale_BUX[:, :, None] > 0, x_BUZX / scale_BUX[:, :, None], 0.0)
        code_BTKH = jnp.clip(jnp.round(code_BUZX), *bounds).astype(jnp.int8).reshape(B, T, K, H)
        data_BTKX = nibbles.pack(code_BTKH) if self.name == "int4" else code_BTKH
        return ChannelRows(
            data_BSX=data_BTKX.reshape(B, T, -1),
            scale_BUX=scale_BUX,
            offset_BUX=offset_BUX,
            num_heads=K,
            dtype=self.dtype,
        )

    def write(self, rows: ChannelRows, slot_BT: jax.Array, new: ChannelRows) -> ChannelRows:
        """Scatters groups into their slots, which follow on each other within a group."""
        group_BU = slot_BT[:, :: self.group_len] // self.group_len

        def scales(old: Any, fresh: Any) -> Any:
            return None if old is None else slots.scatter(old, group_BU, fresh)

        return dataclasses.replace(
            rows,
            data_BSX=slots.scatter(rows.data_BSX, slot_BT, new.data_BSX),
            scale_BUX=scales(rows.scale_BUX, new.scale_BUX),
            offset_BUX=scales(rows.offset_BUX, new.offset_BUX),
        )
