"""Random models in well-known shapes, for benchmarks that need no weights."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdecode import config_file
from jdecode.models import transformer


def abstract_model(config_name: str, dtype: str):
    """Returns a model and the shapes of its parameters, from the architecture of a config.

    Args:
      config_name: as ``--config`` takes it.
      dtype: of parameters and computation.
    """
    architecture = config_file.load(config_name).architecture
    if architecture is None:
        raise ValueError(f"config {config_name}: expected an architecture, got none")
    model = transformer.Transformer(architecture, dtype=dtype)
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    return model, jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), nn.unbox(boxed))


def random_params(shapes, scale: float = 0.02):
    """Returns normal random parameters of the given shapes."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    draw = jax.jit(lambda key, shape, dtype: scale * jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    return structure.unflatten([draw(key, leaf.shape, leaf.dtype) for key, leaf in zip(keys, leaves, strict=True)])
