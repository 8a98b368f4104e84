"""A linear map between named axes."""

import math
from collections.abc import Callable, Sequence
from typing import cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdecode.models import panels

INITIALIZER_RANGE = 0.02
"""Standard deviation of fresh weights, for training from scratch."""


def weight(
    module: nn.Module, initializer: Callable[..., jax.Array], shape: Sequence[int], axes: Sequence[str]
) -> jax.Array | panels.Panels:
    """Declares the parameter ``weight`` of ``module``, which may have been given in panels."""
    if module.has_variable("params", "weight"):
        given = module.get_variable("params", "weight")
        if isinstance(given, panels.Panels):
            return given
    return parameter(module, "weight", initializer, shape, axes)


def parameter(
    module: nn.Module, name: str, initializer: Callable[..., jax.Array], shape: Sequence[int], axes: Sequence[str]
) -> jax.Array:
    """Declares a float32 parameter of ``module``, one logical axis name an axis."""
    value = module.param(name, nn.with_logical_partitioning(initializer, tuple(axes)), tuple(shape), jnp.float32)
    return cast(jax.Array, value)  # flax unboxes it


def product(
    x: jax.Array, weight: jax.Array | panels.Panels, num_in_axes: int, dtype: str, out_dtype: str | None = None
) -> jax.Array:
    """Contracts the last axes of ``x`` with the last axes of ``weight``.

    Both are folded to matrices first: with several free or contracted axes XLA's CPU backend copies the weight into
    another order on every call.

    Args:
      x: (..., in axes).
      weight: (out axes, in axes), as an array or in panels.
      num_in_axes: how many axes are contracted. Static.
      dtype: of the operands.
      out_dtype: of the result; ``None`` for ``dtype``.

    Returns:
      (..., out axes).
    """
    out_shape, in_len = weight.shape[:-num_in_axes], math.prod(weight.shape[-num_in_axes:])
    batch_shape = x.shape[:-num_in_axes]
    if isinstance(weight, panels.Panels):
        y = weight.product(x.reshape(-1, in_len), dtype, out_dtype or dtype)
        return y.reshape(*batch_shape, *out_shape)
    y = jax.lax.dot_general(
        x.astype(dtype).reshape(-1, in_len),
        weight.astype(dtype).reshape(-1, in_len),
        (((1,), (1,)), ((), ())),
        preferred_element_type=out_dtype or dtype,
    )
    return y.reshape(*batch_shape, *out_shape)


class Linear(nn.Module):
    """Multiplies by a weight, and adds a bias where there is one.

    Weights lie (out, in), as model files hold them: loading copies no axis, and one row of tokens reads them at the
    full memory bandwidth of a CPU.

    Attributes:
      out_shape, in_shape: axes of the weight.
      axes: the logical name of each axis of the weight; ``parallel/rules`` maps names to mesh axes.
      has_bias: whether a bias of ``out_shape`` is added.
      dtype: of input, product and output.
    """

    out_shape: Sequence[int]
    in_shape: Sequence[int]
    axes: Sequence[str]
    has_bias: bool = False
    dtype: str = "float32"

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps (..., in axes) to (..., out axes)."""
        shape = (*self.out_shape, *self.in_shape)
        own = weight(self, nn.initializers.normal(INITIALIZER_RANGE), shape, self.axes)
        y = product(x, own, len(self.in_shape), self.dtype)
        if self.has_bias:
            bias_axes = self.axes[: len(self.out_shape)]
            bias = parameter(self, "bias", nn.initializers.zeros, self.out_shape, bias_axes)
            y = y + bias.astype(self.dtype).reshape((1,) * (y.ndim - bias.ndim) + bias.shape)
        return y
