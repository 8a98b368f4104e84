"""Blocks of slots that are stored with one scale for a group of tokens, or for a run of channels.

See ``kv_block.KVBlock`` and, for how they come to be, ``cache/codec_channel.py`` and ``cache/codec_int4.py``. As there,
scales meet queries, scores and weights, not the stored numbers. What a number stands for::

    data * scale + offset
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelScaledBlock:
    """Slots with a scale for each channel of a group of tokens; made for keys. See ``kv_block.KVBlock``.

    Attributes:
      data_BCKH: int8. The block is U whole groups.
      scale_BUKH: float32.
      offset_BUKH: float32, or ``None`` for 0.
      dtype: of the products: that in which the model computes. Static.
    """

    data_BCKH: jax.Array
    scale_BUKH: jax.Array
    offset_BUKH: jax.Array | None
    dtype: str = dataclasses.field(metadata={"static": True})

    def numbers(self) -> jax.Array:
        """Returns what is stored, float32 (B, C, K, H)."""
        B, C, K, H = self.data_BCKH.shape
        x_BUZKH = self._grouped().astype(jnp.float32) * self.scale_BUKH[:, :, None]
        if self.offset_BUKH is not None:
            x_BUZKH += self.offset_BUKH[:, :, None]
        return x_BUZKH.reshape(B, C, K, H)

    def scores(self, q_BKGTH: jax.Array) -> jax.Array:
        """Multiplies the queries by the scales of each group, and those with the stored numbers."""
        q_BKGTH, scale_BKUH = q_BKGTH.astype(jnp.float32), self.scale_BUKH.swapaxes(1, 2)
        q_BKGTUH = (q_BKGTH[:, :, :, :, None] * scale_BKUH[:, :, None, None]).astype(self.dtype)
        score_BKGTUZ = jnp.einsum(
            "BKGTUH,BUZKH->BKGTUZ", q_BKGTUH, self._grouped().astype(self.dtype), preferred_element_type=jnp.float32
        )
        if self.offset_BUKH is not None:
            # Large where the channel is an outlier, and the same for all of a group: not to be rounded.
            exact = jax.lax.Precision.HIGHEST
            score_BKGTUZ += jnp.einsum("BKGTH,BUKH->BKGTU", q_BKGTH, self.offset_BUKH, precision=exact)[..., None]
        return score_BKGTUZ.reshape(*score_BKGTUZ.shape[:4], -1)

    def weighted(self, weight_BKGTC: jax.Array) -> jax.Array:
        """Sums the numbers themselves."""
        return self._unpacked().weighted(weight_BKGTC)

    def only(self, is_held_BC: jax.Array) -> kv_block.FloatBlock:
        """Unpacks the block: a scale belongs to slots of both kinds."""
        return self._unpacked().only(is_held_BC)

    def widened(self) -> "ChannelScaledBlock":
        """Computes in float32."""
        return dataclasses.replace(self, dtype="float32")

    def _grouped(self) -> jax.Array:
        B, C, K, H = self.data_BCKH.shape
        U = self.scale_BUKH.shape[1]
        return self.data_BCKH.reshape(B, U, C // U, K, H)

    def _unpacked(self) -> kv_block.FloatBlock:
        return kv_block.FloatBlock(data_BCKH=self.numbers().astype(self.dtype))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class RunScaledBlock:
    """Slots with a scale for each run of channels of a token; made for values. See ``kv_block.KVBlock``.

    Attributes:
      data_BCKH: int8.
      scale_BKRC, offset_BKRC: float32, for each of the R runs of H / R channels.
      dtype: of the products: that in which the model computes. Static.
    """

    data_BCKH: jax.Array
    scale_BKRC: jax.Array
    offset_BKRC: jax.Array
    dtype: str = dataclasses.field(metadata={"static": True})

    def numbers(self) -> jax.Array:
        """Returns what is stored, float32 (B, C, K, H)."""
        scale_BCKR, offset_BCKR = (x.transpose(0, 3, 1, 2) for x in (self.scale_BKRC, self.offset_BKRC))
        x_BCKRX = self._runs().astype(jnp.float32) * scale_BCKR[..., None] + offset_BCKR[..., None]
        return x_BCKRX.reshape(self.data_BCKH.shape)

    def scores(self, q_BKGTH: jax.Array) -> jax.Array:
        """Multiplies with the numbers themselves."""
        return kv_block.FloatBlock(data_BCKH=self.numbers().astype(self.dtype)).scores(q_BKGTH)

    def weighted(self, weight_BKGTC: jax.Array) -> jax.Array:
        """Multiplies the weights by the scales of each run, and those with the stored numbers."""
        scaled_BKGTRC = (weight_BKGTC[:, :, :, :, None] * self.scale_BKRC[:, :, None, None]).astype(self.dtype)
        sum_BKGTRX = jnp.einsum(
            "BKGTRC,BCKRX->BKGTRX", scaled_BKGTRC, self._runs().astype(self.dtype), preferred_element_type=jnp.float32
        )
        exact = jax.lax.Precision.HIGHEST
        sum_BKGTRX += jnp.einsum("BKGTC,BKRC->BKGTR", weight_BKGTC, self.offset_BKRC, precision=exact)[..., None]
        return sum_BKGTRX.reshape(*sum_BKGTRX.shape[:4], -1)

    def only(self, is_held_BC: jax.Array) -> "RunScaledBlock":
        """Puts zeros into the other slots."""
        is_held_B11C = is_held_BC[:, None, None, :]
        return dataclasses.replace(
            self,
            scale_BKRC=jnp.where(is_held_B11C, self.scale_BKRC, 0.0),
            offset_BKRC=jnp.where(is_held_B11C, self.offset_BKRC, 0.0),
        )

    def widened(self) -> "RunScaledBlock":
        """Computes in float32."""
        return dataclasses.replace(self, dtype="float32")

    def _runs(self) -> jax.Array:
        R = self.scale_BKRC.shape[2]
        return self.data_BCKH.reshape(*self.data_BCKH.shape[:3], R, -1)
