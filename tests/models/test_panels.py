"""Weights in panels: the same matrix in another order, and the same logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jdecode.models import linear, panels, parameter_shapes
from jdecode.weights import parameter_tree
from tests import tiny_model

SHAPES = [
    ("layers_0/feed_forward/gate/weight", (192, 20)),  # three panels of 64
    ("layers_0/feed_forward/up/weight", (96, 20)),  # three of 32
    ("layers_0/attention/query/weight", (4, 16, 20)),  # two out axes
    ("layers_0/attention/output/weight", (64, 3, 10)),  # two in axes
    ("embedding/weight", (128, 20)),
]


def random(shape) -> np.ndarray:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize(("path", "shape"), SHAPES)
def test_rows_come_back_as_they_went_in(path, shape):
    array = random(shape)
    packed = panels.pack(path, array.copy())
    assert packed is not None and packed.shape == shape
    assert packed.data_PIX.nbytes == array.nbytes
    np.testing.assert_array_equal(packed.rows(), array)


def test_the_order_is_the_one_that_is_written_down():
    array = random((96, 20))
    packed = panels.pack("layers_0/feed_forward/up/weight", array.copy())
    assert packed is not None and packed.data_PIX.shape == (3, 20, 32)
    for panel, row, column in ((0, 0, 0), (1, 7, 5), (2, 19, 31)):
        assert packed.data_PIX[panel, row, column] == array[32 * panel + column, row]


@pytest.mark.parametrize("num_tokens", [1, 2, 5, 70])
@pytest.mark.parametrize(("path", "shape"), SHAPES)
def test_the_product_is_that_of_the_rows(path, shape, num_tokens):
    array = random(shape)
    num_in_axes = 2 if "output" in path else 1
    x = random((num_tokens, 1, *shape[-num_in_axes:]))
    packed = panels.pack(path, array.copy())
    assert packed is not None
    got = linear.product(jnp.asarray(x), packed, num_in_axes, "float32")
    in_axes = list(range(-num_in_axes, 0))
    expected = np.tensordot(x.astype(np.float64), array.astype(np.float64), (in_axes, in_axes))
    assert got.shape == expected.shape
    np.testing.assert_allclose(got, expected, atol=2e-5)


def test_rows_of_an_embedding_are_taken_by_their_number():
    array = random((128, 20))
    packed = panels.pack("embedding/weight", array.copy())
    assert packed is not None
    idx = jnp.asarray([[0, 63, 64], [127, 65, 200]])  # past the end: the last, as jnp.take clips
    np.testing.assert_array_equal(packed.take(idx), array[np.minimum(np.asarray(idx), 127)])


@pytest.mark.parametrize(
    ("path", "shape"), [("final_norm/scale", (64,)), ("layers_0/feed_forward/up/weight", (100, 20))]
)
def test_what_fills_no_panels_stays(path, shape):
    assert panels.pack(path, random(shape)) is None


def test_an_array_that_may_not_be_written_is_not():
    array = random((96, 20))
    array.setflags(write=False)
    before = array.copy()
    packed = panels.pack("layers_0/feed_forward/up/weight", array)
    assert packed is not None
    np.testing.assert_array_equal(packed.rows(), before)
    np.testing.assert_array_equal(array, before)


def test_a_model_in_panels_is_the_model():
    lm = tiny_model.make(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        layers=tiny_model.load("llama_gqa").config.layers[:2],
        tie_embeddings=True,
        qkv_bias=True,
    )
    table = parameter_tree.flat(jax.tree.map(np.array, nn.unbox(lm.params["params"])))
    assert set(table) == set(parameter_shapes.parameter_shapes(lm.config))
    packed = {path: panels.pack(path, array.copy()) for path, array in table.items()}
    assert sum(value is not None for value in packed.values()) == 1 + 2 * 7
    tree = parameter_tree.nested({path: table[path] if packed[path] is None else packed[path] for path in table})
    tokens_BT = jnp.asarray([[5, 6, 127, 9], [1, 64, 63, 65]])
    plain, _ = lm.model.apply(lm.params, tokens_BT)
    same, _ = dataclasses.replace(lm, params={"params": tree}).model.apply({"params": tree}, tokens_BT)
    np.testing.assert_allclose(same, plain, atol=1e-5)
