"""Weights in panels: the order in which a CPU reads a matrix once for several tokens.

A matrix of O outputs and I inputs is cut into O / 64 panels of 64 outputs, and each panel lies (I, 64)::

    weight (O, I)    panels (O / 64, I, 64)        panels[p, i, j] = weight[64 * p + j, i]

The matrix product of XLA's CPU backend first copies the weight into an order of its own. For one token it does not have
to, but for two it reads, writes and reads again what it copied, beyond the caches: two tokens cost twice as much as one.
A panel fits into the nearest cache, and lies nearly as the product wants it, so one to five tokens cost about the same.
That decides the speed of small batches and of verifying a draft's block.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

PANEL_LEN = 64
"""Outputs a panel."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Panels:
    """A weight in panels.

    Attributes:
      data_PIO: the P panels, (P, I, ``PANEL_LEN``).
      shape: of the weight that they hold: out axes, then in axes. Static.
    """

    data_PIO: jax.Array
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def product(self, x_TI: jax.Array, dtype: str, out_dtype: str) -> jax.Array:
        """Contracts (T, I) with the weight's inputs; returns (T, O)."""
        T, P = x_TI.shape[0], self.data_PIO.shape[0]
        if T == 1:  # a second row costs nothing, and takes the faster path of the backend
            x_TI = jnp.pad(x_TI, ((0, 1), (0, 0)))
        x_PTI = jnp.broadcast_to(x_TI.astype(dtype)[None], (P, *x_TI.shape))
        y_PTO = jax.lax.dot_general(
            x_PTI, self.data_PIO.astype(dtype), (((2,), (1,)), ((0,), (0,))), preferred_element_type=out_dtype
        )
        return y_PTO.transpose(1, 0, 2).reshape(-1, P * PANEL_LEN)[:T]

    def take(self, idx: jax.Array) -> jax.Array:
        """Returns rows of a weight (O, I), by their number: int32 (...) to (..., I)."""
        idx = jnp.clip(idx, 0, self.shape[0] - 1)
        return self.data_PIO[idx // PANEL_LEN, :, idx % PANEL_LEN]

    def rows(self) -> jax.Array:
        """Returns the weight as it lies elsewhere: out axes, then in axes."""
        return jnp.swapaxes(self.data_PIO, 1, 2).reshape(self.shape)


def num_outputs(path: str, shape: tuple[int, ...]) -> int | None:
    """Returns O of a parameter that can lie in panels, ``None`` for one that cannot.

    Args:
      path: of ``parameter_shapes``.
      shape: its shape.
    """
    if not path.endswith("/weight"):
        return None
    # The output projection has two in axes, those of queries, keys and values two out axes.
    num_out_axes = 2 if path.endswith(("query/weight", "key/weight", "value/weight")) else 1
    outputs = math.prod(shape[:num_out_axes])
    return outputs if outputs % PANEL_LEN == 0 else None


def pack(path: str, array: np.ndarray) -> Panels | None:
    """Brings a parameter into panels, in place where its memory may be written; ``None`` where it cannot lie so."""
    outputs = num_outputs(path, array.shape)
    if outputs is None:
        return None
    shape, inputs = array.shape, array.size // outputs
    # A panel takes the memory of the 64 rows that it holds.
    whole = np.require(array, requirements=["C", "W"]).reshape(-1, PANEL_LEN, inputs)
    for panel in whole:
        panel.reshape(inputs, PANEL_LEN)[...] = panel.T.copy()
    return Panels(data_PIO=jax.device_put(whole.reshape(-1, inputs, PANEL_LEN)), shape=shape)
