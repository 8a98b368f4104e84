"""One tensor as it lies in a file, and its way into memory: by blocks, so that no second copy of it is ever held."""

import dataclasses
import math
import pathlib
from typing import Protocol

import ml_dtypes
import numpy as np

# Elements decoded at a time. Decoding keeps a few float32 copies of a block (some tens of megabytes).
_BLOCK_ELEMENTS = 1 << 21

# XLA on CPU takes over a numpy array without a copy when it is aligned so.
_ALIGNMENT_BYTES = 64

COMPUTE_DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
}


@dataclasses.dataclass(frozen=True)
class Encoding:
    """Describes how numbers are stored.

    Attributes:
      name: as files and people write it, such as ``bfloat16`` or ``Q4_K``.
      block_elements: numbers that share one block; a row is a whole number of blocks.
      block_bytes: bytes of a block.
      dtype: of one number, for encodings without blocks; ``None`` for quantised ones.
    """

    name: str
    block_elements: int
    block_bytes: int
    dtype: np.dtype | None = None

    @classmethod
    def plain(cls, dtype: np.dtype) -> "Encoding":
        """Describes numbers stored one by one."""
        return cls(dtype.name, 1, dtype.itemsize, dtype)


class SourceTensor(Protocol):
    """A tensor of a checkpoint, whatever its format: known by name, shape and encoding, and not read yet.

    Loading needs no more than this. ``read_as`` reads the tensor each time it is called and keeps nothing.
    """

    @property
    def name(self) -> str:
        """The name in the checkpoint."""
        ...

    @property
    def shape(self) -> tuple[int, ...]:
        """Outermost axis first, as numpy sees it."""
        ...

    @property
    def encoding(self) -> Encoding:
        """How the numbers are stored."""
        ...

    @property
    def num_elements(self) -> int:
        """The count of numbers; 1 for a tensor of rank zero."""
        ...

    @property
    def num_bytes(self) -> int:
        """The bytes of the numbers as they are encoded."""
        ...

    def read_as(self, dtype: np.dtype) -> np.ndarray:
        """Reads the numbers into one of ``COMPUTE_DTYPES``, rounded to nearest, ties to even.

        Raises:
          ValueError: one line: an encoding that holds no weights, a number that is not finite or does not fit in
            ``dtype``, or a damaged file.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """Locates a tensor in a file. Whoever makes one has checked that it lies inside the file.

    Attributes:
      name: in the file.
      path: the file.
      offset: of the first byte, from the start of the file.
      shape: outermost axis first, as numpy sees it.
      encoding: of the numbers.
    """

    name: str
    path: pathlib.Path
    offset: int
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def num_elements(self) -> int:
        """The count of numbers; 1 for a tensor of rank zero."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes that the tensor takes in the file."""
        return self.num_elements // self.encoding.block_elements * self.encoding.block_bytes

    def read(self) -> np.ndarray:
        """Reads the tensor as it is stored, bit by bit.

        Returns:
          An array of the stored dtype.

        Raises:
          ValueError: for a quantised encoding, or when the file became shorter.
        """
        if self.encoding.dtype is None:
            raise ValueError(f"{self.path}: tensor {self.name}: expected plain numbers, got {self.encoding.name}")
        array = _aligned_empty(self.num_elements, self.encoding.dtype)
        with self.path.open("rb") as file:
            file.seek(self.offset)
            self._fill(file, array)
        return array.reshape(self.shape)

    def read_as(self, dtype: np.dtype) -> np.ndarray:
        """Reads, dequantises and rounds the tensor into one of ``COMPUTE_DTYPES``.

        Args:
          dtype: of the result. Rounding is to nearest, ties to even; float16 and bfloat16 into float32 are exact.

        Returns:
          An array, aligned so that it can become a device array without a copy.

        Raises:
          ValueError: for an encoding that holds no weights, a number that is not finite or does not fit in ``dtype``,
            or when the file became shorter.
        """
        encoding = self.encoding
        where = f"{self.path}: tensor {self.name}"
        check_holds_weights(encoding, where)
        array = _aligned_empty(self.num_elements, dtype)
        # Whole blocks, so that a piece of the file is a piece of the array.
        step = _BLOCK_ELEMENTS // encoding.block_elements * encoding.block_elements
        with self.path.open("rb") as file:
            file.seek(self.offset)
            for start in range(0, self.num_elements, step):
                target = array[start : start + step]
                if encoding.dtype == dtype:
                    self._fill(file, target)
                    _check_range(target, dtype, where)
                    continue
                raw = np.empty(target.size // encoding.block_elements * encoding.block_bytes, np.uint8)
                self._fill(file, raw)
                numbers = _decode(raw, encoding)
                _check_range(numbers, dtype, where)
                target[:] = numbers
        return array.reshape(self.shape)

    def _fill(self, file, target: np.ndarray) -> None:
        view = target.view(np.uint8)
        got = file.readinto(view) if view.size else 0
        if got != view.size:
            raise ValueError(
                f"{self.path}: tensor {self.name}: expected {view.size} more bytes, got {got}; the file became shorter"
            )


def check_holds_weights(encoding: Encoding, where: str) -> None:
    """Refuses numbers that are no weights, such as whole ones.

    Args:
      encoding: of the numbers.
      where: starts the message.

    Raises:
      ValueError: the encoding is neither quantised nor one of ``COMPUTE_DTYPES``.
    """
    if encoding.dtype is not None and encoding.name not in COMPUTE_DTYPES:
        raise ValueError(f"{where}: expected float32, bfloat16 or float16, got {encoding.name}; convert the checkpoint")


def rounded(array: np.ndarray, dtype: np.dtype, where: str) -> np.ndarray:
    """Rounds numbers into one of ``COMPUTE_DTYPES``, as ``StoredTensor.read_as`` does.

    Args:
      array: of one of ``COMPUTE_DTYPES``.
      dtype: of the result.
      where: what the numbers are, for error lines.

    Returns:
      An array of the same shape, aligned so that it can become a device array without a copy; ``array`` itself where
      it is of this dtype.

    Raises:
      ValueError: a number is not finite or does not fit in ``dtype``.
    """
    flat = array.reshape(-1)
    result = flat if array.dtype == dtype else _aligned_empty(flat.size, dtype)
    for start in range(0, flat.size, _BLOCK_ELEMENTS):
        numbers = flat[start : start + _BLOCK_ELEMENTS]
        _check_range(numbers, dtype, where)
        if result is not flat:
            result[start : start + _BLOCK_ELEMENTS] = numbers
    return result.reshape(array.shape)


def _check_range(numbers: np.ndarray, dtype: np.dtype, where: str) -> None:
    # Largest and smallest also carry any NaN or infinity, so two passes without a temporary array tell all.
    peak = max(abs(float(numbers.max())), abs(float(numbers.min())))
    if not math.isfinite(peak) or math.isnan(float(numbers.max())):
        raise ValueError(f"{where}: expected finite numbers, got NaN or infinity; the file is damaged")
    largest = float(ml_dtypes.finfo(dtype).max)
    if peak > largest:
        raise ValueError(
            f"{where}: expected numbers up to {largest:g} for {dtype.name}, got {peak:g}; load it as "
            f"bfloat16 or float32"
        )


def _aligned_empty(num_elements: int, dtype: np.dtype) -> np.ndarray:
    num_bytes = num_elements * dtype.itemsize
    raw = np.empty(num_bytes + _ALIGNMENT_BYTES, np.uint8)
    start = -raw.ctypes.data % _ALIGNMENT_BYTES
    return raw[start : start + num_bytes].view(dtype)


def _decode(raw: np.ndarray, encoding: Encoding) -> np.ndarray:
    """Turns bytes of whole blocks into a flat array of numbers (float32 when quantised)."""
    if encoding.dtype is not None:
        return raw.view(encoding.dtype)
    # Late: only quantised files need the package, and importing it takes longer than loading a small model.
    import gguf

    num_blocks = raw.size // encoding.block_bytes
    # The package decodes rows in groups of sixteen; rows of up to 64 blocks make it two to three times as fast.
    blocks_a_row = math.gcd(num_blocks, 64)
    rows = raw.reshape(-1, blocks_a_row * encoding.block_bytes)
    with np.errstate(all="ignore"):  # a damaged scale may overflow: the range check finds it
        return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType[encoding.name]).reshape(-1)
