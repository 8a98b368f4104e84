"""Decoding of stored numbers, against plain-Python models of each encoding."""

import pathlib
import struct

import ml_dtypes
import numpy as np
import pytest

from jdecode.weights import gguf_file, stored_tensor

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
FLOAT16 = np.dtype(np.float16)
FLOAT32 = np.dtype(np.float32)
ENCODINGS = {encoding.name: encoding for encoding in gguf_file._ENCODINGS.values()}


def half(raw: bytes) -> float:
    return struct.unpack("<e", raw)[0]


# One block of bytes to its numbers, written from the description of the formats: 32 numbers with one scale (and one
# minimum); low nibbles are the first half, high nibbles the second; a fifth bit lies in a word of its own.
def q8_0(block: bytes) -> list[float]:
    return [half(block[:2]) * number for number in struct.unpack("32b", block[2:])]


def nibbles(raw: bytes) -> list[int]:
    return [byte & 15 for byte in raw] + [byte >> 4 for byte in raw]


def q4_0(block: bytes) -> list[float]:
    return [half(block[:2]) * (number - 8) for number in nibbles(block[2:])]


def q4_1(block: bytes) -> list[float]:
    return [half(block[:2]) * number + half(block[2:4]) for number in nibbles(block[4:])]


def fifth_bits(raw: bytes) -> list[int]:
    word = int.from_bytes(raw, "little")
    return [(word >> place & 1) << 4 for place in range(32)]


def q5_0(block: bytes) -> list[float]:
    low, high = nibbles(block[6:]), fifth_bits(block[2:6])
    return [half(block[:2]) * ((low[i] | high[i]) - 16) for i in range(32)]


def q5_1(block: bytes) -> list[float]:
    low, high = nibbles(block[8:]), fifth_bits(block[4:8])
    return [half(block[:2]) * (low[i] | high[i]) + half(block[2:4]) for i in range(32)]


# 256 numbers in eight groups of 32, each with a scale and a minimum of six bits. The twelve bytes of these hold groups
# 0..3 in the low six bits of bytes 0..3 (scales) and 4..7 (minima); groups 4..7 have four bits in bytes 8..11 (scale
# low, minimum high) and their upper two bits on top of bytes 0..3 and 4..7.
def k_scales(raw: bytes) -> list[tuple[int, int]]:
    first = [(raw[j] & 63, raw[j + 4] & 63) for j in range(4)]
    second = [(raw[j + 8] & 15 | raw[j] >> 6 << 4, raw[j + 8] >> 4 | raw[j + 4] >> 6 << 4) for j in range(4)]
    return first + second


