"""Loading: every parameter from the file, every tensor of the file used, both formats the same model."""

import json
import pathlib
import shutil
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jdecode.models import families, parameter_shapes
from jdecode.weights import hub, load
from tests.weights import gguf_bytes

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
TINY = GOLDEN / "tiny"
FAMILY_NAMES = sorted(path.name for path in TINY.iterdir() if path.is_dir())


def flat(params: dict[str, Any]) -> dict[str, np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {"/".join(key.key for key in path): np.asarray(leaf) for path, leaf in leaves}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    left, right = flat(one), flat(other)
    return set(left) == set(right) and all(
        left[path].dtype == right[path].dtype and left[path].tobytes() == right[path].tobytes() for path in left
    )


def file_tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= safetensors.numpy.load_file(path)
    return tensors


# A head that a file lacked stayed at its random start (vllm-project/vllm#53020, huggingface/transformers#34759).
# Here nothing has a start: every parameter is what the format's own package reads, and all are there.
@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_every_parameter_is_the_files(name):
    loaded = load.load_weights(TINY / name)
    shapes = parameter_shapes.parameter_shapes(loaded.config)
    got = flat(loaded.params)
    assert {path: array.shape for path, array in got.items()} == shapes
    names = families.find_name(loaded.config.family).hugging_face_names(loaded.config)
    tensors = file_tensors(TINY / name)
    assert set(names.values()) == set(tensors)
    for path, array in got.items():
        assert array.dtype == np.float32
        assert array.tobytes() == tensors[names[path]].astype(np.float32).tobytes(), path


def test_bfloat16_file_stays_bit_by_bit():
    loaded = flat(load.load_weights(TINY / "llama_bf16", dtype="bfloat16").params)
    tensors = file_tensors(TINY / "llama_bf16")
    assert loaded["embedding/weight"].dtype == ml_dtypes.bfloat16
    assert loaded["embedding/weight"].tobytes() == tensors["model.embed_tokens.weight"].tobytes()


def test_float16():
    loaded = flat(load.load_weights(TINY / "llama_mha", dtype="float16").params)
    exact = flat(load.load_weights(TINY / "llama_mha").params)
    assert all(np.array_equal(loaded[path], exact[path].astype(np.float16)) for path in exact)


# The file's q and k rows are permuted, with 8 query and 2 key heads of 12; k un-permuted with the query heads, or
# an inverse that is right only for a head width of 4, loads cleanly and attends to garbage
# (huggingface/transformers#31788, vllm-project/vllm-metal#480, jzhang38/TinyLlama#24).
def test_gguf_equals_the_safetensors_it_was_made_from():
    from_gguf = load.load_weights(GOLDEN / "gguf" / "llama_gqa.f32.gguf")
    from_folder = load.load_weights(TINY / "llama_gqa")
    assert from_gguf.config == from_folder.config
    assert same(from_gguf.params, from_folder.params)
    assert from_gguf.eos_token_ids == (2,) and from_gguf.bos_token_id == 1
    assert from_gguf.tokenizer is not None and from_folder.tokenizer is None


def test_quantised_gguf_is_near_the_safetensors():
    got = flat(load.load_weights(GOLDEN / "gguf" / "llama_gqa.f16_q8.gguf").params)
    exact = flat(load.load_weights(TINY / "llama_gqa").params)
    for path, array in exact.items():
        cosine = float(np.sum(got[path] * array) / np.sqrt(np.sum(got[path] ** 2) * np.sum(array**2)))
        assert cosine > 0.9999, path
    rounded = exact["embedding/weight"].astype(np.float16).astype(np.float32)
    assert np.array_equal(got["embedding/weight"], rounded)


@pytest.mark.parametrize("heads", [1, 2, 4, 8])
@pytest.mark.parametrize("width", [4, 6, 64])
@pytest.mark.parametrize("trailing", [(), (5,)])
def test_unpermute_undoes_the_permutation(heads, width, trailing):
    rng = np.random.default_rng(3)
    original = rng.normal(size=(heads, width, *trailing)).astype(np.float32)
    # As the converters write it: row i of the first half becomes row 2i, row i of the second half row 2i + 1.
    written = np.empty_like(original)
    for head in range(heads):
        for row in range(width // 2):
            written[head, 2 * row] = original[head, row]
            written[head, 2 * row + 1] = original[head, row + width // 2]
    assert not np.array_equal(written, original)
    assert np.array_equal(load.unpermute_rope_rows(written), original)


def write_gguf(path: pathlib.Path, folder: pathlib.Path, architecture: str, **extra: Any) -> None:
    """Writes a tiny checkpoint as a GGUF file: norms of Gemma plus one, q and k rows of Llama permuted."""
    loaded = load.load_weights(folder)
    model, family = loaded.config, families.find_name(loaded.config.family)
    shapes = parameter_shapes.parameter_shapes(model)
    tensors = {}
    for parameter, name in family.gguf_names(model).items():
        array = flat(loaded.params)[parameter]
        if architecture == "gemma3" and parameter.endswith("/scale"):
            array = array + np.float32(1)
        if architecture == "llama" and parameter.endswith(("query/weight", "key/weight", "query/bias", "key/bias")):
            halves = np.split(array, 2, axis=1)
            array = np.stack(halves, axis=2).reshape(array.shape)
        tensors[name] = np.ascontiguousarray(array).reshape(parameter_shapes.file_shape(parameter, shapes[parameter]))
    fields = {
        "general.architecture": architecture,
        f"{architecture}.block_count": model.num_layers,
        f"{architecture}.context_length": model.max_positions,
        f"{architecture}.embedding_length": model.hidden_size,
        f"{architecture}.feed_forward_length": model.intermediate_size,
        f"{architecture}.attention.head_count": model.num_heads,
        f"{architecture}.attention.head_count_kv": model.num_kv_heads,
        f"{architecture}.attention.key_length": model.head_dim,
        f"{architecture}.attention.value_length": model.head_dim,
        f"{architecture}.attention.layer_norm_rms_epsilon": model.norm_eps,
        **{name.replace("__", "."): value for name, value in extra.items()},
    }
    gguf_bytes.write_model(path, fields, tensors)


def test_gguf_biases_are_unpermuted_too(tmp_path):
    write_gguf(tmp_path / "x.gguf", TINY / "llama_bias_tied", "llama", llama__rope__freq_base=20000.0)
    got, expected = load.load_weights(tmp_path / "x.gguf"), load.load_weights(TINY / "llama_bias_tied")
    assert got.config == expected.config
    assert same(got.params, expected.params)
    assert got.tokenizer is None and got.eos_token_ids == () and got.bos_token_id is None


def test_gguf_gemma3_norms_lose_their_one(tmp_path):
    extra = {"gemma3__attention__sliding_window": 16, "gemma3__attention__sliding_window_pattern": 3}
    write_gguf(tmp_path / "x.gguf", TINY / "gemma3_text", "gemma3", **extra)
    got, expected = load.load_weights(tmp_path / "x.gguf"), load.load_weights(TINY / "gemma3_text")
    # The file's query scalar is 24, which a GGUF file cannot say; the head width is 16.
    assert got.config.query_scale == 16**-0.5
    assert got.config.layers == expected.config.layers
    left, right = flat(got.params), flat(expected.params)
    for path in right:
        # 1 + w is rounded to 24 bits in the file, so w comes back within half a unit of a number under 4.
        np.testing.assert_allclose(left[path], right[path], rtol=0, atol=2**-23 if "norm" in path else 0)
    # In bfloat16 the one goes before the rounding: 8 bits of w are left, not 8 bits of 1 + w.
    half = flat(load.load_weights(tmp_path / "x.gguf", dtype="bfloat16").params)
    assert np.array_equal(half["final_norm/scale"], left["final_norm/scale"].astype(ml_dtypes.bfloat16))


def copy(folder: pathlib.Path, name: str, **config_changes: Any) -> pathlib.Path:
    shutil.copytree(TINY / name, folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **config_changes}))
    return folder


def change_tensors(folder: pathlib.Path, **changes: np.ndarray | None) -> None:
    tensors = {**file_tensors(folder), **changes}
    kept = {name: array for name, array in tensors.items() if array is not None}
    safetensors.numpy.save_file(kept, folder / "model.safetensors")


# Flag and file disagree about the head (vllm-project/vllm#6758, ml-explore/mlx-lm#1298): the four combinations.
def test_tied_and_absent():
    assert "head" not in load.load_weights(TINY / "llama3_rope").params


def test_untied_and_present():
    loaded = load.load_weights(TINY / "llama_gqa")
    assert not np.array_equal(loaded.params["head"]["weight"], loaded.params["embedding"]["weight"])


@pytest.mark.parametrize(("is_equal", "words"), [(True, "equals the embedding"), (False, "is different")])
def test_tied_and_present_uses_the_embedding_and_notes_it(tmp_path, caplog, is_equal, words):
    folder = copy(tmp_path / "m", "llama3_rope")
    embedding = file_tensors(folder)["model.embed_tokens.weight"]
    change_tensors(folder, **{"lm_head.weight": embedding if is_equal else embedding + 1})
    loaded = load.load_weights(folder)
    assert "head" not in loaded.params
    assert len(loaded.notes) == 1 and words in loaded.notes[0]
    assert [record.levelname for record in caplog.records] == ([] if is_equal else ["WARNING"])


def test_untied_and_absent_is_refused(tmp_path):
    folder = copy(tmp_path / "m", "llama_gqa")
    change_tensors(folder, **{"lm_head.weight": None})
    with pytest.raises(ValueError, match=r"expected tensor 'lm_head\.weight', got none; .*does not tie"):
        load.load_weights(folder)


def test_missing_and_left_over_tensors(tmp_path):
    folder = copy(tmp_path / "m", "llama_gqa")
    name = "model.layers.1.self_attn.k_proj.weight"
    change_tensors(folder, **{name: None})
    with pytest.raises(ValueError, match=f"expected tensor '{name}'"):
        load.load_weights(folder)
    folder = copy(tmp_path / "n", "llama_gqa")
    change_tensors(folder, **{"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(6, np.float32)})
    assert same(load.load_weights(folder).params, load.load_weights(TINY / "llama_gqa").params)
    change_tensors(folder, **{"model.layers.0.self_attn.q_proj.bias": np.ones(96, np.float32)})
    with pytest.raises(ValueError, match=r"got 'model\.layers\.0\.self_attn\.q_proj\.bias'"):
        load.load_weights(folder)


def test_wrong_shape_names_both(tmp_path):
    folder = copy(tmp_path / "m", "llama_gqa", intermediate_size=65)
    with pytest.raises(ValueError, match=r"gate_proj.weight': expected shape \(65, 64\).*got \(64, 64\)"):
        load.load_weights(folder)


def test_stop_ids_are_a_union(tmp_path):
    folder = copy(tmp_path / "m", "llama_gqa", eos_token_id=[7, 2])
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9], "temperature": 0.6}))
    loaded = load.load_weights(folder)
    assert loaded.eos_token_ids == (7, 2, 9)
    assert loaded.generation_defaults == {"eos_token_id": [2, 9], "temperature": 0.6}
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 288}))
    with pytest.raises(ValueError, match="special token ids from 0 to 287, got 288"):
        load.load_weights(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": "</s>"}))
    with pytest.raises(ValueError, match="special token ids that are whole numbers, got '</s>'"):
        load.load_weights(folder)
    (folder / "generation_config.json").unlink()
    assert load.load_weights(folder).eos_token_ids == (7, 2)


def test_gguf_stop_ids_are_a_union(tmp_path):
    extra = {"tokenizer__ggml__eos_token_id": 5, "tokenizer__ggml__eot_token_id": 6, "tokenizer__ggml__eom_token_id": 5}
    write_gguf(tmp_path / "x.gguf", TINY / "llama_bias_tied", "llama", **extra)
    assert load.load_weights(tmp_path / "x.gguf").eos_token_ids == (5, 6)


def test_gguf_that_is_one_of_several_parts(tmp_path):
    write_gguf(tmp_path / "x.gguf", TINY / "llama_bias_tied", "llama", split__count=3)
    with pytest.raises(ValueError, match="a whole model in one GGUF file, got one of 3 parts"):
        load.load_weights(tmp_path / "x.gguf")


def test_gguf_vocabulary_of_another_length(tmp_path):
    data = (GOLDEN / "gguf" / "llama_gqa.f32.gguf").read_bytes()
    key = b"tokenizer.ggml.scores"
    assert data.count(key) == 1
    (tmp_path / "x.gguf").write_bytes(data.replace(key, b"tokenizer.ggml.scorez"))
    with pytest.raises(ValueError, match="scores"):
        load.load_weights(tmp_path / "x.gguf")


def test_put_places_every_parameter():
    seen = {}

    def put(path: str, array: np.ndarray) -> jax.Array:
        seen[path] = array.shape
        return jax.device_put(array, jax.devices()[3])

    loaded = load.load_weights(TINY / "llama_bias_tied", placement=lambda _: put)
    assert seen == parameter_shapes.parameter_shapes(loaded.config)
    assert {leaf.device for leaf in jax.tree.leaves(loaded.params)} == {jax.devices()[3]}
    default = load.load_weights(TINY / "llama_bias_tied")
    assert {leaf.device for leaf in jax.tree.leaves(default.params)} == {jax.devices()[0]}
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(default.params))


