"""Builds GGUF files byte by byte, so that a test can also write what no library would."""

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

U8, U32, F32, BOOL, STRING, ARRAY, U64 = 0, 4, 6, 7, 8, 9, 10
F32_TENSOR = 0


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def field(key: str, kind: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + payload


def text_field(key: str, text: str) -> bytes:
    return field(key, STRING, string(text))


def u32_field(key: str, number: int) -> bytes:
    return field(key, U32, struct.pack("<I", number))


def array_payload(kind: int, count: int, elements: bytes) -> bytes:
    return struct.pack("<IQ", kind, count) + elements


def tensor_info(
    name: str, dims: Sequence[int], kind: int = F32_TENSOR, offset: int = 0, rank: int | None = None
) -> bytes:
    rank = len(dims) if rank is None else rank
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", rank, *dims, kind, offset)


def file_bytes(
    fields: Sequence[bytes] = (),
    tensors: Sequence[bytes] = (),
    data: bytes = b"",
    *,
    num_fields: int | None = None,
    num_tensors: int | None = None,
    version: int = 3,
    alignment: int = 32,
) -> bytes:
    """Joins the parts; the counts are those of the parts unless said."""
    num_tensors = len(tensors) if num_tensors is None else num_tensors
    num_fields = len(fields) if num_fields is None else num_fields
    head = b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_fields) + b"".join(fields) + b"".join(tensors)
    return head + b"\0" * (-len(head) % alignment) + data


def write_model(path: Any, fields: dict[str, Any], tensors: dict[str, np.ndarray]) -> None:
    """Writes a whole model with the format's own package: int, float, bool, str fields and plain tensors."""
    import gguf

    writer = gguf.GGUFWriter(path, fields["general.architecture"])
    adders = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for name, value in fields.items():
        if name != "general.architecture":
            adders[type(value)](name, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
