"""Configurations of every spelling, key by key; the registry."""

import json
import pathlib
from typing import Any

import pytest

from jdecode import config
from jdecode.models import families, parameter_shapes
from jdecode.models.families import llama

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
FAMILY_NAMES = sorted(path.name for path in TINY.iterdir() if path.is_dir())

LLAMA = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 29,
    "hidden_size": 25,
    "intermediate_size": 40,
    "num_hidden_layers": 7,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
    "sliding_window": 5,
}


def read(values: dict[str, Any], **changes: Any) -> config.ModelConfig:
    values = {**values, **changes}
    return families.find(values["model_type"]).config_from_hugging_face(values)


def windows(model: config.ModelConfig) -> list[int | None]:
    return [layer.window for layer in model.layers]


def test_goldens_are_all_there():
    assert len(FAMILY_NAMES) == 9


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_old_and_new_spelling_are_one_configuration(name):
    new = json.loads((TINY / name / "config.json").read_text())
    old = json.loads((TINY / name / "config.v4.json").read_text())
    assert "rope_parameters" in new and "rope_theta" in old  # they are two spellings
    assert read(new) == read(old)


@pytest.mark.parametrize("name", FAMILY_NAMES)
def test_written_configuration_reads_back(name):
    model = read(json.loads((TINY / name / "config.json").read_text()))
    assert read(families.find_name(model.family).config_to_hugging_face(model)) == model


def test_gemma3_with_scaling_by_hand():
    # From tiny/gemma3_scaled/config.json: pattern 2, window 11, linear factor 8 on global layers only, scalar 10.
    model = read(json.loads((TINY / "gemma3_scaled" / "config.json").read_text()))
    local = config.LayerConfig(window=11, rope=config.RopeConfig(theta=1e4))
    global_ = config.LayerConfig(rope=config.RopeConfig(theta=1e6, scaling="linear", factor=8.0))
    assert model.layers == (local, global_, local, global_)
    assert model.query_scale == pytest.approx(10**-0.5, rel=1e-15)
    assert model.embedding_scale == pytest.approx(48**0.5, rel=1e-15)
    assert (model.norm_offset, model.activation, model.qk_norm, model.post_norms) == (1.0, "gelu_tanh", True, True)
    assert (model.num_heads, model.num_kv_heads, model.head_dim, model.tie_embeddings) == (6, 3, 12, True)


def test_llama3_rope_by_hand():
    model = read(json.loads((TINY / "llama3_rope" / "config.v4.json").read_text()))
    rope = config.RopeConfig(
        theta=1e4,
        scaling="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=64,
    )
    assert {layer.rope for layer in model.layers} == {rope}


def test_head_dim_is_read_and_derived_only_when_absent_or_null():
    # As in a model of hidden 2560, 32 heads of 128: the query rows are 4096, not 2560.
    wide = read(LLAMA, hidden_size=2560, num_attention_heads=32, num_key_value_heads=8, head_dim=128)
    shapes = parameter_shapes.parameter_shapes(wide)
    path = "layers_0/attention/query/weight"
    assert parameter_shapes.file_shape(path, shapes[path]) == (4096, 2560)
    assert read(LLAMA).head_dim == 4
    assert read(LLAMA, head_dim=None).head_dim == 4
    with pytest.raises(ValueError, match="hidden_size to be a multiple of num_attention_heads 6"):
        read(LLAMA, hidden_size=26)


def test_num_kv_heads_null_is_all_heads_and_absent_is_the_type_default():
    assert read(LLAMA, num_key_value_heads=None).num_kv_heads == 6
    values = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    assert read(values).num_kv_heads == 6
    assert read(values, model_type="mistral", num_attention_heads=16, head_dim=2).num_kv_heads == 8


# A renamed pattern key made every layer local or none (vllm-project/vllm#21863, #21927, #14896).
LOCAL_GLOBAL = [5, 5, None, 5, 5, None, 5]


@pytest.mark.parametrize(
    "keys",
    [
        {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2 + ["sliding_attention"]},
        {"sliding_window_pattern": 3},
        {"_sliding_window_pattern": 3},
        {"sliding_window_pattern": 3, "_sliding_window_pattern": 3},
    ],
)
def test_layer_types_and_patterns_agree(keys):
    assert windows(read(GEMMA3, **keys)) == LOCAL_GLOBAL


def test_no_pattern_is_the_published_six():
    assert windows(read(GEMMA3)) == [5, 5, 5, 5, 5, None, 5]


