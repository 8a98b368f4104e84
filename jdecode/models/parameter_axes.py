"""The logical axes of every parameter, as the modules themselves name them."""

import jax
import jax.numpy as jnp
from flax import linen as nn

from jdecode import config as config_lib
from jdecode.models import transformer

Axes = tuple[str | None, ...]


def parameter_axes(config: config_lib.ModelConfig) -> dict[str, Axes]:
    """Lists the logical axes of a model's parameters.

    Returns:
      Path (parts joined by ``/``, as in ``parameter_shapes``) to one name an axis. ``parallel/rules`` says what the
      names mean.
    """
    model = transformer.Transformer(config)
    # The key is traced too, so that no device is needed.
    boxed = jax.eval_shape(lambda: model.init(jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))["params"]
    leaves = jax.tree_util.tree_leaves_with_path(boxed, is_leaf=lambda leaf: isinstance(leaf, nn.LogicallyPartitioned))
    return {"/".join(entry.key for entry in path): tuple(leaf.names) for path, leaf in leaves}
