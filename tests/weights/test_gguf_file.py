"""GGUF headers: right ones against the format's own package, and wrong ones, which give one line and little memory."""

import pathlib
import struct
import tracemalloc

import gguf
import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from jdecode.weights import gguf_file, load
from tests.weights import gguf_bytes as build

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "gguf"


def write(folder: pathlib.Path, data: bytes) -> pathlib.Path:
    path = folder / "x.gguf"
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", ["llama_gqa.f32.gguf", "llama_gqa.f16_q8.gguf"])
def test_equals_the_reader_of_the_formats_package(name):
    file = gguf_file.read_header(GOLDEN / name)
    reader = gguf.GGUFReader(GOLDEN / name)
    expected = {key: value.contents() for key, value in reader.fields.items() if not key.startswith("GGUF.")}
    got = {key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in file.fields.items()}
    assert got == expected
    assert list(file.tensors) == [tensor.name for tensor in reader.tensors]
    for tensor in reader.tensors:
        stored = file.tensors[tensor.name]
        assert stored.offset == tensor.data_offset
        assert stored.num_bytes == tensor.n_bytes
        assert stored.shape == tuple(tensor.shape[::-1])
        exact = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(stored.shape)
        assert np.array_equal(stored.read_as(np.dtype(np.float32)), exact)


def test_every_type_of_field(tmp_path):
    numbers = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 10: "Q", 11: "q", 6: "f", 12: "d"}
    fields = [build.field(f"n{kind}", kind, struct.pack("<" + form, 7)) for kind, form in numbers.items()]
    fields += [
        build.field(f"a{kind}", 9, build.array_payload(kind, 2, struct.pack("<2" + form, 3, 5)))
        for kind, form in numbers.items()
    ]
    fields += [build.field("true", 7, b"\1"), build.field("flags", 9, build.array_payload(7, 3, b"\1\0\1"))]
    fields += [
        build.text_field("s", "né"),
        build.field("t", 9, build.array_payload(8, 2, build.string("a") + build.string(""))),
    ]
    fields += [build.field("empty", 9, build.array_payload(6, 0, b""))]
    got = gguf_file.read_header(write(tmp_path, build.file_bytes(fields))).fields
    assert all(got[f"n{kind}"] == 7 for kind in numbers)
    assert all(got[f"a{kind}"].tolist() == [3, 5] for kind in numbers)
    assert type(got["n4"]) is int and type(got["n12"]) is float and got["n6"].dtype == np.float32
    assert got["true"] is True and got["flags"].tolist() == [True, False, True]
    assert (got["s"], got["t"], len(got["empty"])) == ("né", ["a", ""], 0)


def test_alignment_and_order(tmp_path):
    # Two tensors, 64-byte alignment, the first in the table the second in the data.
    fields = [build.u32_field("general.alignment", 64)]
    tensors = [build.tensor_info("b", [3], offset=64), build.tensor_info("a", [5, 2], offset=0)]
    data = np.arange(10, dtype=np.float32).tobytes().ljust(64, b"\xff") + np.array([7, 8, 9], np.float32).tobytes()
    file = gguf_file.read_header(write(tmp_path, build.file_bytes(fields, tensors, data, alignment=64)))
    assert file.tensors["b"].read_as(np.dtype(np.float32)).tolist() == [7, 8, 9]
    assert file.tensors["a"].read_as(np.dtype(np.float32)).tolist() == [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]


ONE = [build.tensor_info("w", [32])]
DATA = bytes(128)
MANY = 2**62