def test_null_window_never_falls_back():
    assert windows(read(GEMMA3, sliding_window=None, sliding_window_pattern=7)) == [None] * 7
    thetas = [layer.rope and layer.rope.theta for layer in read(GEMMA3, sliding_window=None).layers]
    assert thetas == [1e4] * 5 + [1e6, 1e4]  # the type of a layer still says its rope
    assert windows(read(LLAMA, model_type="mistral", sliding_window=None)) == [None] * 3
    assert windows(read(LLAMA, model_type="mistral")) == [4096] * 3  # absent: the published default
    with pytest.raises(ValueError, match="expected a sliding_window for the layers"):
        read(LLAMA, model_type="ministral", sliding_window=None, layer_types=["sliding_attention"] * 3)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"layer_types": ["full_attention"] * 7, "sliding_window_pattern": 3}, "name the same global layers"),
        ({"layer_types": ["full_attention"] * 6}, "expected 7 entries"),
        ({"layer_types": ["full_attention"] * 6 + ["chunked_attention"]}, "chunked_attention"),
        ({"layer_types": "full_attention"}, "expected 7 entries"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern: expected a whole number"),
    ],
)
def test_bad_layer_types(keys, message):
    with pytest.raises(ValueError, match=message):
        read(GEMMA3, **keys)


def test_windows_of_the_llama_types():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(read(LLAMA, layer_types=kinds, sliding_window=7)) == [7, None, 7]
    assert windows(read(LLAMA, model_type="ministral", layer_types=kinds, sliding_window=7)) == [7, None, 7]
    assert windows(read(LLAMA, sliding_window=None)) == [None] * 3
    with pytest.raises(ValueError, match="expected layer_types beside sliding_window 7"):
        read(LLAMA, sliding_window=7)


def test_mixed_windows_are_written_as_the_type_whose_readers_honour_them():
    model = read(LLAMA, layer_types=["sliding_attention", "full_attention", "full_attention"], sliding_window=7)
    values = llama.config_to_hugging_face(model)
    assert values["model_type"] == "ministral"
    assert read(values) == model


# Scaling that is read but never applied, and the key `type` beside `rope_type` (Blaizzy/mlx-vlm#1710,
# unslothai/unsloth#6197): every key is consumed or raises.
@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_both_spellings_of_the_rope_type(key):
    model = read(LLAMA, rope_theta=5e5, rope_scaling={key: "linear", "factor": 4.0})
    assert model.layers[0].rope == config.RopeConfig(theta=5e5, scaling="linear", factor=4.0)


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, "rope_type: expected one of default.*got 'yarn'"),
        ({"rope_type": "linear", "factor": 4.0, "beta_fast": 32}, "got 'beta_fast'"),
        ({"rope_type": "linear"}, "expected the key 'factor'"),
        ({"rope_type": "linear", "factor": "4"}, "factor: expected a finite number over 0"),
        ({"rope_type": "default", "factor": 4.0}, "factor: expected 1.0"),
        ({"rope_type": "linear", "type": "llama3", "factor": 4.0}, "rope_type and type to agree"),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}, "original_max_pos"),
        ("linear", "rope_scaling: expected an object"),
    ],
)
@pytest.mark.parametrize("values", [LLAMA, GEMMA3])
def test_bad_rope_scaling(values, scaling, message):
    with pytest.raises(ValueError, match=message):
        read(values, rope_scaling=scaling)


def test_rope_parameters_and_old_keys_must_agree():
    new = {"rope_theta": 7e3, "rope_type": "linear", "factor": 2.0}
    model = read(LLAMA, rope_parameters=new, rope_theta=7e3, rope_scaling={"type": "linear", "factor": 2.0})
    assert model.layers[0].rope == config.RopeConfig(theta=7e3, scaling="linear", factor=2.0)
    assert read(LLAMA, rope_parameters=new, rope_theta=7e3) == model
    with pytest.raises(ValueError, match="rope_parameters to agree"):
        read(LLAMA, rope_parameters=new, rope_theta=8e3)
    with pytest.raises(ValueError, match="rope_parameters to agree"):
        read(LLAMA, rope_parameters=new, rope_scaling={"type": "linear", "factor": 4.0})
    nested = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    assert [layer.rope and layer.rope.theta for layer in read(GEMMA3, rope_parameters=nested).layers[4:6]] == [3e4, 2e6]
    with pytest.raises(ValueError, match="rope_parameters to agree"):
        read(GEMMA3, rope_parameters=nested, rope_local_base_freq=1e4)
    with pytest.raises(ValueError, match="got 'chunked_attention'"):
        read(GEMMA3, rope_parameters={**nested, "chunked_attention": {}})


