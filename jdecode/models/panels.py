"""Weights in panels: the order in which a CPU reads a matrix once for several tokens.

A matrix of O outputs and I inputs is cut into P panels of X outputs (64, or 32), and each panel lies (I, X)::

    weight (O, I)    panels (P, I, X), P X = O        panels[p, i, x] = weight[X * p + x, i]

The matrix product of XLA's CPU backend first copies the weight into an order of its own. For one token it does not
have to, but for two it reads, writes and reads again what it copied, beyond the caches: two tokens cost twice as much
as one. A panel fits into the nearest cache, and lies nearly as the product wants it, so that a few tokens cost about
as much as one. That decides the speed of small batches and of verifying a draft's block.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

PANEL_LENS = (64, 32)
"""Outputs a panel, best first."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Panels:
    """A weight in panels.

    Attributes:
      data_PIX: the panels.
      shape: of the weight that they hold: out axes, then in axes. Static.
    """

    data_PIX: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def product(self, x_TI: jax.Array, dtype: str, out_dtype: str) -> jax.Array:
        """Contracts (T, I) with the weight's inputs; returns (T, O)."""
        T, P = x_TI.shape[0], self.data_PIX.shape[0]
        if T == 1:  # a second row costs nothing, and takes the faster path of the backend
            x_TI = jnp.pad(x_TI, ((0, 1), (0, 0)))
        x_PTI = jnp.broadcast_to(x_TI.astype(dtype)[None], (P, *x_TI.shape))
        y_PTX = jax.lax.dot_general(
            x_PTI, self.data_PIX.astype(dtype), (((2,), (1,)), ((0,), (0,))), preferred_element_type=out_dtype
        )
        return y_PTX.transpose(1, 0, 2).reshape(-1, P * self.data_PIX.shape[2])[:T]

    def take(self, idx: jax.Array) -> jax.Array:
        """Returns rows of a weight (O, I), by their number: int32 (...) to (..., I)."""
        idx = jnp.clip(idx, 0, self.shape[0] - 1)
        panel_len = self.data_PIX.shape[2]
        return self.data_PIX[idx // panel_len, :, idx % panel_len]

    def rows(self) -> jax.Array:
        """Returns the weight as it lies elsewhere: out axes, then in axes."""
        return jnp.swapaxes(self.data_PIX, 1, 2).reshape(self.shape)


def pack(path: str, array: np.ndarray) -> Panels | None:
    """Brings a parameter into panels, in place where its memory may be written.

    Args:
      path: of ``parameter_shapes``.
      array: the parameter.

    Returns:
      ``None`` for what cannot lie so: no weight, or none whose outputs fill panels.
    """
    if not path.endswith("/weight"):
        return None
    # The weights of queries, keys and values have two out axes, that of the attention's output has two in axes.
    num_out_axes = 2 if path.endswith(("query/weight", "key/weight", "value/weight")) else 1
    outputs = math.prod(array.shape[:num_out_axes])
    panel_len = next((length for length in PANEL_LENS if outputs % length == 0), None)
    if panel_len is None:
        return None
    inputs = array.size // outputs
    # A panel takes the memory of the rows that it holds.
    rows_PXI = np.require(array, requirements=["C", "W"]).reshape(-1, panel_len, inputs)
    for rows_XI in rows_PXI:
        rows_XI.reshape(inputs, panel_len)[...] = rows_XI.T.copy()
    return Panels(data_PIX=jax.device_put(rows_PXI.reshape(-1, inputs, panel_len)), shape=array.shape)
