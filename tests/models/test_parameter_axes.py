"""Modules, axes and the table of shapes name the same parameters."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn

from jdecode import config as config_lib
from jdecode.models import families, feed_forward, parameter_axes, parameter_shapes, transformer
from jdecode.parallel import rules
from tests import tiny_models

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
EVERYTHING = dataclasses.replace(
    tiny_models.MIXED, qkv_bias=True, output_bias=True, feed_forward_bias=True, qk_norm=True, post_norms=True
)


def _config(name: str) -> config_lib.ModelConfig:
    if name == "everything":
        return EVERYTHING
    fields = json.loads((TINY / name / "config.json").read_text())
    return families.find(fields["model_type"]).config_from_hugging_face(fields)


NAMES = ["everything", *sorted(path.name for path in TINY.iterdir() if path.is_dir())]


@pytest.mark.parametrize("name", NAMES)
def test_axes_and_fresh_parameters_have_the_shapes_of_the_table(name):
    config = _config(name)
    shapes = parameter_shapes.parameter_shapes(config)
    axes = parameter_axes.parameter_axes(config)
    assert {path: len(names) for path, names in axes.items()} == {path: len(shape) for path, shape in shapes.items()}
    assert {axis for names in axes.values() for axis in names} <= set(rules.RULES)
    fresh = jax.eval_shape(transformer.Transformer(config).init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    assert set(fresh) == {"params"}  # no other collection: the cache is no variable
    leaves: list[tuple[Any, Any]] = jax.tree_util.tree_leaves_with_path(nn.unbox(fresh["params"]))
    assert {"/".join(entry.key for entry in path): leaf.shape for path, leaf in leaves} == shapes
    assert {leaf.dtype for _, leaf in leaves} == {jnp.dtype("float32")}


def test_axes_by_hand():
    axes = parameter_axes.parameter_axes(EVERYTHING)
    assert axes["embedding/weight"] == axes["head/weight"] == ("vocab", "embed")
    assert axes["layers_1/attention/query/weight"] == ("heads", "head_dim", "embed")
    assert axes["layers_1/attention/query/bias"] == ("heads", "head_dim")
    for side in ("key", "value"):
        assert axes[f"layers_1/attention/{side}/weight"] == ("kv_heads", "head_dim", "embed")
    assert axes["layers_1/attention/output/weight"] == ("embed", "heads", "head_dim")
    assert axes["layers_1/attention/output/bias"] == ("embed",)
    assert axes["layers_1/attention/key_norm/scale"] == ("head_dim",)
    for side in ("gate", "up"):
        assert axes[f"layers_1/feed_forward/{side}/weight"] == ("mlp", "embed")
        assert axes[f"layers_1/feed_forward/{side}/bias"] == ("mlp",)
    assert axes["layers_1/feed_forward/down/weight"] == ("embed", "mlp")
    assert axes["layers_1/feed_forward/down/bias"] == ("embed",)
    assert axes["final_norm/scale"] == ("embed",)


def test_fresh_weights_are_apart_and_small():
    """Training starts from ``init``: no two weights alike, biases at zero (``test_norms`` has the scales)."""
    module = feed_forward.FeedForward(dataclasses.replace(EVERYTHING, intermediate_size=60), "float32")
    params = nn.unbox(jax.jit(module.init)(jax.random.key(1), jnp.zeros((1, 1, 12))))["params"]
    assert (params["gate"]["bias"] == 0).all()
    assert not (params["gate"]["weight"] == params["up"]["weight"]).any()
    # 720 draws: the deviation of their deviation is 0.02 / sqrt(1440), so 0.2 is more than seven times that.
    assert jnp.std(params["gate"]["weight"]) == pytest.approx(0.02, rel=0.2)
