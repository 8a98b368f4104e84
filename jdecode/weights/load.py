"""Loading weights: one tensor at a time from the file to the device, so that memory holds the model about once."""

import dataclasses
import pathlib
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
import tqdm

from jdecode import config
from jdecode.models import panels, parameter_shapes
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.weights import checkpoint as checkpoint_lib
from jdecode.weights import parameter_tree, stored_tensor

# Parameters whose rows the rope rotates.
_ROPE_PATHS = ("query/weight", "query/bias", "key/weight", "key/bias")

Put = Callable[[str, np.ndarray], jax.Array | panels.Panels]
Placement = Callable[[config.ModelConfig], Put]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedWeights:
    """Holds a model's weights and what came with them.

    Attributes:
      config: of the model.
      params: nested dict of arrays, its paths and shapes those of ``parameter_shapes``.
      tokenizer: ``None`` when the checkpoint has none.
      eos_token_ids: the union of what the configuration, the generation configuration and the tokenizer name.
      bos_token_id: ``None`` for none.
      generation_defaults: the generation configuration of the checkpoint as it stands; empty when there is none.
      source: the folder or file that was read.
      notes: what a user may want to know, one sentence each.
    """

    config: config.ModelConfig
    params: dict[str, Any]
    tokenizer: tokenizer_lib.Tokenizer | None
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    generation_defaults: Mapping[str, Any]
    source: str
    notes: tuple[str, ...] = ()


def load_weights(
    source: str | pathlib.Path, *, dtype: str = "float32", placement: Placement | None = None
) -> LoadedWeights:
    """Loads a checkpoint.

    Args:
      source: as ``checkpoint.open_checkpoint`` takes it: a folder with ``config.json`` and safetensors or Orbax
        parameters, a ``.gguf`` file, a packaged model, or a hub id.
      dtype: of every parameter: ``float32``, ``bfloat16`` or ``float16``. Quantised tensors are decoded in float32
        and rounded once.
      placement: given the model's configuration, returns a function that places a parameter on devices, given its
        path and its array, which it may keep; ``None`` for the default device.

    Returns:
      The weights. Every parameter comes from the file and every tensor of the file is used, but for rope frequency
      buffers and the own head tensor of a tied model (see ``notes``).

    Raises:
      ValueError: one line that says what was expected, what was found, and what to do.
    """
    check_dtype(dtype)
    return dataclasses.replace(
        load_opened(checkpoint_lib.open_checkpoint(source), dtype=dtype, placement=placement), source=str(source)
    )


def load_opened(
    opened: checkpoint_lib.Checkpoint, *, dtype: str = "float32", placement: Placement | None = None
) -> LoadedWeights:
    """Loads a checkpoint that has been opened; the rest is as in ``load_weights``.

    Args:
      opened: of ``checkpoint.open_checkpoint``.
    """
    check_dtype(dtype)
    put = placement(opened.config) if placement else _put_default
    return LoadedWeights(
        config=opened.config,
        params=_load_params(opened, stored_tensor.COMPUTE_DTYPES[dtype], put),
        tokenizer=opened.tokenizer,
        eos_token_ids=opened.eos_token_ids,
        bos_token_id=opened.bos_token_id,
        generation_defaults=opened.generation_defaults,
        source=str(opened.source),
        notes=opened.notes,
    )


def check_dtype(dtype: str) -> None:
    """Refuses what is no dtype of parameters.

    Raises:
      ValueError: one line.
    """
    if dtype not in stored_tensor.COMPUTE_DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(stored_tensor.COMPUTE_DTYPES)}, got {dtype!r}")


def _put_default(path: str, array: np.ndarray) -> jax.Array:
    del path
    return jax.device_put(array)


def _load_params(opened: checkpoint_lib.Checkpoint, dtype: np.dtype, put: Put) -> dict[str, Any]:
    shapes = parameter_shapes.parameter_shapes(opened.config)
    loaded: dict[str, jax.Array | panels.Panels] = {}
    total = sum(tensor.num_bytes for tensor in opened.parameters.values())
    # The largest first: where a device array is a copy, the second copy of the embedding then exists while little
    # else is held.
    order = sorted(opened.parameters, key=lambda path: -opened.parameters[path].num_elements)
    is_quiet = not sys.stderr.isatty()
    with tqdm.tqdm(total=total, unit="B", unit_scale=True, desc="weights", disable=is_quiet, leave=False) as bar:
        for path in order:
            array = _read(path, shapes[path], opened, dtype)
            # Waiting keeps arrays that are still on their way to the device from piling up on the host.
            loaded[path] = jax.block_until_ready(put(path, array))
            del array
            bar.update(opened.parameters[path].num_bytes)
    return parameter_tree.nested({path: loaded[path] for path in shapes})


def _read(path: str, shape: tuple[int, ...], opened: checkpoint_lib.Checkpoint, dtype: np.dtype) -> np.ndarray:
    """Reads a parameter and undoes what the file format did to it."""
    tensor = opened.parameters[path]
    if opened.norm_offset and path.endswith("/scale"):
        # Subtract first and round once: 1 + w in few digits has lost most of w.
        scale = tensor.read_as(stored_tensor.COMPUTE_DTYPES["float32"]) - np.float32(opened.norm_offset)
        return scale.astype(dtype)
    array = tensor.read_as(dtype).reshape(shape)
    if opened.rope_permuted and path.endswith(_ROPE_PATHS):
        return unpermute_rope_rows(array)
    return array


def unpermute_rope_rows(array_heads: np.ndarray) -> np.ndarray:
    """Brings the rows of each head from interleaved rope pairs into half-split order.

    GGUF files of Llama models are written for pairs (2i, 2i + 1); the model here, like Hugging Face's, rotates pairs
    (i, i + H/2).

    Args:
      array_heads: ``(heads, H, ...)``, H even. Queries have N heads, keys K.

    Returns:
      An array of the same shape: row i of a head is row 2i of the argument, row i + H/2 is row 2i + 1.
    """
    return np.ascontiguousarray(np.concatenate([array_heads[:, 0::2], array_heads[:, 1::2]], axis=1))