# The factor was fixed at 8 where small models need 32 (meta-llama/llama-models#241). Head 128, base 5e5: the lowest
# frequency, wavelength 2 pi 5e5^(126/128) = 2.6e6 > 8192, is divided by the factor; the highest, 2 pi < 2048, by one.
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_divisors_at_the_ends(factor):
    rope = config.RopeConfig(theta=5e5, scaling="llama3", factor=factor)
    divisors = llama.llama3_divisors(rope, 128)
    assert divisors.shape == (64,)
    assert divisors[0] == 1.0
    assert divisors[-1] == factor


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (LLAMA, {"num_experts": 8}, "got 'num_experts'"),
        (LLAMA, {"rms_norm_epsilon": 1e-6}, "nearest known key is 'rms_norm_eps'"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "got 'quantization_config'"),
        (LLAMA, {"pretraining_tp": 2}, "pretraining_tp: expected 1"),
        (LLAMA, {"rope_interleaved": True}, "rope_interleaved: expected False"),
        (LLAMA, {"hidden_act": "relu"}, "hidden_act: expected one of silu"),
        (LLAMA, {"hidden_size": 24.0}, "hidden_size: expected a whole number"),
        (LLAMA, {"hidden_size": True}, "hidden_size: expected a whole number"),
        (LLAMA, {"hidden_size": None}, "expected the key 'hidden_size'"),
        (LLAMA, {"num_hidden_layers": 10**9}, "num_hidden_layers: expected a whole number from 1 to 4096"),
        (LLAMA, {"rms_norm_eps": float("nan")}, "rms_norm_eps: expected a finite number"),
        (LLAMA, {"rope_theta": 10**400}, "rope_theta: expected a finite number"),
        (LLAMA, {"tie_word_embeddings": "no"}, "tie_word_embeddings: expected true or false"),
        (LLAMA, {"model_type": "mistral", "attention_bias": True}, "expected no biases in a mistral model"),
        (LLAMA, {"num_key_value_heads": 4}, "num_kv_heads: expected a divisor of num_heads 6"),
        (GEMMA3, {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected False"),
        (GEMMA3, {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping: expected a finite number over 0"),
        (GEMMA3, {"mlp_bias": False}, "got 'mlp_bias'"),
    ],
)
def test_bad_keys(values, change, message):
    with pytest.raises(ValueError, match=message) as caught:
        read(values, **change)
    assert "\n" not in str(caught.value)


def test_keys_that_act():
    model = read(LLAMA, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, max_position_embeddings=77)
    assert (model.qkv_bias, model.output_bias, model.feed_forward_bias) == (True, True, True)
    assert (model.tie_embeddings, model.max_positions, model.norm_eps) == (True, 77, 1e-5)
    model = read(GEMMA3, attn_logit_softcapping=50.0, final_logit_softcapping=30.0, query_pre_attn_scalar=16)
    assert (model.attention_soft_cap, model.final_soft_cap, model.query_scale) == (50.0, 30.0, 0.25)


def test_gemma3_text_part_with_the_published_defaults():
    # The 4B model's file says only what differs from the published defaults.
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    model = read({"model_type": "gemma3", "text_config": text, "image_token_index": 262144, "eos_token_id": [1, 106]})
    assert (model.vocab_size, model.num_heads, model.num_kv_heads, model.head_dim) == (262208, 8, 4, 256)
    assert windows(model)[:7] == [1024] * 5 + [None, 1024]
    assert model.layers[5].rope == config.RopeConfig(theta=1e6, scaling="linear", factor=8.0)
    assert model.layers[0].rope == config.RopeConfig(theta=1e4)
    with pytest.raises(ValueError, match=r"vision_config: .*only text models are supported"):
        read({"model_type": "gemma3", "text_config": text, "vision_config": {"hidden_size": 1152}})
    with pytest.raises(ValueError, match="expected the key 'text_config'"):
        read({"model_type": "gemma3"})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gemma3_txt", "nearest is 'gemma3_text'"),
        ("rwkv", "known family.*llama.*gemma3.*got 'rwkv'"),
        (["llama"], "got"),
    ],
)
def test_unknown_family(name, message):
    with pytest.raises(ValueError, match=message):
        families.find(name)


def test_registry_finds_by_every_name():
    assert families.find("mistral").name == "llama"
    assert families.find_gguf("gemma3").name == "gemma3"
    assert families.find_name("llama") is families.find("ministral")
    with pytest.raises(ValueError, match=r"general\.architecture.*got 'clip'"):
        families.find_gguf("clip")


def test_names_of_layers_and_norms():
    # The same word means two different norms in the two families' files.
    llama_names = families.find("llama").hugging_face_names(read(LLAMA))
    assert llama_names["layers_2/feed_forward_norm/scale"] == "model.layers.2.post_attention_layernorm.weight"
    gemma_names = families.find("gemma3").hugging_face_names(read(GEMMA3))
    assert gemma_names["layers_6/post_attention_norm/scale"] == "model.layers.6.post_attention_layernorm.weight"
    assert gemma_names["layers_6/feed_forward_norm/scale"] == "model.layers.6.pre_feedforward_layernorm.weight"
    assert "head/weight" not in gemma_names and llama_names["head/weight"] == "lm_head.weight"
