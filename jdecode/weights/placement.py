"""Where loaded weights go: onto the devices of a mesh, into panels, or as they are."""

import functools

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.models import panels, parameter_axes
from jdecode.parallel import rules
from jdecode.weights import load


def placement(mesh: jax.sharding.Mesh | None, *, is_packed: bool):
    """Returns the placement for ``load.load_opened``, ``None`` for none.

    Args:
      mesh: the devices to spread weights over; ``None`` for the default one.
      is_packed: bring weights into ``models.panels`` where there is no mesh and the device is a CPU.
    """
    if mesh is not None:
        return functools.partial(_mesh_placement, mesh)
    return _panel_placement if is_packed and jax.default_backend() == "cpu" else None


def _mesh_placement(mesh: jax.sharding.Mesh, config: config_lib.ModelConfig) -> load.Put:
    axes = parameter_axes.parameter_axes(config)

    def put(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, rules.sharding(mesh, axes[path], array.shape))

    return put


def _panel_placement(config: config_lib.ModelConfig) -> load.Put:
    del config

    def put(path: str, array: np.ndarray) -> jax.Array | panels.Panels:
        packed = panels.pack(path, array)
        return jax.device_put(array) if packed is None else packed

    return put
