"""Writing a model as a Hugging Face folder, one tensor at a time, so that memory holds no second copy of it."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jdecode import config
from jdecode.models import families, parameter_shapes
from jdecode.weights import model_folder, safetensors_folder, safetensors_write, stored_tensor

DEFAULT_SHARD_BYTES = 5_000_000_000


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
    if max_shard_bytes < 1:
        raise ValueError(f"max_shard_bytes: expected a count of at least 1, got {max_shard_bytes}")

    def write_weights(target: pathlib.Path, arrays: Mapping[str, Any]) -> None:
        names = families.find_name(model.family).hugging_face_names(model)
        _write_shards(target, {names[path]: (path, array) for path, array in arrays.items()}, max_shard_bytes)

    model_folder.write(
        folder,
        params,
        model,
        write_weights,
        tokenizer_files=tokenizer_files,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        generation_defaults=generation_defaults,
    )


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
    model_folder.write_json(folder / safetensors_folder.INDEX_NAME, index)


def _write_file(path: pathlib.Path, tensors: Mapping[str, tuple[str, Any]]) -> None:
    safetensors_write.write(path, {name: _tensor(*tensor) for name, tensor in tensors.items()})


def _tensor(parameter: str, array: Any) -> safetensors_write.Tensor:
    shape = parameter_shapes.file_shape(parameter, tuple(array.shape))
    dtype = stored_tensor.COMPUTE_DTYPES[str(array.dtype)]
    return safetensors_write.Tensor(shape=shape, dtype=dtype, read=lambda: array)
