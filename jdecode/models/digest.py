"""A digest of a model: two models that would compute the same keys and values, and no others, share it."""

import dataclasses
import hashlib
import json
from typing import Any

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.models import panels


def model_digest(config: config_lib.ModelConfig, dtype: str, params: Any) -> str:
    """Digests configuration, compute dtype and every bit of the weights; reads them all once.

    How the weights lie (in panels, spread over devices) does not matter.

    Args:
      config: of the model.
      dtype: in which it computes.
      params: of the model.

    Returns:
      64 hexadecimal digits.
    """
    digest = hashlib.blake2b(digest_size=32)
    digest.update(json.dumps([dataclasses.asdict(config), dtype], sort_keys=True).encode())

    def is_panels(node: Any) -> bool:
        return isinstance(node, panels.Panels)

    leaves = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_panels)[0]
    for path, leaf in sorted((jax.tree_util.keystr(path), leaf) for path, leaf in leaves):
        array = np.ascontiguousarray(np.asarray(leaf.rows() if isinstance(leaf, panels.Panels) else leaf))
        # Lengths are part of what is digested, so that no bit can move from one array to the next.
        digest.update(f"\n{path} {array.dtype} {array.shape}\n".encode())
        digest.update(array.reshape(-1).view(np.uint8).data)
    return digest.hexdigest()