def test_sources_that_are_none(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.safetensors").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "ggufs").mkdir()
    (tmp_path / "ggufs" / "m.gguf").write_text("x")
    cases = {
        tmp_path / "none.gguf": "got a path that does not exist",
        str(tmp_path / "none"): "got a path that does not exist",
        "none": "got a path that does not exist",
        "models/none.gguf": "got a path that does not exist",
        tmp_path / "a.txt": r"expected a folder or a .gguf file, got a file 'a\.txt'",
        tmp_path / "b.safetensors": "give its folder",
        tmp_path / "empty": r"expected config\.json in the folder, got none",
        tmp_path / "ggufs": r"give the file .*m\.gguf",
        "x" * 5000: "expected a readable path",
    }
    monkeypatch.setattr(hub, "fetch", lambda repo_id: pytest.fail(f"fetched {repo_id}"))
    for source, message in cases.items():
        with pytest.raises(ValueError, match=message) as caught:
            load.load_weights(source)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match="dtype: expected one of float32, bfloat16, float16, got 'auto'"):
        load.load_weights(TINY / "llama_gqa", dtype="auto")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", "expected JSON"), ("[]", "expected a JSON object"), ("{}", "expected the key 'model_type'")],
)
def test_bad_config_file(tmp_path, text, message):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        load.load_weights(tmp_path)


