"""The codecs that store a head of a token in 8 bits with one scale: ``int8`` and ``fp8`` (e4m3).

::

    scale = max |x| / most      one a token and head, float32; most = 127, or 448 for fp8
    data  = x / scale           rounded to the nearest (int8), or cast (fp8)

Keys are rotated first (``attention.rotation``), which costs a small product a token and makes one scale enough.

The greatest magnitude is stored exactly (but for the rounding of the scale); an all-zero head has the scale 0 and
stays zero. What is not finite makes the scale NaN or infinite, and every score with it NaN.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block, rotation
from jdecode.cache import slots
from jdecode.parallel import rules

STORED = {"int8": ("int8", 127.0), "fp8": ("float8_e4m3fn", 448.0)}
"""For each codec the dtype of its numbers, and the greatest one that is used."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenRows:
    """Rows in 8 bits. See ``attention.segment.Rows``.

    Attributes:
      data_BSX: int8, all heads of a slot side by side, as in ``codec_plain.PlainRows``; for fp8 its bits. (A write into
        an array of a float dtype that the backend does not compute in converts the whole array twice.)
      scale_BKS: float32. The slots come last: a TPU pads the last axis to 128 lanes, and heads are few.
      name: of ``STORED``. Static.
      is_rotated: whether the stored keys are rotated. Static.
      dtype: of the products. Static.
    """

    data_BSX: jax.Array
    scale_BKS: jax.Array
    name: str = dataclasses.field(metadata={"static": True})
    is_rotated: bool = dataclasses.field(metadata={"static": True})
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
        """Of numbers and scales."""
        return (1, 2)

    @property
    def num_heads(self) -> int:
        """K."""
        return self.scale_BKS.shape[1]

    def stored(self, start: jax.Array | int, size: int) -> kv_block.TokenScaledBlock:
        """Returns ``size`` slots from ``start``, in 8 bits."""
        block_BCX = jax.lax.dynamic_slice_in_dim(self.data_BSX, start, size, axis=1)
        return kv_block.TokenScaledBlock(
            data_BCKH=_as_numbers(block_BCX, self.name).reshape(*block_BCX.shape[:2], self.num_heads, -1),
            scale_BKC=jax.lax.dynamic_slice_in_dim(self.scale_BKS, start, size, axis=2),
            dtype=self.dtype,
        )

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns ``size`` slots from ``start`` as float32 numbers, rotated back."""
        block = self.stored(start, size)
        x_BCKH = block.data_BCKH.astype(jnp.float32) * block.scale_BKC.swapaxes(1, 2)[..., None]
        return rotation.rotate(x_BCKH) if self.is_rotated else x_BCKH

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Rotates queries as the keys are."""
        return rotation.rotate(q_BTNH).astype(q_BTNH.dtype) if self.is_rotated else q_BTNH


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenCodec:
    """Stores rows in 8 bits with a scale a token and head. See ``codec.RowCodec``.

    Attributes:
      name: of ``STORED``.
      rotates: whether rows are rotated before; for keys, whose queries can be rotated too.
      dtype: of the products, that in which the model computes.
    """

    name: str
    rotates: bool
    dtype: str

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> TokenRows:
        """Allocates zeros."""

        def zeros(shape: tuple[int, ...], dtype: str, axes: tuple[str | None, ...], sizes: tuple[int, ...]):
            device = None if mesh is None else rules.sharding(mesh, axes, sizes)
            return jnp.zeros(shape, dtype, device=device)

        B, S, K = batch_size, num_slots, num_heads
        return TokenRows(
            data_BSX=zeros((B, S, K * head_dim), "int8", ("batch", None, "kv_heads"), (B, S, K)),
            scale_BKS=zeros((B, K, S), "float32", ("batch", "kv_heads", None), (B, K, S)),
            name=self.name,
            is_rotated=self.rotates,
            dtype=self.dtype,
        )

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in float32."""
        return x_BTKH.astype(jnp.float32)

    def write(self, rows: TokenRows, slot_BT: jax.Array, new: TokenRows) -> TokenRows:
        """Scatters the block into its slots."""
        return dataclasses.replace(
            rows,
            data_BSX=slots.scatter(rows.data_BSX, slot_BT, new.data_BSX),
            scale_BKS=slots.scatter(rows.scale_BKS, slot_BT, new.scale_BKS, axis=2),
        )

    def encode(self, x_BTKH: jax.Array) -> TokenRows:
        """Quantises the block."""
        B, T, K, H = x_BTKH.shape
        stored_dtype, most = STORED[self.name]
        x_BTKH = rotation.rotate(x_BTKH) if self.rotates else x_BTKH.astype(jnp.float32)
        scale_BTK = jnp.max(jnp.abs(x_BTKH), axis=-1) / most
        # Not the quotient by a scale of 0, nor by one so small that its reciprocal overflows.
        data_BTKH = jnp.where(scale_BTK[..., None] > 0, x_BTKH / scale_BTK[..., None], 0.0)
        if stored_dtype == "int8":
            data_BTKH = jnp.round(data_BTKH)
        # Rounding may pass the greatest number, from where a cast to fp8 gives NaN.
        data_BTKH = jnp.clip(data_BTKH, -most, most).astype(stored_dtype)
        return TokenRows(
            data_BSX=jax.lax.bitcast_convert_type(data_BTKH, jnp.int8).reshape(B, T, K * H),
            scale_BKS=scale_BTK.swapaxes(1, 2),
            name=self.name,
            is_rotated=self.rotates,
            dtype=self.dtype,
        )


def _as_numbers(data: jax.Array, name: str) -> jax.Array:
    """Reads stored bits as what they are."""
    return jax.lax.bitcast_convert_type(data, jnp.dtype(STORED[name][0]))
