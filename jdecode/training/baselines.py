"""What simple means need for held-out files, in bits a byte: the measure that a language model has to beat.

- ``xz -9e`` of the files: repetition inside them.
- The same after the training files: also what they said before, word for word, as far as a window of 64 MiB reaches.
- Byte counts of the training files: the law of a byte given the three before it, and no knowledge of the file.

All of it runs on the host and is deterministic.
"""

import dataclasses
import lzma
import math
from collections.abc import Sequence

import numpy as np

ORDER = 3
"""How many bytes the byte counts look back."""

_LONGEST_ORDER = 7  # a context and the byte after it are one uint64
_PRESET = 9 | lzma.PRESET_EXTREME


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """What one of them needs.

    Attributes:
      name: for people.
      num_bits: for all held-out files.
      num_bytes: that the files have.
    """

    name: str
    num_bits: float
    num_bytes: int

    @property
    def bits_per_byte(self) -> float:
        """What one byte of text costs."""
        return self.num_bits / self.num_bytes


def baselines(train: Sequence[bytes], held_out: Sequence[bytes]) -> list[Baseline]:
    """Judges held-out files by all three.

    Args:
      train: contents of the files that may be learned from, in order.
      held_out: contents of the files to judge, in order; at least one byte in all.

    Returns:
      One entry each, the order as above.
    """
    num_bytes = sum(len(content) for content in held_out)
    bits = {
        "xz -9e": 8 * xz_num_bytes(b"".join(held_out)),
        "xz -9e after the training files": 8 * xz_num_bytes_after(b"".join(train), b"".join(held_out)),
        f"order-{ORDER} byte counts of the training files": byte_count_bits(train, held_out),
    }
    return [Baseline(name=name, num_bits=float(value), num_bytes=num_bytes) for name, value in bits.items()]


def xz_num_bytes(content: bytes) -> int:
    """Returns the length of ``content`` under ``xz -9e``, headers included."""
    return len(lzma.compress(content, format=lzma.FORMAT_XZ, preset=_PRESET))


def xz_num_bytes_after(before: bytes, content: bytes) -> int:
    """Returns what ``content`` adds to the length of ``before`` under ``xz -9e``."""
    return xz_num_bytes(before + content) - xz_num_bytes(before)


def byte_count_bits(train: Sequence[bytes], held_out: Sequence[bytes], order: int = ORDER) -> float:
    """Computes the bits that a model of byte counts needs for held-out files.

    A byte x after a context c that was followed by N(c) bytes in training, u(c) different ones, of which n(c, x) were
    x, has the probability ``(n(c, x) + u(c) p(x | c')) / (N(c) + u(c))``: Witten and Bell 1991, method C, interpolated
    as in Chen and Goodman 1998, section 2.4. Here c' is c without its first byte, and below the empty context all 256
    bytes are alike. A context that was never seen passes on p(x | c') as it is. So each p(. | c) sums to 1, and no
    byte has probability 0.

    Each file starts fresh, in the empty context, and contexts do not cross files, in training neither.

    Args:
      train: files to count in.
      held_out: files to judge.
      order: bytes in the longest context, 0 to 7.

    Raises:
      ValueError: ``order`` is out of range.
    """
    if not 0 <= order <= _LONGEST_ORDER:
        raise ValueError(f"order: expected a count from 0 to {_LONGEST_ORDER}, got {order}")
    probabilities = [np.full(len(content), 1 / 256) for content in held_out]
    for context_len in range(order + 1):
        counts = _Counts(train, context_len)
        for content, probability in zip(held_out, probabilities, strict=True):
            reached = probability[context_len:]  # a view: bytes nearer to the start keep what a shorter context said
            reached[:] = counts.interpolate(_grams(content, context_len), reached)
    return -math.fsum(float(np.log2(probability).sum()) for probability in probabilities)


class _Counts:
    """How often each byte followed each context of one length."""

    def __init__(self, files: Sequence[bytes], context_len: int) -> None:
        empty = np.zeros(0, np.uint64)
        grams = np.concatenate([empty, *(_grams(content, context_len) for content in files)])
        self._grams, self._counts = np.unique(grams, return_counts=True)
        # The grams are sorted, and so the contexts too: each is a run.
        self._contexts, first, self._num_different = np.unique(
            self._grams >> np.uint64(8), return_index=True, return_counts=True
        )
        self._totals = np.add.reduceat(self._counts, first) if len(first) else self._counts

    def interpolate(self, grams: np.ndarray, shorter: np.ndarray) -> np.ndarray:
        """Returns p of the last byte of each gram, given ``shorter``, the same after one byte less of context."""
        count = _find(self._grams, self._counts, grams)
        contexts = grams >> np.uint64(8)
        total = _find(self._contexts, self._totals, contexts)
        num_different = _find(self._contexts, self._num_different, contexts)
        weight = np.maximum(total + num_different, 1)
        return np.where(total > 0, (count + num_different * shorter) / weight, shorter)


def _grams(content: bytes, context_len: int) -> np.ndarray:
    """Returns the bytes that have ``context_len`` bytes before them, each with these, as big-endian uint64 numbers."""
    array = np.frombuffer(content, np.uint8).astype(np.uint64)
    num_grams = max(len(array) - context_len, 0)
    grams = np.zeros(num_grams, np.uint64)
    for offset in range(context_len + 1):
        grams = (grams << np.uint64(8)) | array[offset : offset + num_grams]
    return grams


def _find(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Returns the values of the wanted keys, 0 where there is no such key. ``keys`` are sorted."""
    if not len(keys):
        return np.zeros(len(wanted), np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], 0)