def test_hub_id_is_fetched(monkeypatch):
    asked = []
    monkeypatch.setattr(hub, "fetch", lambda repo_id: asked.append(repo_id) or TINY / "llama_mha")
    loaded = load.load_weights("owner/some-model.v2")
    assert asked == ["owner/some-model.v2"] and loaded.source == "owner/some-model.v2"
    assert same(loaded.params, load.load_weights(TINY / "llama_mha").params)


def test_memory_holds_the_weights_about_once(tmp_path):
    # An embedding of 64 MB in float16 (128 MB in float32) and little else: the hardest case, as no other tensor is
    # there to hide a second copy behind. The bound of the project is 1.3 times the weights held.
    folder = copy(tmp_path / "m", "llama3_rope", vocab_size=700_000)
    change_tensors(folder, **{"model.embed_tokens.weight": np.full((700_000, 48), 0.5, np.float16)})
    load.load_weights(TINY / "llama3_rope")  # whatever is allocated once
    addresses = {}

    def put(path: str, array: np.ndarray) -> jax.Array:
        addresses[path] = array.ctypes.data
        return jax.device_put(array)  # what is done without `put`

    tracemalloc.start()
    try:
        loaded = load.load_weights(folder, placement=lambda _: put)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    held = sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))
    assert held > 134_000_000
    # numpy's allocations are traced, XLA's are not: but XLA takes over the array and makes no second copy.
    assert loaded.params["embedding"]["weight"].unsafe_buffer_pointer() == addresses["embedding/weight"]
    assert 1.0 < peak / held < 1.3
