"""The parameter tree as a table: every path of a model with its shape, from the configuration alone.

This table, the modules and the loaders must agree; it is the one place to look a parameter up. Every weight lies
(out, in), as checkpoint files hold it, so loading transposes nothing.
"""

import math

from jdecode import config


def parameter_shapes(model: config.ModelConfig) -> dict[str, tuple[int, ...]]:
    """Lists the parameters of a model.

    Args:
      model: the configuration. D, F, V, N, K, H below are its sizes.

    Returns:
      Path (parts joined by ``/``) to shape, in the order of the forward pass.
    """
    shapes: dict[str, tuple[int, ...]] = {"embedding/weight": (model.vocab_size, model.hidden_size)}
    for layer in range(model.num_layers):
        for path, shape in _layer_shapes(model).items():
            shapes[f"layers_{layer}/{path}"] = shape
    shapes["final_norm/scale"] = (model.hidden_size,)
    if not model.tie_embeddings:
        shapes["head/weight"] = (model.vocab_size, model.hidden_size)
    return shapes


def file_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Gives the shape under which checkpoint files hold a parameter: heads and head width are one axis there.

    Args:
      path: a path of ``parameter_shapes``.
      shape: its shape.

    Returns:
      A shape of rank one or two, with the same elements in the same order.
    """
    if path.endswith("attention/output/weight"):
        return (shape[0], math.prod(shape[1:]))
    for name in ("query", "key", "value"):
        if path.endswith((f"attention/{name}/weight", f"attention/{name}/bias")):
            return (shape[0] * shape[1], *shape[2:])
    return shape


def _layer_shapes(model: config.ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F, N, K, H = model.hidden_size, model.intermediate_size, model.num_heads, model.num_kv_heads, model.head_dim
    shapes: dict[str, tuple[int, ...]] = {"attention_norm/scale": (D,)}
    for name, heads in (("query", N), ("key", K), ("value", K)):
        shapes[f"attention/{name}/weight"] = (heads, H, D)
        if model.qkv_bias:
            shapes[f"attention/{name}/bias"] = (heads, H)
    if model.qk_norm:
        shapes["attention/query_norm/scale"] = (H,)
        shapes["attention/key_norm/scale"] = (H,)
    shapes["attention/output/weight"] = (D, N, H)
    if model.output_bias:
        shapes["attention/output/bias"] = (D,)
    if model.post_norms:
        shapes["post_attention_norm/scale"] = (D,)
    shapes["feed_forward_norm/scale"] = (D,)
    for name, rows, columns in (("gate", F, D), ("up", F, D), ("down", D, F)):
        shapes[f"feed_forward/{name}/weight"] = (rows, columns)
        if model.feed_forward_bias:
            shapes[f"feed_forward/{name}/bias"] = (rows,)
    if model.post_norms:
        shapes["post_feed_forward_norm/scale"] = (D,)
    return shapes
