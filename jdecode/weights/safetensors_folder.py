"""The safetensors files of a folder: one file, or several with an index."""

import pathlib

from jdecode.weights import json_file, safetensors_file, stored_tensor

SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"


def read_headers(folder: pathlib.Path) -> dict[str, stored_tensor.StoredTensor]:
    """Finds every tensor of a folder.

    Args:
      folder: holds ``model.safetensors``, or ``model.safetensors.index.json`` with the files that it names, or
        exactly one other ``.safetensors`` file.

    Returns:
      Name to where the tensor lies.

    Raises:
      ValueError: one line that names the file and what is wrong: nothing to read, a missing shard, a tensor that the
        index and the shards do not agree on, or a damaged file.
    """
    if (folder / SINGLE_NAME).exists():
        return safetensors_file.read_header(folder / SINGLE_NAME)
    if (folder / INDEX_NAME).exists():
        return _read_shards(folder)
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return safetensors_file.read_header(found[0])
    if found:
        raise ValueError(
            f"{folder}: expected {INDEX_NAME} beside {len(found)} safetensors files, got none; fetch it too"
        )
    others = sorted(path.name for pattern in ("*.bin", "*.pth", "*.gguf", "*.h5") for path in folder.glob(pattern))
    got = f"only {others[0]}" if others else "no weights"
    raise ValueError(f"{folder}: expected {SINGLE_NAME} or {INDEX_NAME}, got {got}; save the model as safetensors")


def _read_shards(folder: pathlib.Path) -> dict[str, stored_tensor.StoredTensor]:
    index = folder / INDEX_NAME
    weight_map = json_file.read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected weight_map, an object from tensor to file, got {str(weight_map)[:60]}")
    for name, shard in weight_map.items():
        # Only a plain name: an index must not reach outside its folder.
        if not isinstance(shard, str) or pathlib.PurePath(shard).name != shard or not shard.endswith(".safetensors"):
            raise ValueError(
                f"{index}: tensor {name!r}: expected the name of a safetensors file, got {str(shard)[:80]!r}"
            )
    tensors: dict[str, stored_tensor.StoredTensor] = {}
    for shard in sorted(set(weight_map.values())):
        if not (folder / shard).exists():
            raise ValueError(f"{folder / shard}: expected this shard, which {INDEX_NAME} names, got none; fetch it")
        for name, tensor in safetensors_file.read_header(folder / shard).items():
            if weight_map.get(name) != shard:
                raise ValueError(
                    f"{folder / shard}: tensor {name!r}: expected it in {weight_map.get(name, 'no shard')} by "
                    f"{INDEX_NAME}, got it here; the files do not belong together"
                )
            tensors[name] = tensor
    for name, shard in weight_map.items():
        if name not in tensors:
            raise ValueError(f"{folder / shard}: expected tensor {name!r} by {INDEX_NAME}, got none; fetch it again")
    return tensors
