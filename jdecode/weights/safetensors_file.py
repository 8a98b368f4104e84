"""One safetensors file: where its tensors lie, every number checked against the file before it is used.

The format: a u64 length, that many bytes of JSON (name to dtype, shape and byte range), then the data.
"""

import math
import pathlib
from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from jdecode.weights import json_file, stored_tensor

_PREFIX_BYTES = 8
_METADATA_KEY = "__metadata__"

# numpy does not know the last three by itself
_DTYPES = {
    "BOOL": np.dtype(np.bool_),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "U16": np.dtype(np.uint16),
    "I16": np.dtype(np.int16),
    "U32": np.dtype(np.uint32),
    "I32": np.dtype(np.int32),
    "U64": np.dtype(np.uint64),
    "I64": np.dtype(np.int64),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


def read_header(path: pathlib.Path) -> dict[str, stored_tensor.StoredTensor]:
    """Reads the table of tensors, without the tensors.

    Args:
      path: a ``.safetensors`` file.

    Returns:
      Name to where the tensor lies. The tensors fill the file and share no byte.

    Raises:
      ValueError: one line that names the file and the first thing wrong with it.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
            if size < _PREFIX_BYTES or length > min(size - _PREFIX_BYTES, json_file.MAX_BYTES):
                raise ValueError(
                    f"{path}: expected a safetensors header inside the file of {size} bytes, got a header length of "
                    f"{length}; the file is truncated or damaged"
                )
            text = file.read(length)
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got: {error.strerror or error}") from error
    table = json_file.parse_object(text, f"{path}: header")
    table.pop(_METADATA_KEY, None)
    start = _PREFIX_BYTES + length
    tensors = {name: _tensor(path, name, entry, start) for name, entry in table.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.offset, tensor.num_bytes)):
        if tensor.offset != end:
            raise ValueError(
                f"{path}: tensor {tensor.name!r}: expected its data at byte {end}, got {tensor.offset}; the header is "
                f"damaged"
            )
        end += tensor.num_bytes
    if end != size:
        raise ValueError(f"{path}: expected {end} bytes from its header, got {size}; the file is truncated or damaged")
    return tensors


def _tensor(path: pathlib.Path, name: str, entry: Any, start: int) -> stored_tensor.StoredTensor:
    where = f"{path}: tensor {name!r}"
    if not isinstance(entry, Mapping) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{where}: expected dtype, shape and data_offsets, got {str(entry)[:80]}")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise ValueError(f"{where}: expected a dtype among {', '.join(_DTYPES)}, got {str(dtype)[:40]!r}")
    if not _are_counts(shape) or not _are_counts(offsets) or len(offsets) != 2:
        raise ValueError(f"{where}: expected whole numbers in shape and two in data_offsets, got {str(entry)[:80]}")
    num_bytes = math.prod(shape) * _DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != num_bytes:
        raise ValueError(
            f"{where}: expected {num_bytes} bytes for shape {shape} of {dtype}, got {offsets[1] - offsets[0]}"
        )
    return stored_tensor.StoredTensor(
        name=name,
        path=path,
        offset=start + offsets[0],
        shape=tuple(shape),
        encoding=stored_tensor.Encoding.plain(_DTYPES[dtype]),
    )


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)
