"""From many key/value heads to few: multi-head to grouped-query to multi-query attention (Ainslie et al. 2023, §2.1).

The cache holds K heads a token and layer, so K/K' times fewer after pooling. Each new head is the mean of a group of
neighbours, and the query heads stay where they are: query head n read head ``n // (N/K)`` and reads pooled head
``n // (N/K')``, which is the mean of the group that its old head lay in.

Projections are linear and rope is linear in what they give, so the pooled key is the mean of the group's keys at every
position, whatever the rope. With ``qk_norm`` this holds before the norm only, whose scales all heads share. What
attention makes of the mean is another function than before, unless the heads of a group were equal: a pooled model has
to be trained on for a while (``training.up_training``).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.weights import parameter_tree

# Parameters with an axis of K heads, the first.
_POOLED = tuple(f"attention/{name}/{part}" for name in ("key", "value") for part in ("weight", "bias"))


def pooled_config(model: config_lib.ModelConfig, num_kv_heads: int) -> config_lib.ModelConfig:
    """Returns the configuration after pooling, without any parameters.

    Args:
      model: with K key/value heads.
      num_kv_heads: K', a divisor of K.

    Raises:
      ValueError: ``num_kv_heads`` is no divisor of K.
    """
    is_count = isinstance(num_kv_heads, int) and not isinstance(num_kv_heads, bool) and num_kv_heads >= 1
    if not is_count or model.num_kv_heads % num_kv_heads:
        divisors = [str(count) for count in range(1, model.num_kv_heads + 1) if model.num_kv_heads % count == 0]
        raise ValueError(
            f"num_kv_heads: expected a divisor of the model's {model.num_kv_heads} key/value heads "
            f"({', '.join(divisors)}), got {num_kv_heads!r}"
        )
    return dataclasses.replace(model, num_kv_heads=num_kv_heads)


def pool_kv_heads(
    params: Mapping[str, Any], model: config_lib.ModelConfig, num_kv_heads: int
) -> tuple[dict[str, Any], config_lib.ModelConfig]:
    """Replaces each group of neighbouring key/value heads by its mean (Ainslie et al. 2023, §2.1).

    Args:
      params: nested dict of arrays, as ``load_weights`` returns it; not changed.
      model: the configuration of the parameters, with K key/value heads.
      num_kv_heads: K', a divisor of K; K itself changes nothing, bit for bit, and 1 is multi-query attention.

    Returns:
      The parameters, which share all arrays but the keys' and values' with ``params``, and their configuration. Means
      are taken in float64 and rounded once to the dtype of the heads, so the mean of equal heads is that head. Pooled
      arrays lie on the default device.

    Raises:
      ValueError: ``num_kv_heads`` is no divisor of K.
    """
    pooled_model = pooled_config(model, num_kv_heads)
    flat = parameter_tree.flat(params)
    if num_kv_heads != model.num_kv_heads:
        flat = {path: _pool(leaf, num_kv_heads) if path.endswith(_POOLED) else leaf for path, leaf in flat.items()}
    return parameter_tree.nested(flat), pooled_model


def _pool(array: Any, num_kv_heads: int) -> jax.Array:
    """Returns the means of the groups of the first axis: (K, H, ...) to (K', H, ...)."""
    groups = np.asarray(array, np.float64).reshape(num_kv_heads, -1, *array.shape[1:])
    return jax.device_put(groups.mean(axis=1).astype(array.dtype))
