"""Meshes of devices."""

import jax
import numpy as np

from jdecode import config

AXES = ("data", "model")


def make_mesh(mesh_config: config.MeshConfig) -> jax.sharding.Mesh:
    """Arranges the first ``data * model`` devices.

    Raises:
      ValueError: there are fewer devices.
    """
    needed, devices = mesh_config.data * mesh_config.model, jax.devices()
    if needed > len(devices):
        raise ValueError(
            f"mesh: expected at most {len(devices)} devices (there are so many), got "
            f"data={mesh_config.data} x model={mesh_config.model} = {needed}"
        )
    grid = np.asarray(devices[:needed]).reshape(mesh_config.data, mesh_config.model)
    return jax.sharding.Mesh(grid, AXES, axis_types=(jax.sharding.AxisType.Auto,) * len(AXES))


def abstract_mesh(mesh_config: config.MeshConfig) -> jax.sharding.AbstractMesh:
    """Describes a mesh whose devices need not be there, to plan with: shapes traced on it carry their shardings."""
    shape = (mesh_config.data, mesh_config.model)
    return jax.sharding.AbstractMesh(shape, AXES, axis_types=(jax.sharding.AxisType.Explicit,) * len(AXES))
