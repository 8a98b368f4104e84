"""Written folders load again bit by bit, and what cannot be written is refused."""

import dataclasses
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors

from jdecode import config
from jdecode.models import parameter_shapes
from jdecode.weights import load, safetensors_save

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SOURCES = [
    *(GOLDEN / "tiny" / name for name in ("llama_bf16", "llama_bias_tied", "gemma3_scaled", "mistral_w16")),
    GOLDEN / "gguf" / "llama_gqa.f16_q8.gguf",
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("max_shard_bytes", [safetensors_save.DEFAULT_SHARD_BYTES, 20_000])
def test_written_and_loaded_again(tmp_path, source, dtype, max_shard_bytes):
    loaded = load.load_weights(source, dtype=dtype)
    safetensors_save.save_hugging_face(
        tmp_path / "new" / "folder",
        loaded.params,
        loaded.config,
        eos_token_ids=loaded.eos_token_ids,
        bos_token_id=loaded.bos_token_id,
        generation_defaults=loaded.generation_defaults,
        max_shard_bytes=max_shard_bytes,
    )
    again = load.load_weights(tmp_path / "new" / "folder", dtype=dtype)
    assert again.config == loaded.config
    assert (again.eos_token_ids, again.bos_token_id) == (loaded.eos_token_ids, loaded.bos_token_id)
    assert again.generation_defaults == loaded.generation_defaults
    assert jax.tree.structure(again.params) == jax.tree.structure(loaded.params)
    pairs = zip(jax.tree.leaves(again.params), jax.tree.leaves(loaded.params), strict=True)
    assert all(a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)


def test_shards_are_files_of_the_format(tmp_path):
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa")
    safetensors_save.save_hugging_face(tmp_path, loaded.params, loaded.config, max_shard_bytes=100_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 3 and files[0].name == f"model-00001-of-0000{len(files)}.safetensors"
    found = {}
    for file in files:
        with safetensors.safe_open(file, framework="numpy") as reader:
            assert reader.metadata() == {"format": "pt"}
            found |= {name: (file.name, tuple(reader.get_slice(name).get_shape())) for name in reader.keys()}  # noqa: SIM118
        assert file.stat().st_size < 104_000  # the tensors and a header
        assert int.from_bytes(file.read_bytes()[:8], "little") % 8 == 0
    assert index["weight_map"] == {name: file for name, (file, _) in found.items()}
    assert found["model.layers.2.self_attn.q_proj.weight"][1] == (96, 64)
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params))


def test_configuration_file(tmp_path):
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa", dtype="bfloat16")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    safetensors_save.save_hugging_face(
        tmp_path / "m",
        loaded.params,
        loaded.config,
        eos_token_ids=(2, 5),
        tokenizer_files=[tmp_path / "tokenizer_config.json"],
    )
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (values["torch_dtype"], values["eos_token_id"], values["bos_token_id"]) == ("bfloat16", [2, 5], None)
    assert (values["architectures"], values["head_dim"], values["rope_theta"]) == (["LlamaForCausalLM"], 12, 5000.0)
    assert (tmp_path / "m" / "tokenizer_config.json").read_text() == "{}"
    assert not (tmp_path / "m" / "generation_config.json").exists()


def small(**changes) -> config.ModelConfig:
    model = config.ModelConfig(
        vocab_size=29,
        hidden_size=24,
        intermediate_size=40,
        num_heads=6,
        num_kv_heads=2,
        head_dim=10,
        layers=(config.LayerConfig(window=7), config.LayerConfig(), config.LayerConfig(window=7)),
    )
    return dataclasses.replace(model, **changes)


def random_params(model: config.ModelConfig) -> dict:
    rng = np.random.default_rng(1)
    tree: dict = {}
    for path, shape in parameter_shapes.parameter_shapes(model).items():
        node = tree
        *parents, name = path.split("/")
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.asarray(rng.normal(size=shape), jnp.float32)
    return tree


def test_alternating_windows(tmp_path):
    model = small()
    params = random_params(model)
    safetensors_save.save_hugging_face(tmp_path, params, model)
    again = load.load_weights(tmp_path)
    assert again.config == model
    assert np.array_equal(
        again.params["layers_1"]["attention"]["key"]["weight"], params["layers_1"]["attention"]["key"]["weight"]
    )


@pytest.mark.parametrize(
    ("changes", "lost"),
    [
        ({"layers": (config.LayerConfig(window=7), config.LayerConfig(window=8))}, "layers"),
        ({"layers": (config.LayerConfig(rope=None),)}, "layers"),
        ({"layers": (config.LayerConfig(window=7, num_sinks=2),)}, "layers"),
        ({"qk_norm": True, "final_soft_cap": 30.0}, "qk_norm, final_soft_cap"),
        ({"layers": (config.LayerConfig(),), "qkv_bias": True}, "output_bias"),
    ],
)
def test_what_the_format_cannot_say_is_refused(tmp_path, changes, lost):
    model = small(**changes)
    with pytest.raises(ValueError, match=f"got one whose {lost} it cannot say"):
        safetensors_save.save_hugging_face(tmp_path / "m", random_params(model), model)
    assert not (tmp_path / "m").exists()


def test_what_does_not_fit_is_refused(tmp_path):
    model = small()
    params = random_params(model)

    def refused(message: str, params: dict = params, **changes) -> None:
        with pytest.raises(ValueError, match=message):
            safetensors_save.save_hugging_face(tmp_path / "m", params, model, **changes)
        assert not (tmp_path / "m").exists()

    refused("got 'head/weight' missing", {name: node for name, node in params.items() if name != "head"})
    refused("got 'extra/weight' unknown", {**params, "extra": {"weight": jnp.zeros(3)}})
    refused(
        r"final_norm/scale: expected shape \(24,\), got \(25,\)", {**params, "final_norm": {"scale": jnp.zeros(25)}}
    )
    refused("final_norm/scale: expected one of.*got int32", {**params, "final_norm": {"scale": jnp.zeros(24, int)}})
    refused("max_shard_bytes: expected a count", max_shard_bytes=0)
    refused("tokenizer_files: expected files that exist", tokenizer_files=[tmp_path / "none.json"])
    safetensors_save.save_hugging_face(tmp_path / "n", params, model)
    with pytest.raises(ValueError, match="expected a folder without weights"):
        safetensors_save.save_hugging_face(tmp_path / "n", params, model)
