"""Where parameters go as they are read: each is placed before the next one is, so that memory holds no second copy."""

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.models import panels, parameter_axes
from jdecode.parallel import rules
from jdecode.weights import load


def on_mesh(mesh: jax.sharding.Mesh, config: config_lib.ModelConfig) -> load.Put:
    """Returns what spreads parameters over devices by the axes of ``models.parameter_axes``."""
    axes = parameter_axes.parameter_axes(config)

    def put(path: str, array: np.ndarray) -> jax.Array:
        return jax.device_put(array, rules.sharding(mesh, axes[path], array.shape))

    return put


def in_panels(config: config_lib.ModelConfig) -> load.Put:
    """Returns what brings weights into ``models.panels`` where they can lie so."""
    del config

    def put(path: str, array: np.ndarray) -> jax.Array | panels.Panels:
        packed = panels.pack(path, array)
        return jax.device_put(array) if packed is None else packed

    return put
