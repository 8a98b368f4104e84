"""The Gemma 3 family, text only (Gemma Team 2025): five sliding layers to one global, four norms a layer."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdecode import config
from jdecode.models.families import family, gguf_fields, layer_types, llama, rope_fields, strict_fields

# Published defaults of the family, for files that leave a key out (its 4B and larger models leave out many).
_DEFAULT_VOCAB_SIZE = 262_208
_DEFAULT_HIDDEN_SIZE = 2304
_DEFAULT_INTERMEDIATE_SIZE = 9216
_DEFAULT_NUM_LAYERS = 26
_DEFAULT_NUM_HEADS = 8
_DEFAULT_NUM_KV_HEADS = 4
_DEFAULT_HEAD_DIM = 256
_DEFAULT_MAX_POSITIONS = 131_072
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_QUERY_SCALAR = 256.0
_DEFAULT_WINDOW = 4096  # when the key is absent; null is "no window"
_DEFAULT_PATTERN = 6  # five sliding layers, then a global one
_DEFAULT_GLOBAL_THETA = 1_000_000.0
_DEFAULT_LOCAL_THETA = 10_000.0

# GGUF files do not hold the query scale. It is the head width to the power -1/2, but for the 27B model, the only
# one of 62 layers, where it is the model width divided by the heads.
_NUM_LAYERS_27B = 62


def config_from_hugging_face(values: Mapping[str, Any]) -> config.ModelConfig:
    """Reads the ``config.json`` of a Gemma 3 text model.

    Args:
      values: the file as a mapping, in the spelling of any version; ``gemma3_text``, or ``gemma3`` whose text model
        is an object of its own and that has no vision part.

    Returns:
      The configuration.

    Raises:
      ValueError: for a key that is missing, malformed, unknown, or asks for what is not computed.
    """
    if values.get("model_type") == "gemma3":
        values = _text_part(values)
    fields = strict_fields.StrictFields(values, "config.json")
    num_layers = fields.take_count("num_hidden_layers", _DEFAULT_NUM_LAYERS, largest=strict_fields.MAX_LAYERS)
    hidden_size = fields.take_count("hidden_size", _DEFAULT_HIDDEN_SIZE)
    ropes = rope_fields.by_layer_type(
        fields, default_global_theta=_DEFAULT_GLOBAL_THETA, default_local_theta=_DEFAULT_LOCAL_THETA
    )
    kinds = layer_types.given(fields, num_layers) or layer_types.from_pattern(_DEFAULT_PATTERN, num_layers)
    # "sliding_window": null says that there is none; only an absent key gets the published default.
    window = fields.take_count("sliding_window", None if fields.has("sliding_window") else _DEFAULT_WINDOW)
    has_bias = fields.take_bool("attention_bias", False)
    fields.expect("use_bidirectional_attention", False, why="attention is causal")
    model = config.ModelConfig(
        vocab_size=fields.take_count("vocab_size", _DEFAULT_VOCAB_SIZE),
        hidden_size=hidden_size,
        intermediate_size=fields.take_count("intermediate_size", _DEFAULT_INTERMEDIATE_SIZE),
        num_heads=fields.take_count("num_attention_heads", _DEFAULT_NUM_HEADS),
        num_kv_heads=fields.take_count("num_key_value_heads", _DEFAULT_NUM_KV_HEADS),
        head_dim=fields.take_count("head_dim", _DEFAULT_HEAD_DIM),
        layers=_layers(kinds, window, ropes),
        activation=fields.take_choice(
            "hidden_activation", {"gelu_pytorch_tanh": "gelu_tanh", "silu": "silu"}, "gelu_pytorch_tanh"
        ),
        norm_eps=fields.take_number("rms_norm_eps", _DEFAULT_NORM_EPS),
        query_scale=fields.take_number("query_pre_attn_scalar", _DEFAULT_QUERY_SCALAR) ** -0.5,
        tie_embeddings=fields.take_bool("tie_word_embeddings", True),
        qkv_bias=has_bias,
        output_bias=has_bias,
        attention_soft_cap=fields.take_number("attn_logit_softcapping", None),
        final_soft_cap=fields.take_number("final_logit_softcapping", None),
        max_positions=fields.take_count("max_position_embeddings", _DEFAULT_MAX_POSITIONS),
        **_always(hidden_size),
    )
    fields.ignore(family.IRRELEVANT_KEYS)
    fields.finish()
    return model


def config_to_hugging_face(model: config.ModelConfig) -> dict[str, Any]:
    """Writes the ``config.json`` mapping of a model of this family, in keys that old and new readers know."""
    windows = [layer.window for layer in model.layers]
    sliding = next((layer for layer in model.layers if layer.window is not None), None)
    full = next((layer for layer in model.layers if layer.window is None), None)
    global_rope = (full and full.rope) or config.RopeConfig(theta=_DEFAULT_GLOBAL_THETA)
    local_rope = (sliding and sliding.rope) or config.RopeConfig(theta=_DEFAULT_LOCAL_THETA)
    scalar = model.attention_scale**-2
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_activation": {"gelu_tanh": "gelu_pytorch_tanh"}.get(model.activation, model.activation),
        "rms_norm_eps": model.norm_eps,
        "rope_theta": global_rope.theta,
        "rope_local_base_freq": local_rope.theta,
        "rope_scaling": rope_fields.scaling_to_hugging_face(global_rope),
        "layer_types": layer_types.from_windows(windows),
        "sliding_window": sliding.window if sliding else None,
        # The file holds a whole number in every published model; the root and its square cost the last digit.
        "query_pre_attn_scalar": round(scalar) if math.isclose(scalar, round(scalar), rel_tol=1e-12) else scalar,
        "attention_bias": model.qkv_bias,
        "attn_logit_softcapping": model.attention_soft_cap,
        "final_logit_softcapping": model.final_soft_cap,
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": model.max_positions,
        "use_bidirectional_attention": False,
    }


def config_from_gguf(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: family.TensorReader
) -> config.ModelConfig:
    """Reads the fields of a GGUF file of architecture ``gemma3``.

    Args:
      values: all fields of the file.
      shapes: tensor name to shape; tells whether the head is tied.
      read: not needed by this family.

    Returns:
      The configuration.

    Raises:
      ValueError: for a field under the architecture's name that is missing, malformed or unknown.
    """
    del read
    fields = gguf_fields.architecture_fields(values)
    sizes = gguf_fields.sizes(fields, shapes)
    num_layers = sizes.pop("num_layers")
    ropes = {
        # Scaling is for global layers only.
        layer_types.FULL: gguf_fields.rope(fields, fields.take_number("rope.freq_base", _DEFAULT_GLOBAL_THETA)),
        layer_types.SLIDING: config.RopeConfig(theta=fields.take_number("rope.freq_base_swa", _DEFAULT_LOCAL_THETA)),
    }
    width = sizes["hidden_size"] / sizes["num_heads"] if num_layers == _NUM_LAYERS_27B else sizes["head_dim"]
    model = config.ModelConfig(
        **sizes,
        layers=_layers(_gguf_layer_types(fields, num_layers), fields.take_count("attention.sliding_window"), ropes),
        activation="gelu_tanh",
        norm_eps=fields.take_number("attention.layer_norm_rms_epsilon"),
        query_scale=width**-0.5,
        tie_embeddings="output.weight" not in shapes,
        attention_soft_cap=fields.take_number("attn_logit_softcapping", None),
        final_soft_cap=fields.take_number("final_logit_softcapping", None),
        **_always(sizes["hidden_size"]),
    )
    fields.finish()
    return model


def _always(hidden_size: int) -> dict[str, Any]:
    """The choices that no file of the family states."""
    return {
        "norm_offset": 1.0,
        "embedding_scale": math.sqrt(hidden_size),
        "qk_norm": True,
        "post_norms": True,
        "family": "gemma3",
    }


def _layers(
    kinds: list[str], window: int | None, ropes: Mapping[str, config.RopeConfig]
) -> tuple[config.LayerConfig, ...]:
    return tuple(
        config.LayerConfig(window=window if kind == layer_types.SLIDING else None, rope=ropes[kind]) for kind in kinds
    )


def _gguf_layer_types(fields: strict_fields.StrictFields, num_layers: int) -> list[str]:
    """Reads the pattern: a number, one truth value a layer (true: sliding), or absent for the published six."""
    name = "attention.sliding_window_pattern"
    pattern = fields.take(name, _DEFAULT_PATTERN)
    if isinstance(pattern, np.ndarray | list):
        if len(pattern) != num_layers:
            raise ValueError(f"{fields.where}: {name}: expected {num_layers} truth values, got {len(pattern)}")
        return [layer_types.SLIDING if is_sliding else layer_types.FULL for is_sliding in pattern]
    return layer_types.from_pattern(fields.take_count(name, _DEFAULT_PATTERN), num_layers)


def _text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Takes the text model out of a multimodal configuration, unless there is a vision model to go with it."""
    outer = strict_fields.StrictFields(values, "config.json")
    outer.expect("vision_config", why="only text models are supported; use a text-only checkpoint of the model")
    text = outer.take("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config: expected an object, got {text!r}"[:200])
    tie = outer.take("tie_word_embeddings", None)
    outer.ignore(family.IRRELEVANT_KEYS)
    # Numbers and places of image tokens: without a vision model nothing reads them.
    outer.ignore(("boi_token_index", "eoi_token_index", "image_token_index", "mm_tokens_per_image"))
    outer.finish(("text_config",))
    return text if tie is None or "tie_word_embeddings" in text else {**text, "tie_word_embeddings": tie}


