"""Pooled heads: the hand example, equal heads pool to the same model, and which query reads which head."""

import dataclasses

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.models import parameter_shapes, transformer
from jdecode.weights import head_pooling, parameter_tree
from tests import tiny_models

# Two windows and both kinds of rope, biases, and a norm on queries and keys: whatever could see the heads.
MODEL = dataclasses.replace(tiny_models.MIXED, num_heads=12, num_kv_heads=6, qkv_bias=True, qk_norm=True)
TOKENS_BT = jnp.asarray(tiny_models.random_rows([11, 11]))


def logits(params, model):
    return np.asarray(tiny_models.apply(transformer.Transformer(model), params, TOKENS_BT, None)[0])


def with_equal_heads(params, num_groups: int):
    """Gives every group of neighbouring key/value heads the first one's parameters."""
    flat = parameter_tree.flat(params)
    for path, leaf in flat.items():
        if "/key/" in path or "/value/" in path:
            heads = np.asarray(leaf)
            size = len(heads) // num_groups
            flat[path] = jnp.asarray(np.stack([heads[head // size * size] for head in range(len(heads))]))
    return parameter_tree.nested(flat)


def test_mean_of_neighbours_by_hand():
    model = dataclasses.replace(MODEL, hidden_size=1, head_dim=2, num_kv_heads=4, num_heads=4, layers=MODEL.layers[:1])
    params = tiny_models.random_params(model)
    attention = params["layers_0"]["attention"]
    # (K, H, D) = (4, 2, 1)
    attention["key"]["weight"] = jnp.asarray([1.0, 10, 3, 30, -5, 7, 6, 8]).reshape(4, 2, 1)
    attention["value"]["bias"] = jnp.asarray([[1.0, 2], [2, 4], [0.5, 0.25], [0.5, 0.75]])
    pooled, pooled_model = head_pooling.pool_kv_heads(params, model, 2)
    assert pooled_model == dataclasses.replace(model, num_kv_heads=2)
    # heads 0 and 1, then 2 and 3: (1 + 3) / 2, (10 + 30) / 2, (-5 + 6) / 2, (7 + 8) / 2
    got = pooled["layers_0"]["attention"]
    assert got["key"]["weight"].tolist() == [[[2.0], [20.0]], [[0.5], [7.5]]]
    assert got["value"]["bias"].tolist() == [[1.5, 3.0], [0.5, 0.5]]
    assert got["query"]["weight"] is attention["query"]["weight"] and got["output"] == attention["output"]
    assert attention["key"]["weight"].shape == (4, 2, 1)  # the argument is as it was
    multi_query, _ = head_pooling.pool_kv_heads(params, model, 1)
    # (1 + 3 - 5 + 6) / 4 and (10 + 30 + 7 + 8) / 4
    assert multi_query["layers_0"]["attention"]["key"]["weight"].tolist() == [[[1.25], [13.75]]]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3])
def test_equal_heads_pool_to_the_same_model(num_kv_heads):
    params = with_equal_heads(tiny_models.random_params(MODEL), num_kv_heads)
    pooled, model = head_pooling.pool_kv_heads(params, MODEL, num_kv_heads)
    shapes = {path: leaf.shape for path, leaf in parameter_tree.flat(pooled).items()}
    assert shapes == parameter_shapes.parameter_shapes(model)
    # The means are exact, groups of three and six included: only the order of the sums in products may differ.
    for path, leaf in parameter_tree.flat(pooled).items():
        assert np.isin(np.asarray(leaf), np.asarray(parameter_tree.flat(params)[path])).all(), path
    np.testing.assert_allclose(logits(pooled, model), logits(params, MODEL), rtol=0, atol=tiny_models.LOGITS_ATOL)
    # and with unequal heads they would not be the same
    other = tiny_models.random_params(MODEL)
    assert (
        np.abs(logits(head_pooling.pool_kv_heads(other, MODEL, num_kv_heads)[0], model) - logits(other, MODEL)).max()
        > 0.1
    )


def test_query_head_reads_the_pooled_head_of_its_group():
    """The same as a multi-head model, whose every query head has a head of its own: the mean that it should read."""
    params = tiny_models.random_params(MODEL)
    pooled, model = head_pooling.pool_kv_heads(params, MODEL, 2)
    flat = parameter_tree.flat(params)
    for path, leaf in flat.items():
        if "/key/" in path or "/value/" in path:
            heads = np.asarray(leaf, np.float64)
            # Query heads 0..5 read old heads 0..2, and 6..11 read 3..5.
            flat[path] = jnp.asarray(np.stack([heads[:3].mean(0)] * 6 + [heads[3:].mean(0)] * 6), jnp.float32)
    wide = dataclasses.replace(MODEL, num_kv_heads=12)
    expected = logits(parameter_tree.nested(flat), wide)
    np.testing.assert_allclose(logits(pooled, model), expected, rtol=0, atol=tiny_models.LOGITS_ATOL)


def test_as_many_heads_is_the_same_bit_for_bit():
    params = tiny_models.random_params(MODEL)
    pooled, model = head_pooling.pool_kv_heads(params, MODEL, 6)
    assert model == MODEL
    same = jax.tree.map(
        lambda a, b: a.dtype == b.dtype and np.asarray(a).tobytes() == np.asarray(b).tobytes(), params, pooled
    )
    assert all(jax.tree.leaves(same))


def test_bfloat16_is_rounded_once():
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), tiny_models.random_params(MODEL))
    pooled, _ = head_pooling.pool_kv_heads(params, MODEL, 1)
    got = pooled["layers_1"]["attention"]["value"]["weight"]
    exact = np.asarray(params["layers_1"]["attention"]["value"]["weight"], np.float64).mean(0, keepdims=True)
    assert got.dtype == jnp.bfloat16
    assert np.array_equal(np.asarray(got), exact.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize("num_kv_heads", [4, 5, 12, 0, -1, True, 2.0])
def test_other_counts_are_refused(num_kv_heads):
    with pytest.raises(ValueError) as caught:
        head_pooling.pool_kv_heads(tiny_models.random_params(MODEL), MODEL, num_kv_heads)
    assert str(caught.value) == (
        f"num_kv_heads: expected a divisor of the model's 6 key/value heads (1, 2, 3, 6), got {num_kv_heads!r}"
    )


def test_config_of_a_model_is_the_same_but_for_the_heads():
    assert head_pooling.pooled_config(MODEL, 3) == config_lib.ModelConfig(
        **{
            field.name: getattr(MODEL, field.name)
            for field in dataclasses.fields(MODEL)
            if field.name != "num_kv_heads"
        },
        num_kv_heads=3,
    )
