"""What the parameters of a model take, from its configuration alone."""

import dataclasses
import math
from typing import cast

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.models import parameter_axes, parameter_shapes
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights:
    """The size of a model's parameters.

    Attributes:
      num_parameters: how many there are.
      num_bytes: of all of them.
      device_bytes: of what one device of the mesh holds.
    """

    num_parameters: int
    num_bytes: int
    device_bytes: int


def weights(model: config_lib.ModelConfig, dtype: str, mesh: config_lib.MeshConfig) -> Weights:
    """Counts parameters, as ``jdecode.load`` holds them.

    Args:
      model: the configuration.
      dtype: of every parameter.
      mesh: the devices, which need not be there.
    """
    shapes = parameter_shapes.parameter_shapes(model)
    width = jnp.dtype(dtype).itemsize
    count = sum(map(math.prod, shapes.values()))
    on_device = count if mesh.data * mesh.model == 1 else _parameters_a_device(model, shapes, mesh)
    return Weights(num_parameters=count, num_bytes=count * width, device_bytes=on_device * width)


def _parameters_a_device(
    model: config_lib.ModelConfig, shapes: dict[str, tuple[int, ...]], mesh_config: config_lib.MeshConfig
) -> int:
    mesh = cast(jax.sharding.Mesh, mesh_lib.abstract_mesh(mesh_config))  # only its shape is read
    # All layers have the parameters of the first one, and tracing all of a large model takes long.
    axes = parameter_axes.parameter_axes(dataclasses.replace(model, layers=model.layers[:1]))

    def on_device(path: str, shape: tuple[int, ...]) -> int:
        first, _, rest = path.partition("/")
        names = axes[f"layers_0/{rest}" if first.startswith("layers_") else path]
        return math.prod(rules.sharding(mesh, names, shape).shard_shape(shape))

    return sum(on_device(path, shape) for path, shape in shapes.items())
