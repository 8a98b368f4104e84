"""GGUF files: their fields and where their tensors lie, every number checked against the file before it is used.

The format (versions 2 and 3, little-endian)::

    "GGUF" | version u32 | tensor count u64 | field count u64
    fields:   key string | type u32 | value              (an array: element type u32 | count u64 | elements)
    tensors:  name string | rank u32 | dims u64 × rank, innermost first | type u32 | offset u64
    padding to the alignment | tensor data, each offset a multiple of the alignment

A string is a u64 length and that many UTF-8 bytes. Nothing is allocated for a count before the file is known to be
long enough to hold it.
"""

import dataclasses
import math
import mmap
import pathlib
import struct
from collections.abc import Mapping
from typing import Any, NoReturn

import numpy as np

from jdecode.weights import stored_tensor

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_MAX_ALIGNMENT = 1 << 20
_MAX_RANK = 4
_MIN_FIELD_BYTES = 8 + 4 + 1  # empty key, type, one byte
_MIN_TENSOR_BYTES = 8 + 4 + 8 + 4 + 8  # empty name, rank, one dim, type, offset

# Field types by number. Strings and arrays are read apart.
_SCALARS = {
    0: np.dtype("<u1"),
    1: np.dtype("<i1"),
    2: np.dtype("<u2"),
    3: np.dtype("<i2"),
    4: np.dtype("<u4"),
    5: np.dtype("<i4"),
    6: np.dtype("<f4"),
    7: np.dtype("?"),
    10: np.dtype("<u8"),
    11: np.dtype("<i8"),
    12: np.dtype("<f8"),
}
_BOOL, _STRING, _ARRAY = 7, 8, 9

# Tensor types by number.
_ENCODINGS = {
    0: stored_tensor.Encoding.plain(stored_tensor.COMPUTE_DTYPES["float32"]),
    1: stored_tensor.Encoding.plain(stored_tensor.COMPUTE_DTYPES["float16"]),
    30: stored_tensor.Encoding.plain(stored_tensor.COMPUTE_DTYPES["bfloat16"]),
    2: stored_tensor.Encoding("Q4_0", 32, 18),
    3: stored_tensor.Encoding("Q4_1", 32, 20),
    6: stored_tensor.Encoding("Q5_0", 32, 22),
    7: stored_tensor.Encoding("Q5_1", 32, 24),
    8: stored_tensor.Encoding("Q8_0", 32, 34),
    12: stored_tensor.Encoding("Q4_K", 256, 144),
    13: stored_tensor.Encoding("Q5_K", 256, 176),
    14: stored_tensor.Encoding("Q6_K", 256, 210),
}
# Types that exist but are not decoded, so that the error can name them.
_OTHER_TYPES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GgufFile:
    """Holds what the header of a GGUF file says.

    Attributes:
      fields: key to value: int, ``numpy.float32``, float, bool, str, a numpy array, or a list of str.
      tensors: name to where the tensor lies.
    """

    fields: Mapping[str, Any]
    tensors: Mapping[str, stored_tensor.StoredTensor]


def read_header(path: pathlib.Path) -> GgufFile:
    """Reads the fields and the table of tensors, without the tensors.

    Args:
      path: a ``.gguf`` file.

    Returns:
      Fields and tensors. All tensors lie inside the file, aligned, and share no byte.

    Raises:
      ValueError: one line that names the file and the first thing wrong with it.
    """
    try:
        with path.open("rb") as file:
            if path.stat().st_size < 24:
                raise ValueError(f"{path}: expected a GGUF header of 24 bytes, got {path.stat().st_size}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(path, data).header()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got: {error.strerror or error}") from error


