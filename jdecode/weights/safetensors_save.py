"""Writing a model as a Hugging Face folder, one tensor at a time, so that memory holds no second copy of it."""

import dataclasses
import json
import math
import pathlib
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jdecode import config
from jdecode.models import families, parameter_shapes
from jdecode.weights import safetensors_file, safetensors_folder, stored_tensor

DEFAULT_SHARD_BYTES = 5_000_000_000
_HEADER_ALIGNMENT = 8  # bytes


def save_hugging_face(
    folder: str | pathlib.Path,
    params: Mapping[str, Any],
    model: config.ModelConfig,
    *,
    tokenizer_files: Sequence[str | pathlib.Path] = (),
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
    max_shard_bytes: int = DEFAULT_SHARD_BYTES,
) -> None:
    """Writes ``config.json`` and safetensors that this engine and Hugging Face's library load.

    Args:
      folder: made when absent. Must hold no weights yet, as a reader could not tell old ones from new.
      params: nested dict of arrays (float32, bfloat16, float16), as ``load_weights`` returns it; written bit by bit.
      model: the configuration of the parameters.
      tokenizer_files: copied into the folder.
      eos_token_ids: written into ``config.json``.
      bos_token_id: written into ``config.json``.
      generation_defaults: written as ``generation_config.json`` when given.
      max_shard_bytes: a file holds at most so many bytes of tensors, but at least one tensor.

    Raises:
      ValueError: for parameters that do not fit the configuration, a configuration that the format cannot say, or a
        folder that holds weights already.
    """
    folder = pathlib.Path(folder)
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: expected a count of at least 1, got {max_shard_bytes}")
    values = _config_values(model)
    arrays = _checked(params, model)
    if folder.is_dir() and any(folder.glob("*.safetensors*")):
        raise ValueError(f"{folder}: expected a folder without weights, got one with safetensors; give a new folder")
    missing = [str(file) for file in tokenizer_files if not pathlib.Path(file).is_file()]
    if missing:
        raise ValueError(f"tokenizer_files: expected files that exist, got {missing[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_files:
        shutil.copyfile(file, folder / pathlib.Path(file).name)
    if generation_defaults:
        _write_json(folder / "generation_config.json", generation_defaults)
    names = families.find_name(model.family).hugging_face_names(model)
    _write_shards(folder, {names[path]: (path, array) for path, array in arrays.items()}, max_shard_bytes)
    values["torch_dtype"] = str(arrays["embedding/weight"].dtype)
    values["bos_token_id"] = bos_token_id
    values["eos_token_id"] = list(eos_token_ids) if len(eos_token_ids) > 1 else next(iter(eos_token_ids), None)
    # Last: a folder without config.json is refused, so a write that was cut short is never taken for a model.
    _write_json(folder / "config.json", values)


def _config_values(model: config.ModelConfig) -> dict[str, Any]:
    """Makes the mapping of ``config.json`` and checks that reading it gives the same configuration."""
    family = families.find_name(model.family)
    values = family.config_to_hugging_face(model)
    again = family.config_from_hugging_face(values)
    names = [field.name for field in dataclasses.fields(model)]
    lost = [name for name in names if getattr(model, name) != getattr(again, name)]
    if lost:
        raise ValueError(
            f"config: expected a model that the {model.family} format can describe, got one whose {', '.join(lost)} it "
            f"cannot say"
        )
    return values


def _checked(params: Mapping[str, Any], model: config.ModelConfig) -> dict[str, Any]:
    """Flattens the parameters and compares paths, shapes and dtypes with the configuration."""
    flat = dict(_flatten(params, ""))
    shapes = parameter_shapes.parameter_shapes(model)
    if different := sorted(set(flat) ^ set(shapes)):
        state = "missing" if different[0] in shapes else "unknown"
        raise ValueError(f"params: expected the parameters of the configuration, got {different[0]!r} {state}")
    for path, shape in shapes.items():
        if tuple(flat[path].shape) != shape:
            raise ValueError(f"params: {path}: expected shape {shape}, got {tuple(flat[path].shape)}")
        if str(flat[path].dtype) not in stored_tensor.COMPUTE_DTYPES:
            known = ", ".join(stored_tensor.COMPUTE_DTYPES)
            raise ValueError(f"params: {path}: expected one of {known}, got {flat[path].dtype}")
    return {path: flat[path] for path in shapes}


def _flatten(tree: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    pairs = []
    for name, node in tree.items():
        pairs += _flatten(node, f"{prefix}{name}/") if isinstance(node, Mapping) else [(prefix + name, node)]
    return pairs


def _write_shards(folder: pathlib.Path, tensors: Mapping[str, tuple[str, Any]], max_shard_bytes: int) -> None:
    """Writes one file, or several with an index."""
    shards: list[dict[str, tuple[str, Any]]] = [{}]
    held = 0
    for name, (path, array) in tensors.items():
        if shards[-1] and held + array.nbytes > max_shard_bytes:
            shards.append({})
            held = 0
        shards[-1][name] = (path, array)
        held += array.nbytes
    if len(shards) == 1:
        _write_file(folder / safetensors_folder.SINGLE_NAME, shards[0])
        return
    files = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_file(folder / file, shard)
    index = {
        "metadata": {"total_size": sum(array.nbytes for _, array in tensors.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    _write_json(folder / safetensors_folder.INDEX_NAME, index)


def _write_file(path: pathlib.Path, tensors: Mapping[str, tuple[str, Any]]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (parameter, array) in tensors.items():
        shape = parameter_shapes.file_shape(parameter, tuple(array.shape))
        dtype = safetensors_file.DTYPE_NAMES[stored_tensor.COMPUTE_DTYPES[str(array.dtype)]]
        num_bytes = math.prod(shape) * array.dtype.itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, array in tensors.values():
            file.write(np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data)


def _write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
