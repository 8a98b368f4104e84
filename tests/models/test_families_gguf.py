"""Configurations from GGUF fields, field by field."""

from typing import Any

import numpy as np
import pytest

from jdecode import config
from jdecode.models import families

LLAMA = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "tie_word_embeddings": True,
    "max_position_embeddings": 99,
}
THREE = [5, 5, None, 5, 5, None, 5]  # every third layer is global


def windows(model: config.ModelConfig) -> list[int | None]:
    return [layer.window for layer in model.layers]


def gguf(architecture: str, num_layers: int, **changes: Any) -> dict[str, Any]:
    fields = {
        "block_count": num_layers,
        "context_length": 99,
        "embedding_length": 24,
        "feed_forward_length": 40,
        "attention.head_count": 6,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": np.float32(1e-5),
        **{name.replace("__", "."): value for name, value in changes.items()},
    }
    own = {f"{architecture}.{name}": value for name, value in fields.items() if value is not None}
    return {"general.architecture": architecture, "general.file_type": 1, "other.tool": "x", **own}


def tensor_shapes(num_layers: int) -> dict[str, tuple[int, ...]]:
    return {"token_embd.weight": (29, 24), **{f"blk.{layer}.attn_q.weight": (24, 24) for layer in range(num_layers)}}


def no_tensor(name: str) -> np.ndarray:
    raise AssertionError(name)


def read_gguf(architecture, num_layers, shapes=None, reader=no_tensor, **changes) -> config.ModelConfig:
    family = families.find_gguf(architecture)
    shapes = tensor_shapes(num_layers) if shapes is None else shapes
    return family.config_from_gguf(gguf(architecture, num_layers, **changes), shapes, reader)


def test_gguf_llama_equals_the_same_model_from_json():
    model = read_gguf("llama", 3, rope__freq_base=np.float32(5e5))
    # The file's float32 1e-5 means the 1e-5 of the JSON file, so both give one configuration.
    assert model == families.find("llama").config_from_hugging_face(LLAMA)
    assert not read_gguf("llama", 3, tensor_shapes(3) | {"output.weight": (29, 24)}).tie_embeddings
    biased = read_gguf("llama", 3, tensor_shapes(3) | {"blk.0.attn_q.bias": (24,), "blk.0.ffn_gate.bias": (40,)})
    assert (biased.qkv_bias, biased.output_bias, biased.feed_forward_bias) == (True, False, True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rope__dimension_count": 2}, r"rope\.dimension_count: expected 4"),
        ({"attention__value_length": 5}, r"attention\.value_length: expected 4"),
        ({"expert_count": 8}, "expert_count: expected 0"),
        ({"block_count": 4}, "blocks 0 to 3"),
        ({"block_count": 2}, "blocks 0 to 1"),
        ({"block_count": 10**9}, "block_count: expected a whole number from 1 to 4096"),
        ({"attention__head_count": None}, r"expected the key 'attention\.head_count'"),
        ({"attention__head_count": np.arange(3)}, r"attention\.head_count: expected a whole number"),
        ({"rope__scaling__type": "yarn"}, "expected one of none, linear, got 'yarn'"),
        ({"rope__scaling__type": "linear"}, r"expected rope\.scaling\.factor"),
        ({"attention__clamp_kqv": np.float32(8)}, r"got 'attention\.clamp_kqv'"),
        ({"embedding_length": 25}, "embedding_length to be a multiple"),
    ],
)
def test_bad_gguf_fields(change, message):
    with pytest.raises(ValueError, match=message):
        read_gguf("llama", 3, **change)


def test_gguf_linear_scaling_in_both_spellings():
    rope = config.RopeConfig(scaling="linear", factor=4.0)
    assert read_gguf("llama", 3, rope__scaling__type="linear", rope__scaling__factor=4.0).layers[0].rope == rope
    assert read_gguf("llama", 3, rope__scale_linear=4.0).layers[0].rope == rope
    assert read_gguf("llama", 3, rope__scaling__type="none").layers[0].rope == config.RopeConfig()


def test_gguf_llama3_scaling_is_found_from_its_divisors():
    shapes = tensor_shapes(3) | {"rope_freqs.weight": (32,)}
    # Head 64, base 5e5, factor 32: pairs 0 to 14 have wavelengths under 8192 / 4 = 2048 (2 pi 5e5^(14/32) = 1957) and
    # keep theirs; pairs from 18 on are over 8192 (2 pi 5e5^(18/32) = 10095) and are divided by 32; between, blended.
    waves = 2 * np.pi * 5e5 ** (np.arange(32) / 32)
    blend = (8192 / waves - 1) / 3
    divisors = np.where(waves > 8192, 32.0, np.where(waves < 2048, 1.0, 1 / ((1 - blend) / 32 + blend)))
    assert list(divisors[[14, 18]]) == [1.0, 32.0] and 1 < divisors[16] < 32
    changes = {"attention__key_length": 64, "rope__freq_base": np.float32(5e5)}
    model = read_gguf("llama", 3, shapes, lambda name: divisors.astype(np.float32), **changes)
    assert model.layers[0].rope == config.RopeConfig(theta=5e5, scaling="llama3", factor=32.0)
    ones = read_gguf("llama", 3, shapes, lambda name: np.ones(32, np.float32), **changes)
    assert ones.layers[0].rope == config.RopeConfig(theta=5e5)
    for wrong in (divisors * 1.01, divisors[:-1], np.zeros(32), divisors * np.nan):
        with pytest.raises(ValueError, match=r"rope_freqs\.weight: expected the 32 divisors"):
            read_gguf("llama", 3, shapes, lambda name, wrong=wrong: wrong, **changes)


def test_gguf_gemma3():
    window = {"attention__sliding_window": 5, "attention__key_length": 8}
    model = read_gguf("gemma3", 7, **window)
    assert windows(model) == [5, 5, 5, 5, 5, None, 5]
    assert [layer.rope and layer.rope.theta for layer in model.layers[4:6]] == [1e4, 1e6]
    assert (model.query_scale, model.norm_offset, model.tie_embeddings) == (8**-0.5, 1.0, True)
    assert windows(read_gguf("gemma3", 7, attention__sliding_window_pattern=3, **window)) == THREE
    flags = np.array([entry is not None for entry in THREE])
    assert windows(read_gguf("gemma3", 7, attention__sliding_window_pattern=flags, **window)) == THREE
    with pytest.raises(ValueError, match="expected 7 truth values, got 6"):
        read_gguf("gemma3", 7, attention__sliding_window_pattern=flags[:-1], **window)
    scaled = read_gguf("gemma3", 7, rope__scaling__type="linear", rope__scaling__factor=8.0, **window)
    assert [layer.rope and layer.rope.factor for layer in scaled.layers[4:6]] == [1.0, 8.0]
    with pytest.raises(ValueError, match=r"expected the key 'attention\.sliding_window'"):
        read_gguf("gemma3", 7)


def test_gguf_gemma3_of_62_layers_scales_queries_by_the_model_width():
    # The 27B model: 5376 wide, 32 heads of 128, scalar 168 = 5376 / 32 instead of 128.
    changes = {
        "embedding_length": 5376,
        "attention__head_count": 32,
        "attention__head_count_kv": 16,
        "attention__key_length": 128,
        "attention__sliding_window": 1024,
    }
    assert read_gguf("gemma3", 62, **changes).query_scale == pytest.approx(168**-0.5, rel=1e-15)
    assert read_gguf("gemma3", 48, **changes).query_scale == pytest.approx(128**-0.5, rel=1e-15)