class _Cursor:
    """Walks over the header; every read checks that the file is long enough."""

    def __init__(self, path: pathlib.Path, data: mmap.mmap) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._at = 0

    def header(self) -> GgufFile:
        if self._bytes(4, "the magic bytes") != _MAGIC:
            self._fail("expected a file that starts with GGUF, got other bytes; is it a GGUF file?")
        version = self._number("<I", "the version")
        if version not in _VERSIONS:
            order = " (big-endian files are not supported)" if version >= 1 << 24 else ""
            self._fail(f"expected GGUF version 2 or 3, got {version}{order}; convert the file again")
        num_tensors = self._count("tensors", _MIN_TENSOR_BYTES)
        num_fields = self._count("fields", _MIN_FIELD_BYTES)
        fields: dict[str, Any] = {}
        for _ in range(num_fields):
            key = self._string("a field's key")
            if not key or key in fields:
                self._fail(f"expected each field once, with a key, got {key!r} {'twice' if key else 'as a key'}")
            fields[key] = self._value(key)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self._alignment(fields)
        start = -(-self._at // alignment) * alignment
        return GgufFile(fields, self._place(infos, start, alignment))

    def _fail(self, message: str) -> NoReturn:
        raise ValueError(f"{self._path}: {message}")

    def _bytes(self, count: int, what: str) -> bytes:
        if count > self._size - self._at:
            self._fail(
                f"expected {count} bytes for {what} at byte {self._at}, got {self._size - self._at} to the end; the "
                f"file is truncated or damaged"
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def _number(self, form: str, what: str) -> int:
        return struct.unpack(form, self._bytes(struct.calcsize(form), what))[0]

    def _count(self, what: str, least_bytes: int) -> int:
        """Reads a count of things, each of which takes at least so many bytes."""
        count = self._number("<Q", f"the count of {what}")
        left = self._size - self._at
        if count > left // least_bytes:
            self._fail(
                f"expected at most {left // least_bytes} {what} in the {left} bytes left, got a count of {count}; the "
                f"file is truncated or damaged"
            )
        return count

    def _string(self, what: str) -> str:
        length = self._number("<Q", f"the length of {what}")
        try:
            return self._bytes(length, what).decode("utf-8")
        except UnicodeDecodeError as error:
            self._fail(f"expected UTF-8 in {what} before byte {self._at}, got {error.reason}; the file is damaged")

    def _value(self, key: str) -> Any:
        kind = self._number("<I", f"the type of {key!r}")
        if kind == _STRING:
            return self._string(f"field {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        if kind not in _SCALARS:
            self._fail(f"field {key!r}: expected a value type from 0 to 12, got {kind}; the file is damaged")
        value = self._numbers(kind, 1, key)[0]
        # float32 stays what it is, for whoever wants to know how many of its digits count
        return value if _SCALARS[kind] == np.float32 else value.item()

    def _array(self, key: str) -> Any:
        kind = self._number("<I", f"the element type of {key!r}")
        if kind == _STRING:
            count = self._count(f"strings in {key!r}", 8)
            what = f"a string of {key!r}"
            return [self._string(what) for _ in range(count)]
        if kind not in _SCALARS:
            self._fail(f"field {key!r}: expected an array of numbers, truth values or strings, got element type {kind}")
        return self._numbers(kind, self._count(f"numbers in {key!r}", _SCALARS[kind].itemsize), key)

    def _numbers(self, kind: int, count: int, key: str) -> np.ndarray:
        raw = self._bytes(count * _SCALARS[kind].itemsize, f"field {key!r}")
        if kind == _BOOL and raw.strip(b"\x00\x01"):
            self._fail(f"field {key!r}: expected truth values of 0 or 1, got another byte; the file is damaged")
        return np.frombuffer(raw, _SCALARS[kind])

    def _tensor_info(self) -> tuple[str, tuple[int, ...], int, int]:
        name = self._string("a tensor's name")
        rank = self._number("<I", f"the rank of tensor {name!r}")
        if not 1 <= rank <= _MAX_RANK:
            self._fail(f"tensor {name!r}: expected a rank from 1 to {_MAX_RANK}, got {rank}; the file is damaged")
        dims = struct.unpack(f"<{rank}Q", self._bytes(8 * rank, f"the dims of tensor {name!r}"))
        kind = self._number("<I", f"the type of tensor {name!r}")
        return name, dims[::-1], kind, self._number("<Q", f"the offset of tensor {name!r}")

    def _alignment(self, fields: Mapping[str, Any]) -> int:
        alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
        is_count = isinstance(alignment, int) and not isinstance(alignment, bool)
        if not is_count or not 1 <= alignment <= _MAX_ALIGNMENT or alignment & (alignment - 1):
            self._fail(f"general.alignment: expected a power of two up to {_MAX_ALIGNMENT}, got {str(alignment)[:60]}")
        return alignment

    def _place(
        self, infos: list[tuple[str, tuple[int, ...], int, int]], start: int, alignment: int
    ) -> dict[str, stored_tensor.StoredTensor]:
        tensors: dict[str, stored_tensor.StoredTensor] = {}
        for name, shape, kind, offset in infos:
            if name in tensors:
                self._fail(f"expected each tensor once, got {name!r} twice")
            if kind not in _ENCODINGS:
                self._fail(
                    f"tensor {name!r}: expected a type among "
                    f"{', '.join(encoding.name for encoding in _ENCODINGS.values())}, got "
                    f"{_OTHER_TYPES.get(kind, f'type number {kind}')}; convert the model to one of them"
                )
            encoding = _ENCODINGS[kind]
            # Python's whole numbers do not wrap, so neither does the product of absurd dims.
            if min(shape) < 1 or shape[-1] % encoding.block_elements:
                self._fail(
                    f"tensor {name!r}: expected dims of at least 1 and rows of whole {encoding.name} blocks of "
                    f"{encoding.block_elements}, got {list(shape)}"
                )
            num_bytes = math.prod(shape) // encoding.block_elements * encoding.block_bytes
            if offset % alignment or start + offset + num_bytes > self._size:
                self._fail(
                    f"tensor {name!r}: expected {num_bytes} bytes at an offset that is a multiple of {alignment} and "
                    f"inside the file of {self._size} bytes, got offset {start} + {offset}; the file is truncated or "
                    f"damaged"
                )
            tensors[name] = stored_tensor.StoredTensor(
                name=name, path=self._path, offset=start + offset, shape=shape, encoding=encoding
            )
        self._check_disjoint(tensors)
        return tensors

    def _check_disjoint(self, tensors: Mapping[str, stored_tensor.StoredTensor]) -> None:
        """Tensors that share bytes would let a small file fill the memory."""
        end, before = 0, ""
        for tensor in sorted(tensors.values(), key=lambda tensor: tensor.offset):
            if tensor.offset < end:
                self._fail(f"expected tensors that share no bytes, got {before!r} and {tensor.name!r}; it is damaged")
            end, before = tensor.offset + tensor.num_bytes, tensor.name
