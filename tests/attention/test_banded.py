"""What only the banded backend promises: any band, gradients, no T x T array, and no cache."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jdecode.attention import banded, reference, segment, visibility
from jdecode.models import transformer
from tests import plain_attention, tiny_models

B, N, K, H = 3, 4, 2, 6
EMPTY = int(visibility.EMPTY)
OPTION_NAMES = ("scale", "window", "num_sinks", "soft_cap")
attend = jax.jit(banded.attend, static_argnames=(*OPTION_NAMES, "band_len"))

ATOL = 6e-6
"""See FLOAT32_ATOL of the contract: values here are twice as great."""

GRADIENT_ATOL = 6e-5
"""Sums of up to 40 terms of about 5, each good to some 3e-7."""


def _inputs(T: int):
    rng = np.random.default_rng(6)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, H), (B, T, N, H))
    return tuple((2 * rng.normal(size=shape)).astype(np.float32) for shape in shapes)


def _positions(T: int) -> tuple[np.ndarray, np.ndarray]:
    """A whole row, one of half the tokens and one of padding alone; and the queries' positions, which count on."""
    query = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))
    length = np.asarray([[T], [max(T // 2, 1)], [0]])
    return np.where(query < length, query, EMPTY).astype(np.int32), query


def _block(k, v, position) -> tuple[segment.Segment, ...]:
    return (segment.whole_segment(jnp.asarray(k), jnp.asarray(v), jnp.asarray(position), is_block=True),)


# One band, not full, full, and one token over; and, with the default band, one, or several shortened by the window.
SIZES = [(3, 4), (4, 4), (5, 4), (40, banded.BAND_LEN)]
OPTIONS = [
    {},
    {"window": 1},
    {"window": 4},
    {"window": 5, "soft_cap": 5.0},
    {"window": 17},  # over the least band of a window
    {"window": 4, "num_sinks": 2, "soft_cap": 5.0},
    {"num_sinks": 2},
]


@pytest.mark.parametrize(("T", "band_len"), SIZES)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_any_band_gives_plain_attention(T, band_len, options):
    q, k, v, _ = _inputs(T)
    position, query = _positions(T)
    got = attend(q, jnp.asarray(query), _block(k, v, position), scale=0.4, band_len=band_len, **options)
    expected = plain_attention.attend(q, k, v, query, position, scale=0.4, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=ATOL)


@functools.partial(jax.jit, static_argnames=("backend", *OPTION_NAMES, "band_len"))
def _gradients(backend, q, k, v, g, query, position, **options):
    def loss(q, k, v):
        return jnp.sum(g * backend(q, query, _block(k, v, position), scale=0.4, **options))

    return jax.grad(loss, argnums=(0, 1, 2))(q, k, v)


@pytest.mark.parametrize(("T", "band_len"), [(5, 4), (40, banded.BAND_LEN)])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_gradients_by_hand(T, band_len, options):
    """Of rows with padding, and of one that sees nothing at all."""
    q, k, v, g = _inputs(T)
    position, query = _positions(T)
    padding = position == EMPTY
    k[padding] = v[padding] = 1e4  # finite, as whatever a model computes of padding
    got = _gradients(banded.attend, q, k, v, g, query, position, band_len=band_len, **options)
    expected = plain_attention.gradients(q, k, v, g, query, position, scale=0.4, **options)
    for name, one, other in zip("qkv", got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=GRADIENT_ATOL, err_msg=name)
    np.testing.assert_array_equal(np.asarray(got[1])[padding], np.zeros_like(k[padding]))
    np.testing.assert_array_equal(np.asarray(got[2])[padding], np.zeros_like(v[padding]))
    assert not np.asarray(got[0])[2].any()  # the row of padding alone


@pytest.mark.parametrize("options", [{}, {"window": 4, "num_sinks": 2, "soft_cap": 5.0}], ids=str)
def test_gradients_equal_those_of_the_reference(options):
    T = 13
    q, k, v, g = _inputs(T)
    position, query = _positions(T)
    position = position[:1].repeat(B, axis=0)  # every query sees a key
    expected = _gradients(reference.attend, q, k, v, g, query, position, **options)
    got = _gradients(banded.attend, q, k, v, g, query, position, band_len=4, **options)
    for one, other in zip(got, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=GRADIENT_ATOL)


def _num_scores(jaxpr) -> int:
    """The most elements of any value inside a program."""
    largest = 0
    for equation in jaxpr.eqns:
        largest = max([largest, *(int(np.prod(var.aval.shape)) for var in equation.outvars)])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                    largest = max(largest, _num_scores(getattr(inner, "jaxpr", inner)))
    return largest


# T is 512, so one head's T x T is 262,144 scores.
@pytest.mark.parametrize(
    ("window", "most"),
    [
        (None, 128 * 512),  # the last band reads every key
        (64, 64 * (64 + 63)),  # bands as long as the window: 64 queries, the 63 keys before them
        (4, 16 * (16 + 3)),  # but none under 16 queries; fewer than the inputs' 512 * 2
    ],
)
def test_no_array_of_queries_by_keys(window, most):
    T, width = 512, 2
    x = jnp.zeros((1, T, 1, width))
    position = jnp.arange(T, dtype=jnp.int32)[None, :]
    program = jax.make_jaxpr(functools.partial(banded.attend, scale=0.4, window=window))
    assert _num_scores(program(x, position, _block(x, x, position)).jaxpr) == max(most, T * width)


# Sinks inside a cache are for decoding; a block over itself has those of the text.
LAYERS = tuple(
    dataclasses.replace(layer, sink_positions="text" if layer.num_sinks else "cache")
    for layer in tiny_models.MIXED.layers
)
MIXED = transformer.Transformer(dataclasses.replace(tiny_models.MIXED, layers=LAYERS), backend="banded")
REFERENCE = dataclasses.replace(MIXED, backend="reference")


def test_whole_model_equals_the_reference():
    """A window, a window with sinks and none, over ragged rows longer than the least band of a window."""
    params = tiny_models.random_params(tiny_models.MIXED)
    rows = tiny_models.random_rows([37, 21, 1])
    got = tiny_models.whole(MIXED, params, rows, width=37)
    tiny_models.assert_rows_close(got, tiny_models.whole(REFERENCE, params, rows, width=37))


def test_gradients_of_a_whole_model_equal_those_of_the_reference():
    params = tiny_models.random_params(tiny_models.MIXED)
    tokens_BT, _ = tiny_models.padded(tiny_models.random_rows([37, 37]), 37)

    @functools.partial(jax.jit, static_argnums=0)
    def gradient(model, params):
        def loss(params):
            logits_BTV, _ = model.apply({"params": params}, tokens_BT)
            return jax.nn.logsumexp(logits_BTV, axis=-1).mean()

        return jax.grad(loss)(params)

    leaves, expected = (jax.tree.leaves_with_path(gradient(model, params)) for model in (MIXED, REFERENCE))
    for (path, leaf), (_, other) in zip(leaves, expected, strict=True):
        # Some hundred sums of terms that cancel, in two orders: 1e-4 of the greatest entry.
        atol = 1e-4 * float(jnp.abs(other).max())
        assert atol > 0
        np.testing.assert_allclose(leaf, other, rtol=0, atol=atol, err_msg=jax.tree_util.keystr(path))


# A step, a block that a ring holds, and one that attends to the old ring and to itself.
@pytest.mark.parametrize("block_len", [1, 3, 9])
def test_model_with_a_cache_is_refused(block_len):
    params = tiny_models.random_params(tiny_models.MIXED)
    cache = tiny_models.empty_cache(tiny_models.MIXED, 2, slack=2)
    inside = dataclasses.replace(MIXED, config=tiny_models.MIXED)
    for model, own in ((MIXED, cache), (inside, None)):
        with pytest.raises(ValueError) as refused:
            jax.eval_shape(model.apply, {"params": params}, jnp.ones((2, block_len), jnp.int32), own)
        assert str(refused.value) == (
            "attention: banded expects a block without a cache, got a cache or sinks inside one; use blockwise or "
            "reference, which read them"
        )
