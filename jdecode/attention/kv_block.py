"""A few slots of keys or of values, as they are stored, and the two products that attention takes with them.

A quantised store is never unpacked: its scales are applied to scores and to weights, which are far smaller than the
numbers they belong to. See ``cache/codec_token.py``.
"""

import dataclasses
from typing import Protocol, Self

import jax
import jax.numpy as jnp


class KVBlock(Protocol):
    """C slots of K heads, keys or values."""

    def scores(self, q_BKGTH: jax.Array) -> jax.Array:
        """Returns the products of queries with these keys, float32 (B, K, G, T, C)."""
        ...

    def weighted(self, weight_BKGTC: jax.Array) -> jax.Array:
        """Returns the sums of these values, weighted (float32) by slot, float32 (B, K, G, T, H)."""
        ...

    def only(self, is_held_BC: jax.Array) -> "KVBlock":
        """Returns the block with zeros in the other slots, whatever they hold: zero times NaN would be NaN."""
        ...

    def widened(self) -> Self:
        """Returns the block with products in float32."""
        ...


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FloatBlock:
    """Slots stored as they are, in any float dtype. See ``KVBlock``."""

    data_BCKH: jax.Array

    def scores(self, q_BKGTH: jax.Array) -> jax.Array:
        """Multiplies in the queries' dtype or the keys', whichever is wider, and sums in float32."""
        return jnp.einsum("BKGTH,BCKH->BKGTC", q_BKGTH, self.data_BCKH, preferred_element_type=jnp.float32)

    def weighted(self, weight_BKGTC: jax.Array) -> jax.Array:
        """Multiplies in the values' dtype, and sums in float32."""
        weight_BKGTC = weight_BKGTC.astype(self.data_BCKH.dtype)
        return jnp.einsum("BKGTC,BCKH->BKGTH", weight_BKGTC, self.data_BCKH, preferred_element_type=jnp.float32)

    def only(self, is_held_BC: jax.Array) -> "FloatBlock":
        """Puts zeros into the other slots."""
        zero = jnp.zeros((), self.data_BCKH.dtype)
        return FloatBlock(data_BCKH=jnp.where(is_held_BC[:, :, None, None], self.data_BCKH, zero))

    def widened(self) -> "FloatBlock":
        """Casts the numbers."""
        return FloatBlock(data_BCKH=self.data_BCKH.astype(jnp.float32))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenScaledBlock:
    """Slots stored in 8 bits with one scale a slot and head. See ``KVBlock``.

    Attributes:
      data_BCKH: int8 or float8; what they stand for is ``data * scale``.
      scale_BKC: float32.
      dtype: of the products: that in which the model computes. Static.
    """

    data_BCKH: jax.Array
    scale_BKC: jax.Array
    dtype: str = dataclasses.field(metadata={"static": True})

    def scores(self, q_BKGTH: jax.Array) -> jax.Array:
        """Multiplies with the stored numbers, and the scores by the scales."""
        score_BKGTC = FloatBlock(data_BCKH=self.data_BCKH.astype(self.dtype)).scores(q_BKGTH)
        return score_BKGTC * self.scale_BKC[:, :, None, None, :]

    def weighted(self, weight_BKGTC: jax.Array) -> jax.Array:
        """Multiplies the weights by the scales, and those with the stored numbers."""
        scaled_BKGTC = weight_BKGTC * self.scale_BKC[:, :, None, None, :]
        return FloatBlock(data_BCKH=self.data_BCKH.astype(self.dtype)).weighted(scaled_BKGTC)

    def only(self, is_held_BC: jax.Array) -> "TokenScaledBlock":
        """Puts zeros into the other slots."""
        is_held_BKC = is_held_BC[:, None, :]
        return dataclasses.replace(
            self,
            # float8 has NaN, too.
            data_BCKH=jnp.where(is_held_BC[:, :, None, None], self.data_BCKH, jnp.zeros((), self.data_BCKH.dtype)),
            scale_BKC=jnp.where(is_held_BKC, self.scale_BKC, 0.0),
        )

    def widened(self) -> "TokenScaledBlock":
        """Computes in float32."""
        return dataclasses.replace(self, dtype="float32")