def q4_k(block: bytes) -> list[float]:
    d, dmin, scales = half(block[:2]), half(block[2:4]), k_scales(block[4:16])
    numbers = []
    for group in range(8):
        bytes_of_pair = block[16 + 32 * (group // 2) : 48 + 32 * (group // 2)]
        quants = [byte >> 4 if group % 2 else byte & 15 for byte in bytes_of_pair]
        numbers += [d * scales[group][0] * quant - dmin * scales[group][1] for quant in quants]
    return numbers


def q5_k(block: bytes) -> list[float]:
    d, dmin, scales, top = half(block[:2]), half(block[2:4]), k_scales(block[4:16]), block[16:48]
    numbers = []
    for group in range(8):
        bytes_of_pair = block[48 + 32 * (group // 2) : 80 + 32 * (group // 2)]
        quants = [byte >> 4 if group % 2 else byte & 15 for byte in bytes_of_pair]
        quants = [quant | (top[i] >> group & 1) << 4 for i, quant in enumerate(quants)]
        numbers += [d * scales[group][0] * quant - dmin * scales[group][1] for quant in quants]
    return numbers


def q6_k(block: bytes) -> list[float]:
    low, top, scales, d = block[:128], block[128:192], struct.unpack("16b", block[192:208]), half(block[208:])
    numbers = []
    for at in range(256):
        part, place = divmod(at, 128)  # two halves, each of four rows of 32
        row, column = divmod(place, 32)
        byte = low[64 * part + 32 * (row % 2) + column]
        nibble = byte >> 4 if row >= 2 else byte & 15
        quant = (nibble | (top[32 * part + column] >> 2 * row & 3) << 4) - 32
        numbers.append(d * scales[at // 16] * quant)
    return numbers


MODELS = {
    "Q8_0": q8_0,
    "Q4_0": q4_0,
    "Q4_1": q4_1,
    "Q5_0": q5_0,
    "Q5_1": q5_1,
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}
SCALE_PLACES = {
    "Q8_0": [0],
    "Q4_0": [0],
    "Q4_1": [0, 2],
    "Q5_0": [0],
    "Q5_1": [0, 2],
    "Q4_K": [0, 2],
    "Q5_K": [0, 2],
    "Q6_K": [208],
}


def random_blocks(name: str, count: int) -> bytes:
    """Random bytes with scales that are finite."""
    rng = np.random.default_rng(len(name) * 1000 + count)
    blocks = rng.integers(0, 256, (count, ENCODINGS[name].block_bytes), np.uint8)
    for place in SCALE_PLACES[name]:
        blocks[:, place : place + 2] = rng.normal(size=count).astype("<f2").view(np.uint8).reshape(count, 2)
    return blocks.tobytes()


def store(folder: pathlib.Path, raw: bytes, shape: tuple[int, ...], encoding: stored_tensor.Encoding):
    path = folder / "tensors"
    path.write_bytes(b"\xaa" * 13 + raw)
    return stored_tensor.StoredTensor(name="w", path=path, offset=13, shape=shape, encoding=encoding)


def test_every_quantised_encoding_has_a_model():
    assert {name for name, encoding in ENCODINGS.items() if encoding.dtype is None} == set(MODELS)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [1, 7])
def test_quantised_encodings(tmp_path, monkeypatch, name, rows):
    encoding = ENCODINGS[name]
    # Three blocks a row, and pieces of four blocks, so that pieces end inside rows and the last one is short.
    monkeypatch.setattr(stored_tensor, "_BLOCK_ELEMENTS", 4 * encoding.block_elements + 5)
    raw = random_blocks(name, rows * 3)
    shape = (rows, 3 * encoding.block_elements)
    tensor = store(tmp_path, raw, shape, encoding)
    assert tensor.num_bytes == len(raw)
    size = encoding.block_bytes
    expected = np.array([MODELS[name](raw[at : at + size]) for at in range(0, len(raw), size)]).reshape(shape)
    got = tensor.read_as(FLOAT32)
    # Products of a half, a small integer and a small integer: float32 rounds each of at most three steps.
    np.testing.assert_allclose(got, expected, rtol=4e-7, atol=4e-7 * np.abs(expected).max())
    assert np.array_equal(tensor.read_as(BFLOAT16), got.astype(BFLOAT16))  # rounded once, from float32


@pytest.mark.parametrize("dtype", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7), (0, 4)])
def test_plain_numbers_are_read_bit_by_bit(tmp_path, monkeypatch, dtype, shape):
    monkeypatch.setattr(stored_tensor, "_BLOCK_ELEMENTS", 4)
    count = int(np.prod(shape))
    values = (np.arange(count) * 1.37 - 20).astype(dtype)
    tensor = store(tmp_path, values.tobytes(), shape, stored_tensor.Encoding.plain(dtype))
    for got in (tensor.read(), tensor.read_as(dtype)):
        assert (got.shape, got.dtype, got.tobytes()) == (shape, dtype, values.tobytes())
    wide = tensor.read_as(FLOAT32)
    assert [float(number) for number in wide.reshape(-1)] == [float(number) for number in values]
    assert count == 0 or wide.ctypes.data % 64 == 0


def test_rounding_is_to_nearest_even(tmp_path):
    # bfloat16 has 8 significant bits: 1 + 2**-8 is half way between 1 and 1 + 2**-7 and goes to even, 1; the number
    # 1 + 3 * 2**-8 is half way between 1 + 2**-7 and 1 + 2**-6 and goes to the latter.
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8 - 2**-20], np.float32)
    tensor = store(tmp_path, values.tobytes(), (3,), stored_tensor.Encoding.plain(FLOAT32))
    assert [float(number) for number in tensor.read_as(BFLOAT16)] == [1.0, 1 + 2**-6, -1 - 2**-7]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 3, 8])
@pytest.mark.parametrize("target", [FLOAT32, BFLOAT16])
def test_numbers_that_are_not_finite_are_refused(tmp_path, monkeypatch, bad, place, target):
    monkeypatch.setattr(stored_tensor, "_BLOCK_ELEMENTS", 3)
    values = np.arange(9, dtype=np.float32)
    values[place] = bad
    tensor = store(tmp_path, values.tobytes(), (9,), stored_tensor.Encoding.plain(FLOAT32))
    with pytest.raises(ValueError, match="tensor w: expected finite numbers"):
        tensor.read_as(target)
    assert tensor.read().tobytes() == values.tobytes()  # as stored, whatever it is


def test_numbers_beyond_float16_are_refused(tmp_path):
    values = np.array([1, -70000], np.float32)
    tensor = store(tmp_path, values.tobytes(), (2,), stored_tensor.Encoding.plain(FLOAT32))
    with pytest.raises(ValueError, match="tensor w: expected numbers up to 65504 for float16, got 70000"):
        tensor.read_as(FLOAT16)
    assert tensor.read_as(BFLOAT16).dtype == BFLOAT16


def test_dtypes_without_weights_are_refused(tmp_path):
    tensor = store(tmp_path, bytes(8), (1,), stored_tensor.Encoding.plain(np.dtype(np.int64)))
    with pytest.raises(ValueError, match="tensor w: expected float32, bfloat16 or float16, got int64"):
        tensor.read_as(FLOAT32)
    with pytest.raises(ValueError, match="tensor w: expected plain numbers, got Q8_0"):
        store(tmp_path, bytes(34), (32,), ENCODINGS["Q8_0"]).read()


def test_file_that_became_shorter(tmp_path):
    tensor = store(tmp_path, bytes(16), (4,), stored_tensor.Encoding.plain(FLOAT32))
    tensor.path.write_bytes(bytes(20))
    for read in (tensor.read, lambda: tensor.read_as(FLOAT32)):
        with pytest.raises(ValueError, match="tensor w: expected 16 more bytes, got 7"):
            read()
