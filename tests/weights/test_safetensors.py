"""Reading and writing safetensors, against the format's own package and against crafted files."""

import json
import pathlib
import shutil
import tracemalloc
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jdecode.weights import safetensors_file, safetensors_folder

GOLDEN = pathlib.Path(__file__).parents[1] / "golden" / "tiny"


def file_bytes(header: Any, data: bytes = b"", length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


def entry(dtype: Any = "F32", shape: Any = (3,), offsets: Any = (0, 12)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


# bfloat16 could not be read by numpy and jax paths (safetensors/safetensors#598): every dtype, bit by bit, with a
# tensor of rank zero and an empty one.
def test_every_dtype_bit_by_bit(tmp_path):
    rng = np.random.default_rng(5)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, dtype in safetensors_file._DTYPES.items():
        for shape in ((), (2, 3), (0, 5)):
            count = int(np.prod(shape))
            raw = rng.integers(0, 2 if name == "BOOL" else 256, count * dtype.itemsize, np.uint8).tobytes()
            header[f"{name}{shape}"] = entry(name, list(shape), [len(data), len(data) + len(raw)])
            data += raw
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_bytes(header, data))
    tensors = safetensors_file.read_header(path)
    assert len(tensors) == 3 * len(safetensors_file._DTYPES)
    for name, tensor in tensors.items():
        start, end = header[name]["data_offsets"]
        got = tensor.read()
        assert got.shape == tuple(header[name]["shape"])
        assert got.tobytes() == data[start:end]


def test_equals_the_formats_package(tmp_path):
    arrays = {
        "b": np.arange(6, dtype=np.float16).reshape(2, 3),
        "a": (np.arange(7) * 1.1).astype(ml_dtypes.bfloat16),
        "zero": np.zeros((3, 0), np.float32),
        "one": np.array(2.5, np.float32),
    }
    path = tmp_path / "x.safetensors"
    safetensors.numpy.save_file(arrays, path)
    tensors = safetensors_file.read_header(path)
    assert set(tensors) == set(arrays)
    for name, array in arrays.items():
        got = tensors[name].read()
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes())