# Crafted headers crashed or over-read other loaders (ggml-org/llama.cpp#25378, #18674, #26690; ggml-org/ggml#709):
# ranks unchecked, products of dims that wrap, element types unchecked, counts and lengths beyond the file.
CRAFTED = {
    "empty file": (b"", "header of 24 bytes, got 0"),
    "short file": (b"GGUF\3\0\0\0", "header of 24 bytes, got 8"),
    "magic": (b"GGML" + build.file_bytes()[4:] + DATA, "starts with GGUF"),
    "version 1": (build.file_bytes(version=1), "version 2 or 3, got 1"),
    "big-endian": (build.file_bytes(version=3 << 24), "big-endian"),
    "field count": (build.file_bytes(num_fields=MANY), f"fields in the .* got a count of {MANY}"),
    "tensor count": (build.file_bytes(num_tensors=MANY), f"tensors in the .* got a count of {MANY}"),
    "one field too few": (build.file_bytes([build.u32_field("a", 1)], num_fields=2), "got '' as a key"),
    "key length": (build.file_bytes([struct.pack("<Q", MANY) + bytes(16)]), f"expected {MANY} bytes for a field's key"),
    "key twice": (build.file_bytes([build.u32_field("a", 1)] * 2), "'a' twice"),
    "key not UTF-8": (build.file_bytes([build.string(b"\xff\xfe") + struct.pack("<II", 4, 1)]), "expected UTF-8"),
    "string length": (build.file_bytes([build.field("a", 8, struct.pack("<Q", MANY))]), f"expected {MANY} bytes"),
    "value type": (build.file_bytes([build.field("a", 13, bytes(8))]), "value type from 0 to 12, got 13"),
    "bool byte": (build.file_bytes([build.field("a", 7, b"\2")]), "truth values of 0 or 1"),
    "array count": (build.file_bytes([build.field("a", 9, build.array_payload(4, MANY, bytes(64)))]), "numbers in 'a'"),
    "string count": (build.file_bytes([build.field("a", 9, build.array_payload(8, MANY, bytes(64)))]), "strings in"),
    "element type": (build.file_bytes([build.field("a", 9, build.array_payload(77, 1, bytes(8)))]), "element type 77"),
    "nested array": (build.file_bytes([build.field("a", 9, build.array_payload(9, 1, bytes(12)))]), "element type 9"),
    "rank 5": (build.file_bytes((), [build.tensor_info("w", [1] * 5)], DATA), "rank from 1 to 4, got 5"),
    "rank 1e6": (build.file_bytes((), [build.tensor_info("w", [1], rank=10**6)], DATA), "1 to 4, got 1000000"),
    "rank 0": (build.file_bytes((), [build.tensor_info("w", [])], DATA), "rank from 1 to 4, got 0"),
    # 2**64 elements, 0 in 64 bits; and 2**64 + 4 elements, 4 in 64 bits
    "dims wrap": (build.file_bytes((), [build.tensor_info("w", [2**32, 2**32])], DATA), "inside the file"),
    "dims wrap to 4": (build.file_bytes((), [build.tensor_info("w", [4, 2**62 + 1])], DATA), "inside the file"),
    "dim 0": (build.file_bytes((), [build.tensor_info("w", [0, 4])], DATA), "dims of at least 1"),
    "type": (build.file_bytes((), [build.tensor_info("w", [32], kind=99)], DATA), "'w': .*got type number 99"),
    "removed type": (build.file_bytes((), [build.tensor_info("w", [32], kind=4)], DATA), "'w': .*type number 4"),
    "unsupported type": (build.file_bytes((), [build.tensor_info("w", [256], kind=10)], DATA), "'w': .*got Q2_K"),
    "half a block": (build.file_bytes((), [build.tensor_info("w", [16], kind=8)], DATA), "whole Q8_0 blocks of 32"),
    "offset": (build.file_bytes((), [build.tensor_info("w", [32], offset=2**63)], DATA), "inside the file"),
    "offset unaligned": (build.file_bytes((), [build.tensor_info("w", [8], offset=4)], DATA), "a multiple of 32"),
    "name twice": (build.file_bytes((), ONE * 2, DATA), "'w' twice"),
    "shared bytes": (build.file_bytes((), [*ONE, build.tensor_info("v", [8], offset=32)], DATA), "share no bytes"),
    "alignment 0": (build.file_bytes([build.u32_field("general.alignment", 0)], ONE, DATA), "power of two"),
    "alignment 24": (build.file_bytes([build.u32_field("general.alignment", 24)], ONE, DATA), "power of two"),
    "alignment text": (build.file_bytes([build.text_field("general.alignment", "32")], ONE, DATA), "power of two"),
    "data cut": (build.file_bytes((), ONE, DATA[:-1]), "truncated or damaged"),
}  # fmt: skip


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted(tmp_path, name):
    data, message = CRAFTED[name]
    path = write(tmp_path, data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            gguf_file.read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert peak < 2 * len(data) + 200_000  # the second term: traceback, message, pytest


def test_every_truncation_is_refused(tmp_path):
    data = (GOLDEN / "llama_gqa.f16_q8.gguf").read_bytes()
    lengths = [*range(0, 1200, 7), *range(1200, len(data), 4099), len(data) - 1]
    for length in lengths:
        with pytest.raises(ValueError, match="expected") as caught:
            gguf_file.read_header(write(tmp_path, data[:length]))
        assert "\n" not in str(caught.value)


@hypothesis.settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
)
@hypothesis.given(
    strategies.lists(
        strategies.tuples(strategies.integers(0, 14_000), strategies.integers(1, 255)), min_size=1, max_size=4
    )
)
def test_flipped_bytes_give_a_model_or_one_line(tmp_path, flips):
    # Fields, vocabulary and tensor table take the first 11 kB of the file.
    data = bytearray((GOLDEN / "llama_gqa.f16_q8.gguf").read_bytes())
    for at, mask in flips:
        data[at] ^= mask
    try:
        load.load_weights(write(tmp_path, bytes(data)))
    except ValueError as error:
        assert "\n" not in str(error)


def test_missing_file(tmp_path):
    with pytest.raises(ValueError, match="expected a readable file"):
        gguf_file.read_header(tmp_path / "none.gguf")