_NORMS_HUGGING_FACE = {
    "layers_{i}/attention/query_norm/scale": "model.layers.{i}.self_attn.q_norm.weight",
    "layers_{i}/attention/key_norm/scale": "model.layers.{i}.self_attn.k_norm.weight",
    # The name that Llama files give to the norm before the feed-forward is the norm after attention here.
    "layers_{i}/post_attention_norm/scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers_{i}/feed_forward_norm/scale": "model.layers.{i}.pre_feedforward_layernorm.weight",
    "layers_{i}/post_feed_forward_norm/scale": "model.layers.{i}.post_feedforward_layernorm.weight",
}
_NORMS_GGUF = {
    "layers_{i}/attention/query_norm/scale": "blk.{i}.attn_q_norm.weight",
    "layers_{i}/attention/key_norm/scale": "blk.{i}.attn_k_norm.weight",
    "layers_{i}/post_attention_norm/scale": "blk.{i}.post_attention_norm.weight",
    "layers_{i}/post_feed_forward_norm/scale": "blk.{i}.post_ffw_norm.weight",
}

GEMMA3 = family.Family(
    name="gemma3",
    model_types=("gemma3_text", "gemma3"),
    gguf_architectures=("gemma3",),
    config_from_hugging_face=config_from_hugging_face,
    config_to_hugging_face=config_to_hugging_face,
    config_from_gguf=config_from_gguf,
    hugging_face_table={**llama.LLAMA.hugging_face_table, **_NORMS_HUGGING_FACE},
    gguf_table={**llama.LLAMA.gguf_table, **_NORMS_GGUF},
    gguf_norm_offset=1.0,
)
