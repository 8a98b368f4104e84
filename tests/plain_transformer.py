"""A decoder-only transformer in float64 and plain loops over queries: the oracle for every choice of ``ModelConfig``.

Written from the equations, one token and one head at a time, and without the package's own functions.
"""

import math
from typing import Any

import numpy as np

from jdecode import config as config_lib


def logits(config: config_lib.ModelConfig, params: dict[str, Any], tokens: list[int]) -> np.ndarray:
    """Scores one text: (T, V)."""
    stream = [_float64(params["embedding"]["weight"])[token] * config.embedding_scale for token in tokens]
    for idx, layer in enumerate(config.layers):
        own = params[f"layers_{idx}"]
        normed = [_norm(x, own["attention_norm"], config) for x in stream]
        for t, y in enumerate(_attention(normed, own["attention"], config, layer)):
            stream[t] = stream[t] + (_norm(y, own["post_attention_norm"], config) if config.post_norms else y)
        for t, x in enumerate(stream):
            y = _feed_forward(_norm(x, own["feed_forward_norm"], config), own["feed_forward"], config)
            stream[t] = x + (_norm(y, own["post_feed_forward_norm"], config) if config.post_norms else y)
    head = params["embedding"] if config.tie_embeddings else params["head"]
    scores = np.stack([_float64(head["weight"]) @ _norm(x, params["final_norm"], config) for x in stream])
    return _capped(scores, config.final_soft_cap)


def _float64(array) -> np.ndarray:
    return np.asarray(array, np.float64)


def _capped(x, cap: float | None):
    return x if cap is None else cap * np.tanh(x / cap)


def _norm(x: np.ndarray, params: dict[str, Any], config: config_lib.ModelConfig) -> np.ndarray:
    return x / math.sqrt(sum(x * x) / len(x) + config.norm_eps) * (_float64(params["scale"]) + config.norm_offset)


def _linear(x: np.ndarray, params: dict[str, Any]) -> np.ndarray:
    weight = _float64(params["weight"])
    y = np.tensordot(weight, x, axes=x.ndim)
    return y + _float64(params["bias"]) if "bias" in params else y


def _attention(normed, params, config: config_lib.ModelConfig, layer: config_lib.LayerConfig) -> list[np.ndarray]:
    group = config.num_heads // config.num_kv_heads
    scale = 1 / math.sqrt(config.head_dim) if config.query_scale is None else config.query_scale
    queries, keys, values = ([_linear(x, params[name]) for x in normed] for name in ("query", "key", "value"))
    if config.qk_norm:
        queries = [np.stack([_norm(head, params["query_norm"], config) for head in heads]) for heads in queries]
        keys = [np.stack([_norm(head, params["key_norm"], config) for head in heads]) for heads in keys]
    out = []
    for t, plain_query in enumerate(queries):
        seen = [s for s in range(t + 1) if layer.window is None or t - s < layer.window or s < layer.num_sinks]
        # What is seen, numbered one after the other: the positions inside a cache that holds nothing else.
        places = list(range(len(seen))) if layer.num_sinks and layer.sink_positions == "cache" else seen
        query = _rotate(plain_query, places[-1], layer.rope)
        seen_keys = [_rotate(keys[s], place, layer.rope) for s, place in zip(seen, places, strict=True)]
        heads = []
        for n in range(config.num_heads):
            scores = [_capped(scale * query[n] @ key[n // group], config.attention_soft_cap) for key in seen_keys]
            weights = [math.exp(score) for score in scores]
            heads.append(sum(w * values[s][n // group] for w, s in zip(weights, seen, strict=True)) / sum(weights))
        out.append(_linear(np.stack(heads), params["output"]))
    return out


def _rotate(heads: np.ndarray, position: int, rope: config_lib.RopeConfig | None) -> np.ndarray:
    """Turns by plain or linearly scaled frequencies; ``test_rotary`` has the other scaling."""
    if rope is None:
        return heads
    assert rope.scaling in ("none", "linear")
    half, turned = heads.shape[-1] // 2, heads.copy()
    for i in range(half):
        angle = position / rope.theta ** (i / half) / (rope.factor if rope.scaling == "linear" else 1)
        pair = (heads[:, i] + 1j * heads[:, i + half]) * np.exp(1j * angle)
        turned[:, i], turned[:, i + half] = pair.real, pair.imag
    return turned


def _feed_forward(x: np.ndarray, params, config: config_lib.ModelConfig) -> np.ndarray:
    gate, up = _linear(x, params["gate"]), _linear(x, params["up"])
    if config.activation == "silu":
        active = gate / (1 + np.exp(-gate))
    else:
        active = gate / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    return _linear(active * up, params["down"])
