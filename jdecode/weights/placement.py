"""Where parameters go as they are read: over the devices of a mesh, or into the panels of a CPU."""

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.models import panels, parameter_axes
from jdecode.parallel import rules
from jdecode.weights import load


def over_mesh(mesh: jax.sharding.Mesh, config: config_lib.ModelConfig) -> load.Put:
    """Splits parameters along the axes of a mesh."""
    axes = parameter_axes.parameter_axes(config)

    def put(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, rules.sharding(mesh, axes[path], array.shape))

    return put


def in_panels(config: config_lib.ModelConfig) -> load.Put:
    """Packs the matrices that ``models.panels`` knows; the rest stays as it is."""
    del config

    def put(path: str, array: np.ndarray) -> jax.Array | panels.Panels:
        packed = panels.pack(path, array)
        return jax.device_put(array) if packed is None else packed

    return put
