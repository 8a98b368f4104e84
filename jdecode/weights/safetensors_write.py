"""Writes one safetensors file, one tensor at a time. The format is that of ``safetensors_file``."""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jdecode.weights import safetensors_file

_HEADER_ALIGNMENT = 8  # bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor:
    """A tensor to write.

    Attributes:
      shape, dtype: as the file says them.
      read: returns the array, of the same bytes, when its turn has come.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    read: Callable[[], Any]


def write(path: pathlib.Path, tensors: Mapping[str, Tensor], *, digest: Any = None) -> None:
    """Writes tensors in their order.

    Args:
      path: of the file; replaced.
      digest: of ``hashlib``, brought up to date with every byte of the file.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        num_bytes = math.prod(tensor.shape) * tensor.dtype.itemsize
        dtype = safetensors_file.DTYPE_NAMES[tensor.dtype]
        header[name] = {"dtype": dtype, "shape": list(tensor.shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _HEADER_ALIGNMENT)
    with path.open("wb") as file:

        def put(data: Any) -> None:
            file.write(data)
            if digest is not None:
                digest.update(data)

        put(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            put(np.ascontiguousarray(np.asarray(tensor.read())).reshape(-1).view(np.uint8).data)