DATA = bytes(12)
CRAFTED = {
    "empty": (b"", "header inside the file of 0 bytes"),
    "short": (b"\1\0\0", "header inside the file of 3 bytes"),
    "length": (file_bytes({}, length=2**62), f"got a header length of {2**62}"),
    "not JSON": (file_bytes(b"{'a': 1}"), "header: expected JSON"),
    "not UTF-8": (file_bytes(b'{"\xff": 1}'), "header: expected JSON"),
    "list": (file_bytes([1]), "header: expected a JSON object, got list"),
    "deep": (file_bytes(b"[" * 100_000), "nested too deeply"),
    "twice": (file_bytes(b'{"w": %b, "w": %b}' % ((json.dumps(entry()).encode(),) * 2), DATA), "'w' stands twice"),
    "no entry": (file_bytes({"w": 5}, DATA), "expected dtype, shape and data_offsets"),
    "extra key": (file_bytes({"w": entry() | {"x": 1}}, DATA), "expected dtype, shape and data_offsets"),
    "dtype": (file_bytes({"w": entry("F4")}, DATA), "tensor 'w': expected a dtype among"),
    "dtype list": (file_bytes({"w": entry(["F32"])}, DATA), "tensor 'w': expected a dtype among"),
    "negative": (file_bytes({"w": entry(shape=[-3])}, DATA), "expected whole numbers in shape"),
    "true": (file_bytes({"w": entry(shape=[True, 3])}, DATA), "expected whole numbers in shape"),
    "one offset": (file_bytes({"w": entry(offsets=[0])}, DATA), "two in data_offsets"),
    "product": (file_bytes({"w": entry(shape=[2**32, 2**32])}, DATA), "for shape .* of F32, got 12"),
    "lie": (file_bytes({"w": entry(shape=[4])}, DATA), r"expected 16 bytes for shape \[4\] of F32, got 12"),
    "overlap": (file_bytes({"v": entry(), "w": entry(offsets=[8, 20])}, bytes(20)), "'w': expected its data at byte"),
    "hole": (file_bytes({"w": entry(offsets=[4, 16])}, bytes(16)), "'w': expected its data at byte"),
    "truncated": (file_bytes({"w": entry()}, DATA[:-1]), "bytes from its header, got"),
    "longer": (file_bytes({"w": entry()}, DATA + b"\0"), "bytes from its header, got"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted(tmp_path, name):
    data, message = CRAFTED[name]
    path = tmp_path / "x.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=message) as caught:
            safetensors_file.read_header(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert peak < 2 * len(data) + 2**20  # the second term: traceback, message, pytest


def test_shards_are_one_table(tmp_path):
    # Four shards with an index, against the same tensors read by the format's package.
    expected = {}
    for path in (GOLDEN / "llama_sharded").glob("*.safetensors"):
        expected |= safetensors.numpy.load_file(path)
    got = safetensors_folder.read_headers(GOLDEN / "llama_sharded")
    assert len(got) > 10 and len({tensor.path for tensor in got.values()}) == 4
    assert set(got) == set(expected)
    assert all(np.array_equal(got[name].read(), expected[name]) for name in expected)


def change_index(folder: pathlib.Path, **changes: Any) -> None:
    path = folder / safetensors_folder.INDEX_NAME
    index = json.loads(path.read_text())
    index["weight_map"] |= changes
    path.write_text(json.dumps(index))


@pytest.fixture
def sharded(tmp_path: pathlib.Path) -> pathlib.Path:
    return shutil.copytree(GOLDEN / "llama_sharded", tmp_path / "model")


def test_missing_shard(sharded):
    (sharded / "model-00002-of-00004.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-00002-of-00004\.safetensors: expected this shard.*got none"):
        safetensors_folder.read_headers(sharded)


@pytest.mark.parametrize("shard", ["../x.safetensors", "/etc/x.safetensors", "a/b.safetensors", "x.bin", "..", 3])
def test_index_does_not_reach_outside_its_folder(sharded, shard):
    change_index(sharded, **{"model.norm.weight": shard})
    with pytest.raises(ValueError, match=r"'model\.norm\.weight': expected the name of a safetensors file"):
        safetensors_folder.read_headers(sharded)


def test_index_and_shards_must_agree(sharded):
    change_index(sharded, ghost="model-00001-of-00004.safetensors")
    with pytest.raises(ValueError, match="expected tensor 'ghost'"):
        safetensors_folder.read_headers(sharded)
    index = json.loads((sharded / safetensors_folder.INDEX_NAME).read_text())
    del index["weight_map"]["ghost"], index["weight_map"]["model.norm.weight"]
    (sharded / safetensors_folder.INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"'model\.norm\.weight': expected it in no shard"):
        safetensors_folder.read_headers(sharded)
    (sharded / safetensors_folder.INDEX_NAME).write_text("{}")
    with pytest.raises(ValueError, match="expected weight_map"):
        safetensors_folder.read_headers(sharded)


def test_folders_without_the_usual_names(tmp_path):
    with pytest.raises(ValueError, match=r"expected model\.safetensors .*got no weights"):
        safetensors_folder.read_headers(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"got only pytorch_model\.bin; save the model as safetensors"):
        safetensors_folder.read_headers(tmp_path)
    safetensors.numpy.save_file({"w": np.ones(3, np.float32)}, tmp_path / "weights.safetensors")
    assert list(safetensors_folder.read_headers(tmp_path)) == ["w"]
    safetensors.numpy.save_file({"v": np.ones(3, np.float32)}, tmp_path / "more.safetensors")
    with pytest.raises(ValueError, match=r"expected model\.safetensors\.index\.json beside 2 safetensors files"):
        safetensors_folder.read_headers(tmp_path)
