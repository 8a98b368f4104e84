"""Every choice of ``ModelConfig`` acts, and acts as its equation says."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.models import transformer
from tests import plain_transformer, tiny_models

LENGTHS = [9, 6]
ROWS = tiny_models.random_rows(LENGTHS, seed=13)
LAYERS = (
    config_lib.LayerConfig(rope=config_lib.RopeConfig(theta=100.0)),
    config_lib.LayerConfig(rope=config_lib.RopeConfig(theta=700.0)),
)
BASE = dataclasses.replace(tiny_models.MIXED, layers=LAYERS)


def _layers(**changes: Any) -> tuple[config_lib.LayerConfig, ...]:
    """The base's layers, the first one changed: a choice of one layer must not reach the other."""
    return (dataclasses.replace(LAYERS[0], **changes), LAYERS[1])


CHOICES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "gelu_tanh": {"activation": "gelu_tanh"},
    "norm_eps": {"norm_eps": 0.3},
    "norm_offset": {"norm_offset": 1.0},
    "query_scale": {"query_scale": 0.15},
    "embedding_scale": {"embedding_scale": 12**0.5},
    "tie_embeddings": {"tie_embeddings": True},
    "qkv_bias": {"qkv_bias": True},
    "output_bias": {"output_bias": True},
    "feed_forward_bias": {"feed_forward_bias": True},
    "qk_norm": {"qk_norm": True},
    "post_norms": {"post_norms": True},
    "attention_soft_cap": {"attention_soft_cap": 0.7},
    "final_soft_cap": {"final_soft_cap": 1.5},
    "one key head": {"num_kv_heads": 1},
    "all key heads": {"num_kv_heads": 4},
    "wide heads": {"head_dim": 10},  # heads * width is 40, which the model width 12 does not give
    "window": {"layers": _layers(window=3)},
    "window and sinks": {"layers": _layers(window=3, num_sinks=2)},
    "sinks in the text": {"layers": _layers(window=3, num_sinks=2, sink_positions="text")},
    "sinks without rope": {"layers": _layers(window=3, num_sinks=2, rope=None)},
    "no rope": {"layers": _layers(rope=None)},
    "linear rope": {"layers": _layers(rope=config_lib.RopeConfig(theta=100.0, scaling="linear", factor=4.0))},
    "theta": {"layers": _layers(rope=config_lib.RopeConfig(theta=10.0))},
}
CHOICES["everything"] = {
    name: value
    for choice in ("gelu_tanh", "norm_offset", "query_scale", "embedding_scale", "qkv_bias", "output_bias", "qk_norm")
    for name, value in CHOICES[choice].items()
} | {
    "feed_forward_bias": True,
    "post_norms": True,
    "attention_soft_cap": 2.0,
    "final_soft_cap": 3.0,
    "layers": _layers(window=3, num_sinks=1),
}


def _logits(config: config_lib.ModelConfig, params: dict[str, Any]) -> list[np.ndarray]:
    return tiny_models.whole(transformer.Transformer(config), params, ROWS, max(LENGTHS))


# Scales, caps, biases and norms that were left out or put in another place (AI-Hypercomputer/maxtext#2672,
# vllm-project/vllm#5908); head widths derived from the model width (NVIDIA/TensorRT-LLM#5912).
@pytest.mark.parametrize("choice", CHOICES)
def test_equals_plain_model(choice):
    config = dataclasses.replace(BASE, **CHOICES[choice])
    params = tiny_models.random_params(config)
    expected = [plain_transformer.logits(config, params, row) for row in ROWS]
    tiny_models.assert_rows_close(_logits(config, params), expected)


KEEP_PARAMS = ["norm_eps", "query_scale", "embedding_scale", "attention_soft_cap", "final_soft_cap", "gelu_tanh"]
KEEP_PARAMS += ["window", "window and sinks", "sinks in the text", "no rope", "linear rope", "theta"]


@pytest.mark.parametrize("choice", KEEP_PARAMS)
def test_choice_changes_something(choice):
    """What the comparison above could not see, were a choice lost on both sides."""
    params = tiny_models.random_params(BASE)
    base, other = (
        plain_transformer.logits(dataclasses.replace(BASE, **CHOICES[name]), params, ROWS[0])
        for name in ("nothing", choice)
    )
    assert np.abs(base - other).max() > 1e-2


def test_sinks_inside_the_cache_are_not_sinks_in_the_text():
    """They differ from position N + W on, and the distance to a sink never reaches that sum."""
    params = tiny_models.random_params(BASE)
    cache, text = (
        plain_transformer.logits(dataclasses.replace(BASE, **CHOICES[name]), params, ROWS[0])
        for name in ("window and sinks", "sinks in the text")
    )
    np.testing.assert_allclose(cache[: 2 + 3], text[: 2 + 3], rtol=0, atol=1e-12)
    assert (np.abs(cache - text).max(axis=-1)[2 + 3 :] > 1e-3).all()


def test_activations_in_bfloat16_logits_in_float32():
    """The head's products are summed and kept in float32: rounding them to bfloat16 would make ties."""
    model = transformer.Transformer(BASE, dtype="bfloat16")
    params = tiny_models.random_params(BASE)
    logits_BTV, _ = tiny_models.apply(model, params, jnp.asarray([ROWS[0]]), None)
    assert logits_BTV.dtype == jnp.float32
    assert (np.asarray(logits_BTV) != np.asarray(logits_BTV.astype(jnp.bfloat16), np.float32)).mean() > 0.9
    expected = plain_transformer.logits(BASE, params, ROWS[0])
    # Some twenty roundings of 2 ** -9 of numbers up to about 5 on the way, most of them independent.
    assert np.sqrt(np.mean((np.asarray(logits_BTV[0]) - expected) ** 2)) < 20**0.5 * 5 * 2**-9 * 2


def test_embedding_scale_is_rounded_to_the_compute_dtype():
    # sqrt(640) is 25.298; in bfloat16 25.25, as the published Gemma computes it.
    config = dataclasses.replace(BASE, embedding_scale=640**0.5)
    embedding = transformer.Embedding(config, "bfloat16")
    params = {"params": {"weight": jnp.ones((29, 12), jnp.float32)}}
    got = embedding.apply(params, jnp.asarray([[5]], jnp.int32), method="embed")
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.full((1, 1, 12), 25.25))
