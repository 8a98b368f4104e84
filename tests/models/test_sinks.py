"""Sinks at positions inside the cache: every step beside a plain model, and a text beside what is left of it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.attention import blockwise, select
from jdecode.cache import kv_cache, layout_full, layout_ring
from jdecode.models import rotary, sinks, transformer
from tests import plain_transformer, tiny_models

W, N = 4, 3
# Each layer has its own rope, so that a layer whose sinks are turned by another's shows
# (ggml-org/llama.cpp#12357: keys were turned with the model's base, while local layers have their own).
LAYERS = (
    config_lib.LayerConfig(window=W, num_sinks=N, rope=config_lib.RopeConfig(theta=100.0)),
    config_lib.LayerConfig(window=W, num_sinks=N, rope=None),
    config_lib.LayerConfig(
        window=W + 1, num_sinks=1, rope=config_lib.RopeConfig(theta=7.0, scaling="linear", factor=2.0)
    ),
)
STREAMING = dataclasses.replace(tiny_models.MIXED, layers=LAYERS, qk_norm=True)
MODEL = transformer.Transformer(STREAMING)
PARAMS = tiny_models.random_params(STREAMING)
LENGTHS = [5 * W + 3, 3 * W + 2, W + N, 1]
ROWS = tiny_models.random_rows(LENGTHS)


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """The logits of a model that numbers what each query sees, and rotates keys anew by these numbers."""
    return [plain_transformer.logits(STREAMING, PARAMS, row) for row in ROWS]


def _cache(rows: int = len(ROWS), model: config_lib.ModelConfig = STREAMING, **options: Any) -> kv_cache.KVCache:
    return tiny_models.empty_cache(model, rows, **options)


# A chunk of 1 is decoding; a ring with slack for 3 writes blocks of up to 4 before they attend, as those of a draft;
# longer ones attend to the old ring and to themselves, and hold sinks of their own where a text is still short.
CASES = [
    ({"layout": "full"}, 3),
    pytest.param({"layout": "full"}, 1, marks=pytest.mark.slow),
    ({}, 1),
    ({}, W - 1),
    pytest.param({}, W, marks=pytest.mark.slow),
    ({}, 2 * W + 1),
    ({"slack": 3}, W),
    pytest.param({"slack": 3}, W + 1, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("options", "chunk_len"), CASES, ids=str)
def test_every_step_is_that_of_a_plain_model(options, chunk_len, expected):
    got, cache = tiny_models.feed(MODEL, PARAMS, ROWS, _cache(**options), chunk_len, padding=5)
    tiny_models.assert_rows_close(got, expected)
    np.testing.assert_array_equal(cache.length_B, LENGTHS)


# One shared position vector garbled every shorter row of a batch (unslothai/unsloth#3699).
@pytest.mark.parametrize(("slack", "chunk_len"), [(3, 3), (0, 2 * W + 1)])
def test_rows_are_turned_by_their_own_positions(slack, chunk_len, expected):
    held, rows = [17, 2, N + W - 1], [ROWS[0], ROWS[1], ROWS[0]]
    heads = [row[:num] for row, num in zip(rows, held, strict=True)]
    tails = [row[num:] for row, num in zip(rows, held, strict=True)]
    _, cache = tiny_models.feed(MODEL, PARAMS, heads, _cache(3, slack=slack), 3)
    got, _ = tiny_models.feed(MODEL, PARAMS, tails, cache, chunk_len)
    tiny_models.assert_rows_close(got, [expected[idx][num:] for idx, num in zip((0, 1, 0), held, strict=True)])


def test_without_a_cache(expected):
    tiny_models.assert_rows_close(tiny_models.whole(MODEL, PARAMS, ROWS, max(LENGTHS)), expected)


@pytest.mark.parametrize("options", [{}, pytest.param({"layout": "full"}, marks=pytest.mark.slow)], ids=str)
def test_reference_backend_and_small_blocks(options, expected, monkeypatch):
    monkeypatch.setitem(select.BACKENDS, "small blocks", functools.partial(blockwise.attend, block_size=2))
    for backend in ("reference", "small blocks"):
        model = dataclasses.replace(MODEL, backend=backend)
        tiny_models.assert_rows_close(tiny_models.feed(model, PARAMS, ROWS, _cache(**options), 3)[0], expected)


@pytest.mark.parametrize(("slack", "layout"), [(3, "auto"), pytest.param(0, "full", marks=pytest.mark.slow)])
def test_rollback_within_the_sinks_and_past_them(slack, layout, expected):
    for held in (0, N - 1, N + W, 17):
        cache = _cache(1, slack=slack, layout=layout)
        _, cache = tiny_models.feed(MODEL, PARAMS, [ROWS[0][:held]], cache, 2)
        wrong = [token % 28 + 1 for token in ROWS[0][held : held + 4]]
        _, cache = tiny_models.feed(MODEL, PARAMS, [wrong], cache, 4)
        cache = kv_cache.truncate(cache, jnp.asarray([held], jnp.int32))
        for chunk_len in (2, 2 * W + 1):
            got, _ = tiny_models.feed(MODEL, PARAMS, [ROWS[0][held:]], cache, chunk_len)
            np.testing.assert_allclose(got[0], expected[0][held:], rtol=0, atol=tiny_models.LOGITS_ATOL)


@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("options", [{"slack": 2}, {"layout": "full"}], ids=str)
def test_slots_that_hold_nothing_are_not_read(options, poison, expected):
    cache = tiny_models.fill_unused(_cache(**options), poison, is_unused=lambda position_BS, _: position_BS >= 0)
    tiny_models.assert_rows_close(tiny_models.feed(MODEL, PARAMS, ROWS, cache, 3)[0], expected)


# One layer: there a text's last query knows nothing but what it sees, and so a text is its sinks and its window, read
# by a model that has neither (awslabs/keys_values#140: written in chunks, a full ring rotted).
ONE = dataclasses.replace(tiny_models.MIXED, layers=LAYERS[:1])
ONE_FULL = dataclasses.replace(ONE, layers=(dataclasses.replace(LAYERS[0], window=None, num_sinks=0),))
ONE_TEXT = dataclasses.replace(ONE, layers=(dataclasses.replace(LAYERS[0], sink_positions="text"),))
ONE_PARAMS = tiny_models.random_params(ONE)


def _last(model: config_lib.ModelConfig, text: list[int], chunk_len: int, dtype: str) -> np.ndarray:
    cache = _cache(1, model, dtype=dtype)
    return tiny_models.feed(transformer.Transformer(model), ONE_PARAMS, [text], cache, chunk_len)[0][0][-1]


@pytest.mark.parametrize(
    ("dtype", "atol", "chunk_len"),
    [
        ("float32", tiny_models.LOGITS_ATOL, 1),
        ("float32", tiny_models.LOGITS_ATOL, 7),
        ("float32", tiny_models.LOGITS_ATOL, 21),
        # 8 bits: keys are rounded at other angles, to steps of 1/127 and 1/16 of the greatest number.
        ("int8", 0.05, 7),
        ("fp8", 0.3, 7),
    ],
)
def test_a_text_is_its_sinks_and_its_window(dtype, atol, chunk_len):
    text = ROWS[0][:21]
    left = text[:N] + text[-W:]
    alone = _last(ONE_FULL, left, len(left), dtype)
    np.testing.assert_allclose(_last(ONE, text, chunk_len, dtype), alone, rtol=0, atol=atol)
    assert np.abs(_last(ONE_TEXT, text, chunk_len, dtype) - alone).max() > 3 * atol


def test_where_a_text_lies_is_nothing():
    """However long the text between sinks and window: no distance grows with it."""
    tail = ROWS[1][:W]
    texts = [ROWS[0][:N] + [7] * between + tail for between in (0, 1, 9, 20)]
    got = [_last(ONE, text, 3, "float32") for text in texts]
    for one in got[1:]:
        np.testing.assert_allclose(one, got[0], rtol=0, atol=tiny_models.LOGITS_ATOL)


def test_before_the_window_moves_it_is_the_model_without():
    full = dataclasses.replace(
        STREAMING, layers=tuple(dataclasses.replace(layer, window=None, num_sinks=0) for layer in LAYERS)
    )
    plain = tiny_models.feed(transformer.Transformer(full), PARAMS, ROWS, _cache(model=full), 3)[0]
    got = tiny_models.feed(MODEL, PARAMS, ROWS, _cache(), 3)[0]
    first = W + 1 + 1  # the narrowest of the layers: positions under N + W see everything
    for one, other in zip(got, plain, strict=True):
        np.testing.assert_allclose(one[:first], other[:first], rtol=0, atol=tiny_models.LOGITS_ATOL)
    assert (np.abs(got[0] - plain[0]).max(axis=-1)[W + N :] > 1e-3).all()


def test_queries_are_turned_past_the_window_alone():
    """Bit for bit: a query that stands inside the window meets the sinks as it is."""
    position_BT = jnp.asarray([[0, 3, N + W - 1, N + W, 1000]], jnp.int32)
    q = jnp.asarray(np.random.default_rng(3).normal(size=(1, 5, 2, 6)), jnp.float32)
    raw = np.asarray(q)
    k = jnp.zeros((1, 9, 1, 6))
    whole = sinks.segment_lib.whole_segment(k, k, jnp.arange(9, dtype=jnp.int32)[None])
    first, others = sinks.inside_cache([whole], position_BT, LAYERS[0])
    turned = np.asarray(first.keys.queries(q))
    np.testing.assert_array_equal(turned[:, :3], raw[:, :3])
    assert (np.abs(turned[:, 3:] - raw[:, 3:]).max(axis=(-1, -2)) > 0.1).all()
    rope = LAYERS[0].rope
    assert rope is not None
    # Rotated by its own position, and then turned, a query is one at N + W - 1.
    at = [rotary.rotate(q[:, 4:], jnp.full((1, 1), place, jnp.int32), rope) for place in (1000, N + W - 1)]
    got = first.keys.queries(jnp.concatenate([q[:, :4], at[0]], axis=1))[:, 4:]
    np.testing.assert_allclose(got, at[1], rtol=0, atol=1e-3)  # 1,000 radians are good to 6e-5
    np.testing.assert_array_equal(others.keys.queries(q), raw)


def test_a_key_is_in_one_segment():
    position = jnp.asarray([[0, 1, 2, 9, 10, 7], [0, 1, sinks.visibility.EMPTY, 3, 4, 5]], jnp.int32)
    k = jnp.zeros((2, 6, 1, 6))
    whole = sinks.segment_lib.whole_segment(k, k, position)
    first, others = sinks.inside_cache([whole], jnp.full((2, 1), 10, jnp.int32), LAYERS[0])
    empty = int(sinks.visibility.EMPTY)
    np.testing.assert_array_equal(first.position_BS, [[0, 1, 2], [0, 1, empty]])
    np.testing.assert_array_equal(others.position_BS, [[empty] * 3 + [9, 10, 7], [empty] * 3 + [3, 4, 5]])
    assert int(first.end_slot) == 3 and int(others.end_slot) == 6
    assert sinks.inside_cache([whole], jnp.full((2, 1), 10, jnp.int32), LAYERS[1]) == (whole,)  # no rope: as it is


@pytest.mark.parametrize(
    "layout",
    [layout_full.FullLayout(capacity=9), layout_ring.RingLayout(window=W, slack=2, num_sinks=N)],
    ids=str,
)
def test_layouts_give_sinks_the_slots_of_their_positions(layout):
    """What ``sinks`` relies on."""
    np.testing.assert_array_equal(layout.slot(jnp.arange(N)), np.arange(N))
    assert np.asarray(layout.survives(jnp.arange(N), jnp.int32(1000))).all()


def test_sinks_cost_no_copy_of_the_cache():
    """A step's temporaries are far below its cache, which is donated."""
    model = dataclasses.replace(STREAMING, layers=tuple(dataclasses.replace(x, window=20_000) for x in LAYERS))
    cache = jax.eval_shape(functools.partial(_cache, 1, model, capacity=100_000))
    shapes = jax.eval_shape(lambda: PARAMS)

    def step(params, tokens_BT, cache):
        return transformer.Transformer(model).apply({"params": params}, tokens_BT, cache)

    tokens_BT = jax.ShapeDtypeStruct((1, 1), jnp.int32)
    memory = jax.jit(step, donate_argnums=2).lower(shapes, tokens_BT, cache).compile().memory_analysis()
    assert memory is not None
    stores = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache.stores))
    assert memory.temp_size_in_bytes < stores / 5
