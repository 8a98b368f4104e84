"""The Llama family: Llama, Mistral and Ministral, which differ only in which layers have a window."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jdecode import config
from jdecode.models.families import family, gguf_fields, layer_types, rope_fields, strict_fields

# Published defaults of the three model types, for files that leave a key out.
_DEFAULT_THETA = 10_000.0
_DEFAULT_NORM_EPS = 1e-6
_DEFAULT_MAX_POSITIONS = {"llama": 2048, "mistral": 131_072, "ministral": 131_072}
_DEFAULT_NUM_KV_HEADS = {"mistral": 8, "ministral": 8}  # llama: as many as query heads
_DEFAULT_WINDOW = {"mistral": 4096, "ministral": 4096}  # when the key is absent; null is "no window"

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}
_ACTIVATION_NAMES = {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}

# The edges of the blended band and the trained length in every published Llama 3 model. GGUF files hold only
# their result, one divisor a frequency; it is recomputed from these and compared.
_LLAMA3_BAND = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_positions": 8192}
_ROPE_FACTORS = "rope_freqs.weight"


def config_from_hugging_face(values: Mapping[str, Any]) -> config.ModelConfig:
    """Reads the ``config.json`` of a Llama, Mistral or Ministral model.

    Args:
      values: the file as a mapping, in the spelling of any version.

    Returns:
      The configuration.

    Raises:
      ValueError: for a key that is missing, malformed, unknown, or asks for what is not computed.
    """
    fields = strict_fields.StrictFields(values, "config.json")
    model_type = fields.take("model_type")
    hidden_size = fields.take_count("hidden_size")
    num_heads = fields.take_count("num_attention_heads")
    # Null is "as many as query heads" in every type; absent is the type's own default.
    absent = num_heads if fields.has("num_key_value_heads") else _DEFAULT_NUM_KV_HEADS.get(model_type, num_heads)
    num_kv_heads = fields.take_count("num_key_value_heads", absent)
    head_dim = fields.take_count("head_dim", None)
    num_layers = fields.take_count("num_hidden_layers", largest=strict_fields.MAX_LAYERS)
    rope = rope_fields.flat(fields, default_theta=_DEFAULT_THETA)
    windows = _windows(fields, model_type, num_layers)
    has_bias = fields.take_bool("attention_bias", False)
    has_feed_forward_bias = fields.take_bool("mlp_bias", False)
    if model_type != "llama" and (has_bias or has_feed_forward_bias):
        raise ValueError(f"config.json: expected no biases in a {model_type} model, got attention_bias or mlp_bias")
    fields.expect("pretraining_tp", 1, why="sliced matrix products are not computed")
    fields.expect("rope_interleaved", False, why="rope pairs are halves of the head")
    model = config.ModelConfig(
        vocab_size=fields.take_count("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.take_count("intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=_derived_head_dim(hidden_size, num_heads) if head_dim is None else head_dim,
        layers=tuple(config.LayerConfig(window=window, rope=rope) for window in windows),
        activation=fields.take_choice("hidden_act", _ACTIVATIONS, "silu"),
        norm_eps=fields.take_number("rms_norm_eps", _DEFAULT_NORM_EPS),
        tie_embeddings=fields.take_bool("tie_word_embeddings", False),
        qkv_bias=has_bias,
        output_bias=has_bias,
        feed_forward_bias=has_feed_forward_bias,
        max_positions=fields.take_count("max_position_embeddings", _DEFAULT_MAX_POSITIONS.get(model_type, 2048)),
        family="llama",
    )
    fields.ignore(family.IRRELEVANT_KEYS)
    fields.finish()
    return model


def config_to_hugging_face(model: config.ModelConfig) -> dict[str, Any]:
    """Writes the ``config.json`` mapping of a model of this family, in keys that old and new readers know."""
    windows = [layer.window for layer in model.layers]
    rope = model.layers[0].rope or config.RopeConfig()
    kinds = {window is None for window in windows}
    # Only Ministral readers look at layer types; a Llama reader would drop the windows without a word.
    model_type = "ministral" if len(kinds) > 1 else ("llama" if kinds == {True} else "mistral")
    values: dict[str, Any] = {
        "model_type": model_type,
        "architectures": [f"{model_type.capitalize()}ForCausalLM"],
        "vocab_size": model.vocab_size,
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "hidden_act": _ACTIVATION_NAMES[model.activation],
        "rms_norm_eps": model.norm_eps,
        "rope_theta": rope.theta,
        "rope_scaling": rope_fields.scaling_to_hugging_face(rope),
        "tie_word_embeddings": model.tie_embeddings,
        "max_position_embeddings": model.max_positions,
    }
    if model_type == "llama":
        values |= {"attention_bias": model.qkv_bias, "mlp_bias": model.feed_forward_bias}
    else:
        values["sliding_window"] = next(window for window in windows if window is not None)
    if model_type == "ministral":
        values["layer_types"] = layer_types.from_windows(windows)
    return values


def config_from_gguf(
    values: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], read: family.TensorReader
) -> config.ModelConfig:
    """Reads the fields of a GGUF file of architecture ``llama``.

    Args:
      values: all fields of the file.
      shapes: tensor name to shape; tells which biases there are and whether the head is tied.
      read: returns one tensor as a numpy array; called only for the rope divisors of Llama 3.

    Returns:
      The configuration.

    Raises:
      ValueError: for a field under the architecture's name that is missing, malformed or unknown.
    """
    fields = gguf_fields.architecture_fields(values)
    sizes = gguf_fields.sizes(fields, shapes)
    theta = fields.take_number("rope.freq_base", _DEFAULT_THETA)
    rope = gguf_fields.rope(fields, theta)
    if _ROPE_FACTORS in shapes:
        rope = _llama3_rope(rope, sizes["head_dim"], read)
    window = fields.take_count("attention.sliding_window", None)
    num_layers = sizes.pop("num_layers")
    model = config.ModelConfig(
        **sizes,
        layers=(config.LayerConfig(window=window, rope=rope),) * num_layers,
        norm_eps=fields.take_number("attention.layer_norm_rms_epsilon"),
        tie_embeddings="output.weight" not in shapes,
        qkv_bias=any(name.endswith("attn_q.bias") for name in shapes),
        output_bias=any(name.endswith("attn_output.bias") for name in shapes),
        feed_forward_bias=any(name.endswith("ffn_gate.bias") for name in shapes),
        family="llama",
    )
    for name in ("expert_count", "expert_used_count"):
        fields.expect(name, 0, why="mixtures of experts are not part of this family")
    fields.finish()
    return model


def _windows(fields: strict_fields.StrictFields, model_type: str, num_layers: int) -> list[int | None]:
    """Reads the window of each layer."""
    kinds = layer_types.given(fields, num_layers)
    # "sliding_window": null says that there is none, so only an absent key gets the published default.
    absent = None if fields.has("sliding_window") else _DEFAULT_WINDOW.get(model_type)
    window = fields.take_count("sliding_window", absent)
    if kinds is None:
        if model_type == "llama" and window is not None:
            raise ValueError(
                f"config.json: expected layer_types beside sliding_window {window}: a llama model has no window by "
                f"itself; add layer_types, or set sliding_window to null"
            )
        return [window] * num_layers
    return layer_types.windows(kinds, window, fields.where)


def _derived_head_dim(hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise ValueError(
            f"config.json: expected hidden_size to be a multiple of num_attention_heads {num_heads} when head_dim is "
            f"not given, got {hidden_size}"
        )
    return hidden_size // num_heads


def llama3_divisors(rope: config.RopeConfig, head_dim: int) -> np.ndarray:
    """Computes what Llama 3 scaling divides each rope frequency by (Llama 3.1 model card).

    Args:
      rope: settings with scaling ``llama3``.
      head_dim: H.

    Returns:
      float64 array of H/2 divisors, from the highest frequency to the lowest.
    """
    wavelengths = 2 * np.pi * rope.theta ** (np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    low, high = rope.low_freq_factor, rope.high_freq_factor
    smooth = np.clip((rope.original_max_positions / wavelengths - low) / (high - low), 0.0, 1.0)
    return 1.0 / ((1.0 - smooth) / rope.factor + smooth)


def _llama3_rope(rope: config.RopeConfig, head_dim: int, read: family.TensorReader) -> config.RopeConfig:
    """Finds the Llama 3 scaling whose divisors the file holds."""
    divisors = np.asarray(read(_ROPE_FACTORS), np.float64)
    factor = float(divisors.max()) if divisors.size else 0.0
    if divisors.shape == (head_dim // 2,) and np.isfinite(divisors).all() and factor > 0:
        if np.array_equal(divisors, np.ones_like(divisors)):
            return rope
        scaled = dataclasses.replace(rope, scaling="llama3", factor=factor, **_LLAMA3_BAND)
        # float32 rounding of the divisors, and of the wavelengths they were computed from
        if rope.scaling == "none" and np.allclose(divisors, llama3_divisors(scaled, head_dim), rtol=1e-4):
            return scaled
    raise ValueError(
        f"GGUF tensor {_ROPE_FACTORS}: expected the {head_dim // 2} divisors of Llama 3 scaling (band 1 to 4, trained "
        f"length 8192), got others; load the model from its safetensors folder"
    )


_TABLE_HUGGING_FACE = {
    "embedding/weight": "model.embed_tokens.weight",
    "layers_{i}/attention_norm/scale": "model.layers.{i}.input_layernorm.weight",
    "layers_{i}/attention/query/weight": "model.layers.{i}.self_attn.q_proj.weight",
    "layers_{i}/attention/query/bias": "model.layers.{i}.self_attn.q_proj.bias",
    "layers_{i}/attention/key/weight": "model.layers.{i}.self_attn.k_proj.weight",
    "layers_{i}/attention/key/bias": "model.layers.{i}.self_attn.k_proj.bias",
    "layers_{i}/attention/value/weight": "model.layers.{i}.self_attn.v_proj.weight",
    "layers_{i}/attention/value/bias": "model.layers.{i}.self_attn.v_proj.bias",
    "layers_{i}/attention/output/weight": "model.layers.{i}.self_attn.o_proj.weight",
    "layers_{i}/attention/output/bias": "model.layers.{i}.self_attn.o_proj.bias",
    "layers_{i}/feed_forward_norm/scale": "model.layers.{i}.post_attention_layernorm.weight",
    "layers_{i}/feed_forward/gate/weight": "model.layers.{i}.mlp.gate_proj.weight",
    "layers_{i}/feed_forward/gate/bias": "model.layers.{i}.mlp.gate_proj.bias",
    "layers_{i}/feed_forward/up/weight": "model.layers.{i}.mlp.up_proj.weight",
    "layers_{i}/feed_forward/up/bias": "model.layers.{i}.mlp.up_proj.bias",
    "layers_{i}/feed_forward/down/weight": "model.layers.{i}.mlp.down_proj.weight",
    "layers_{i}/feed_forward/down/bias": "model.layers.{i}.mlp.down_proj.bias",
    "final_norm/scale": "model.norm.weight",
    "head/weight": "lm_head.weight",
}
_TABLE_GGUF = {
    "embedding/weight": "token_embd.weight",
    "layers_{i}/attention_norm/scale": "blk.{i}.attn_norm.weight",
    "layers_{i}/attention/query/weight": "blk.{i}.attn_q.weight",
    "layers_{i}/attention/query/bias": "blk.{i}.attn_q.bias",
    "layers_{i}/attention/key/weight": "blk.{i}.attn_k.weight",
    "layers_{i}/attention/key/bias": "blk.{i}.attn_k.bias",
    "layers_{i}/attention/value/weight": "blk.{i}.attn_v.weight",
    "layers_{i}/attention/value/bias": "blk.{i}.attn_v.bias",
    "layers_{i}/attention/output/weight": "blk.{i}.attn_output.weight",
    "layers_{i}/attention/output/bias": "blk.{i}.attn_output.bias",
    "layers_{i}/feed_forward_norm/scale": "blk.{i}.ffn_norm.weight",
    "layers_{i}/feed_forward/gate/weight": "blk.{i}.ffn_gate.weight",
    "layers_{i}/feed_forward/gate/bias": "blk.{i}.ffn_gate.bias",
    "layers_{i}/feed_forward/up/weight": "blk.{i}.ffn_up.weight",
    "layers_{i}/feed_forward/up/bias": "blk.{i}.ffn_up.bias",
    "layers_{i}/feed_forward/down/weight": "blk.{i}.ffn_down.weight",
    "layers_{i}/feed_forward/down/bias": "blk.{i}.ffn_down.bias",
    "final_norm/scale": "output_norm.weight",
    "head/weight": "output.weight",
}

LLAMA = family.Family(
    name="llama",
    model_types=("llama", "mistral", "ministral"),
    gguf_architectures=("llama",),
    config_from_hugging_face=config_from_hugging_face,
    config_to_hugging_face=config_to_hugging_face,
    config_from_gguf=config_from_gguf,
    hugging_face_table=_TABLE_HUGGING_FACE,
    gguf_table=_TABLE_GGUF,
    gguf_rope_permuted=True,
    gguf_config_tensors=(_ROPE_FACTORS,),
)
