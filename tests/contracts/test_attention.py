"""The contract of attention backends, over every one of ``select.BACKENDS``, against loops in plain Python.

Every backend attends from a block over itself (``attend_block``). All but those of ``BLOCK_ONLY`` also read what a
cache holds, in any order of slots and in several segments (``attend``).
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import segment, select
from tests import plain_attention
from tests.plain_attention import EMPTY

BLOCK_ONLY = ("banded",)
"""Backends that refuse a cache (``test_a_cache_is_read_or_refused``)."""

B, T, H = 3, 5, 6
HEADS = {"4:2": (4, 2), "7:1": (7, 1), "6:6": (6, 6), "28:4": (28, 4)}

# Ragged rows, in the order of slots: a ring that wrapped, with holes; a short text; nothing but the block itself.
OLD_POSITIONS = [
    [8, 9, EMPTY, 11, 4, 5, 6, 7],
    [0, 1, 2, EMPTY, EMPTY, EMPTY, EMPTY, EMPTY],
    [EMPTY] * 8,
]
FRESH_POSITIONS = [[12, 13, 14, 15, 16], [3, 4, 5, EMPTY, EMPTY], [0, EMPTY, EMPTY, EMPTY, EMPTY]]
QUERY_POSITIONS = [[12, 13, 14, 15, 16], [3, 4, 5, 6, 7], [0, 1, 2, 3, 4]]

FLOAT32_ATOL = 3e-6
"""Outputs of about 1; sums of at most 13 terms; exponentials of scores up to 5 in size, each good to some 6e-7."""


OPTION_NAMES = ("scale", "window", "num_sinks", "soft_cap")


@pytest.fixture(params=[name for name in select.BACKENDS if name not in BLOCK_ONLY])
def attend(request):
    return _jitted(request.param, OPTION_NAMES)


@pytest.fixture(params=select.BACKENDS)
def attend_block(request):
    return _jitted(request.param, OPTION_NAMES)


@functools.cache
def _jitted(name: str, static: tuple[str, ...]):
    return jax.jit(select.BACKENDS[name], static_argnames=static)


def _inputs(num_heads: int, num_kv_heads: int, seed: int = 3):
    rng = np.random.default_rng(seed)
    shapes = ((B, T, num_heads, H), (B, 13, num_kv_heads, H), (B, 13, num_kv_heads, H))
    q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in shapes)
    return 2 * q, k, v


POSITIONS = np.concatenate([np.asarray(OLD_POSITIONS), np.asarray(FRESH_POSITIONS)], axis=1).astype(np.int32)


def _segments(k, v, position=POSITIONS, num_segments: int = 2) -> tuple[segment.Segment, ...]:
    edges = [0, 8, 13] if num_segments == 2 else [0, 13]
    return tuple(
        segment.whole_segment(
            jnp.asarray(k[:, start:end]), jnp.asarray(v[:, start:end]), jnp.asarray(position[:, start:end])
        )
        for start, end in itertools.pairwise(edges)
    )


OPTIONS = [
    {"window": window, "num_sinks": num_sinks, "soft_cap": soft_cap}
    for window, num_sinks, soft_cap in itertools.product((None, 4), (0, 2), (None, 5.0))
]


# Backends disagreed by one key at the window's edge (huggingface/transformers#39408, #29623, #26792).
@pytest.mark.parametrize("num_segments", [1, 2])
@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(map(str, options.values())))
def test_equals_plain_python(attend, options, num_segments):
    q, k, v = _inputs(4, 2)
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v, num_segments=num_segments), scale=0.4, **options)
    expected = plain_attention.attend(q, k, v, QUERY_POSITIONS, POSITIONS, scale=0.4, **options)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)


# Key/value heads were tiled where they should be repeated (ekzhang/jax-js#180, apple/axlearn#842).
@pytest.mark.parametrize("heads", HEADS)
def test_head_maps(attend, heads):
    num_heads, num_kv_heads = HEADS[heads]
    q, k, v = _inputs(num_heads, num_kv_heads)
    options = {"scale": 0.4, "window": 4, "num_sinks": 2, "soft_cap": 5.0}
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    expected = plain_attention.attend(q, k, v, QUERY_POSITIONS, POSITIONS, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)


def test_head_map_by_hand(attend):
    """Four query heads over two key/value heads read 0, 0, 1, 1: each value is its head's number."""
    v = np.broadcast_to(np.asarray([10.0, 20.0], np.float32)[None, None, :, None], (B, 13, 2, H))
    q, k, _ = _inputs(4, 2)
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), scale=1.0)
    expected = np.broadcast_to(np.asarray([10.0, 10.0, 20.0, 20.0])[None, None, :, None], got.shape)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_order_of_slots_is_nothing(attend):
    q, k, v = _inputs(4, 2)
    order = np.random.default_rng(5).permutation(13)
    options = {"scale": 0.4, "window": 4, "num_sinks": 2}
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k[:, order], v[:, order], POSITIONS[:, order]), **options)
    expected = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)


# In jax a softmax over nothing is the mean of what is masked, not NaN: only values show it
# (huggingface/transformers#45491, ml-explore/mlx#2608).
@pytest.mark.parametrize("window", [None, 4])
def test_query_that_sees_nothing_gets_zeros(attend, window):
    q, k, v = _inputs(4, 2)
    v = v + 5
    position = POSITIONS.copy()
    position[0] = EMPTY  # nothing held
    position[1] = 9 + np.arange(13)  # all of it later than the queries
    got = np.asarray(attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v, position), scale=0.4, window=window))
    np.testing.assert_array_equal(got[:2], np.zeros_like(got[:2]))
    assert np.abs(got[2, :4]).min() > 0.5  # its own token; a window of four still reaches it at positions 0 .. 3
    if window:
        np.testing.assert_array_equal(got[2, 4], np.zeros_like(got[2, 4]))  # the window lies wholly in padding


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e4])
def test_what_empty_slots_hold_is_nothing(attend, poison):
    q, k, v = _inputs(4, 2)
    options = {"scale": 0.4, "window": 4, "num_sinks": 2, "soft_cap": 5.0}
    expected = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    k, v = k.copy(), v.copy()
    k[POSITIONS == EMPTY] = poison
    v[POSITIONS == EMPTY] = poison
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    np.testing.assert_array_equal(got, expected)


def test_hidden_keys_are_nothing(attend):
    """A future or an expired key, however great its score, changes no bit."""
    q, k, v = _inputs(4, 2)
    options = {"scale": 0.4, "window": 4}
    expected = np.asarray(attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options))
    for slot, position in enumerate(POSITIONS[0]):
        other_k, other_v = k.copy(), v.copy()
        other_k[0, slot], other_v[0, slot] = 77.0, 1e4
        got = np.asarray(attend(q, jnp.asarray(QUERY_POSITIONS), _segments(other_k, other_v), **options))
        for t, query in enumerate(QUERY_POSITIONS[0]):
            assert np.array_equal(got[0, t], expected[0, t]) != plain_attention.sees(query, int(position), 4, 0)
        np.testing.assert_array_equal(got[1:], expected[1:])


FAULTS = [("keys", np.nan), ("keys", np.inf), ("keys", -np.inf), ("values", np.nan), ("values", np.inf)]


def _with_fault(k, v, where: str, slot: int, fault: float):
    """Returns copies with one number of row 0, key/value head 1, that is not finite."""
    k, v = k.copy(), v.copy()
    (k if where == "keys" else v)[0, slot, 1, 2] = fault
    return k, v


def _check_fault(got, expected, is_seen_T: list[bool]) -> None:
    """Those who see the fault get NaN, in all of the head's numbers; nobody else changes by a bit."""
    expected = np.asarray(expected).copy()
    expected[0, is_seen_T, 2:] = np.nan  # query heads 2 and 3 read key/value head 1
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(("where", "fault"), FAULTS)
def test_a_fault_reaches_those_who_see_it_alone(attend, where, fault):
    q, k, v = _inputs(4, 2)
    options = {"scale": 0.4, "window": 4, "num_sinks": 2, "soft_cap": 5.0}
    expected = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    for slot, position in enumerate(POSITIONS[0].tolist()):
        got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(*_with_fault(k, v, where, slot, fault)), **options)
        is_seen_T = [plain_attention.sees(query, position, 4, 2) for query in QUERY_POSITIONS[0]]
        _check_fault(got, expected, is_seen_T)


# The soft cap was left out as a "temporary" step (vllm-project/vllm#5908). Order: scale, cap, mask.
def test_order_of_scale_cap_and_mask(attend):
    # q·k is 120, 0 and 400 for positions 0, 1, 2; times the scale 60, 0, 200; capped at 5: 5 tanh(12) = 5, 0, 5.
    q = jnp.full((1, 2, 1, 2), 10.0)
    k = jnp.asarray([[6.0, 6.0], [0.0, 0.0], [20.0, 20.0]])[None, :, None, :]
    v = jnp.asarray([[3.0, 0.0], [0.0, 7.0], [1000.0, 1000.0]])[None, :, None, :]
    whole = segment.whole_segment(k, v, jnp.asarray([[0, 1, 2]], jnp.int32))
    got = attend(q, jnp.asarray([[1, 1]], jnp.int32), (whole,), scale=0.5, soft_cap=5.0)
    # The weights of positions 0 and 1 are e^5 and 1; position 2 is hidden, which a cap after the mask would undo
    # (-inf capped is -5). A cap before the scale would give e^2.5 : 1.
    share = math.exp(5) / (math.exp(5) + 1)
    np.testing.assert_allclose(got[0, 0, 0], [3 * share, 7 * (1 - share)], rtol=1e-5)


def test_great_scores_do_not_overflow(attend):
    q, k, v = _inputs(4, 2)
    options = {"scale": 40.0, "window": 4}  # scores to several hundred: exp of them is infinite in float32
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    expected = plain_attention.attend(q, k, v, QUERY_POSITIONS, POSITIONS, **options)
    # A score of 400 is good to 400 * 6e-8 * a few roundings, about 1e-4, and so is its weight.
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision(attend, dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in _inputs(4, 2))
    options = {"scale": 0.4, "window": 4, "num_sinks": 2, "soft_cap": 5.0}
    got = attend(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), **options)
    exact_q, exact_k, exact_v = (np.asarray(x, np.float32) for x in (q, k, v))
    expected = plain_attention.attend(exact_q, exact_k, exact_v, QUERY_POSITIONS, POSITIONS, **options)
    assert got.dtype == dtype
    # Three roundings of half a unit in the last place each: of the scaled query (scores under 5 in size, so the weights
    # move by up to 5 units), of the weights, of the result; values are under 3.
    unit = float(jnp.finfo(dtype).eps) / 2
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=(5 + 1 + 1) * 3 * unit)
    assert np.abs(np.asarray(got, np.float32) - expected).max() > 0  # the inputs really are of this dtype


# A block over itself: five tokens, then ragged rows of three and of one, padded at their ends.
BLOCK_POSITIONS = np.asarray([[0, 1, 2, 3, 4], [0, 1, 2, EMPTY, EMPTY], [0, EMPTY, EMPTY, EMPTY, EMPTY]], np.int32)
BLOCK_QUERIES = np.broadcast_to(np.arange(T, dtype=np.int32), (B, T))


def _block_inputs(num_heads: int = 4, num_kv_heads: int = 2):
    q, k, v = _inputs(num_heads, num_kv_heads)
    return q, k[:, :T], v[:, :T]


def _block(k, v, position=BLOCK_POSITIONS) -> tuple[segment.Segment, ...]:
    return (segment.whole_segment(jnp.asarray(k), jnp.asarray(v), jnp.asarray(position), is_block=True),)


@pytest.mark.parametrize("name", select.BACKENDS)
def test_a_cache_is_read_or_refused(name):
    """No backend reads a cache as if it were a block; the one that cannot read it says so."""
    q, k, v = _inputs(4, 2)
    if name not in BLOCK_ONLY:
        expected = plain_attention.attend(q, k, v, QUERY_POSITIONS, POSITIONS, scale=0.4)
        got = _jitted(name, OPTION_NAMES)(q, jnp.asarray(QUERY_POSITIONS), _segments(k, v), scale=0.4)
        np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)
        return
    for num_segments in (1, 2):
        segments = _segments(k, v, num_segments=num_segments)
        with pytest.raises(ValueError, match=f"^attention: {name} expects a block without a cache, got a cache or "):
            select.BACKENDS[name](q, jnp.asarray(QUERY_POSITIONS), segments, scale=0.4)


@pytest.mark.parametrize("window", [None, 1, 3, 4, 7])
@pytest.mark.parametrize(("num_sinks", "soft_cap"), [(0, None), (2, None), (0, 5.0), (2, 5.0)])
def test_block_equals_plain_python(attend_block, window, num_sinks, soft_cap):
    q, k, v = _block_inputs()
    options = {"scale": 0.4, "window": window, "num_sinks": num_sinks, "soft_cap": soft_cap}
    got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    expected = plain_attention.attend(q, k, v, BLOCK_QUERIES, BLOCK_POSITIONS, **options)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)


@pytest.mark.parametrize("heads", HEADS)
def test_block_head_maps(attend_block, heads):
    q, k, v = _block_inputs(*HEADS[heads])
    options = {"scale": 0.4, "window": 3, "num_sinks": 1, "soft_cap": 5.0}
    got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    expected = plain_attention.attend(q, k, v, BLOCK_QUERIES, BLOCK_POSITIONS, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=FLOAT32_ATOL)


# With zero queries all visible keys weigh the same, and one-hot values show which they are.
@pytest.mark.parametrize(
    ("window", "num_sinks", "counts"),
    [
        (None, 0, [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]),
        (4, 0, [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
        (1, 0, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        # The window is joined by the two sinks; while they are inside it they count once.
        (4, 2, [1, 2, 3, 4, 5, 6, 6, 6, 6, 6]),
    ],
)
def test_visible_keys_are_counted(attend_block, window, num_sinks, counts):
    length = len(counts)
    position = np.arange(length, dtype=np.int32)[None, :]
    v = np.eye(length, dtype=np.float32)[None, :, None, :]
    k = np.random.default_rng(4).normal(size=v.shape).astype(np.float32)
    whole = segment.whole_segment(jnp.asarray(k), jnp.asarray(v), jnp.asarray(position), is_block=True)
    q = jnp.zeros((1, length, 1, length))
    got = np.asarray(attend_block(q, jnp.asarray(position), (whole,), scale=1.0, window=window, num_sinks=num_sinks))
    for query, count in enumerate(counts):
        first_near = max(0, query + 1 - (window or length))
        visible = sorted({*range(min(num_sinks, query + 1)), *range(first_near, query + 1)})
        assert len(visible) == count
        expected = np.zeros(length)
        expected[visible] = 1 / count
        np.testing.assert_allclose(got[0, query, 0], expected, rtol=1e-6)


@pytest.mark.parametrize("window", [None, 2])
def test_query_of_a_block_that_sees_nothing_gets_zeros(attend_block, window):
    q, k, v = _block_inputs()
    v = v + 5
    position = BLOCK_POSITIONS.copy()
    position[1] = EMPTY  # a row of padding alone
    got = np.asarray(attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v, position), scale=0.4, window=window))
    np.testing.assert_array_equal(got[1], np.zeros_like(got[1]))
    assert np.abs(got[0]).min() > 0.5 and np.abs(got[2, 0]).min() > 0.5
    # Padding as a query: its position counts on, so a window of two no longer reaches token 0.
    beyond = got[2, 2:]
    assert np.abs(beyond).min() > 0.5 if window is None else not beyond.any()


@pytest.mark.parametrize("poison", [np.nan, np.inf, 1e4])
@pytest.mark.parametrize("window", [None, 3])
def test_what_a_block_s_padding_holds_is_nothing(attend_block, poison, window):
    q, k, v = _block_inputs()
    options = {"scale": 0.4, "window": window, "num_sinks": 2, "soft_cap": 5.0}
    expected = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    k, v = k.copy(), v.copy()
    k[BLOCK_POSITIONS == EMPTY] = poison
    v[BLOCK_POSITIONS == EMPTY] = poison
    got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    np.testing.assert_array_equal(got, expected)


def test_hidden_keys_of_a_block_are_nothing(attend_block):
    """A future or an expired key, however great its score, changes no bit."""
    q, k, v = _block_inputs()
    options = {"scale": 0.4, "window": 3}
    expected = np.asarray(attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options))
    for slot in range(T):
        other_k, other_v = k.copy(), v.copy()
        other_k[0, slot], other_v[0, slot] = 77.0, 1e4
        got = np.asarray(attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(other_k, other_v), **options))
        for query in range(T):
            assert np.array_equal(got[0, query], expected[0, query]) != plain_attention.sees(query, slot, 3, 0)
        np.testing.assert_array_equal(got[1:], expected[1:])


@pytest.mark.parametrize(("where", "fault"), FAULTS)
@pytest.mark.parametrize("window", [None, 3])
def test_a_fault_of_a_block_reaches_those_who_see_it_alone(attend_block, where, fault, window):
    q, k, v = _block_inputs()
    options = {"scale": 0.4, "window": window}
    expected = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    for slot in range(T):
        got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(*_with_fault(k, v, where, slot, fault)), **options)
        _check_fault(got, expected, [plain_attention.sees(query, slot, window, 0) for query in range(T)])


def test_order_of_scale_and_cap_in_a_block(attend_block):
    # q·k is 120 and 0; times the scale 60 and 0; capped at 5: 5 tanh(12) = 5 and 0. A cap before the scale gives 2.5.
    q = jnp.full((1, 2, 1, 2), 10.0)
    k = jnp.asarray([[6.0, 6.0], [0.0, 0.0]])[None, :, None, :]
    v = jnp.asarray([[3.0, 0.0], [0.0, 7.0]])[None, :, None, :]
    positions = np.asarray([[0, 1]], np.int32)
    got = attend_block(q, jnp.asarray(positions), _block(k, v, positions), scale=0.5, soft_cap=5.0)
    share = math.exp(5) / (math.exp(5) + 1)
    np.testing.assert_allclose(got[0, :, 0], [[3, 0], [3 * share, 7 * (1 - share)]], rtol=1e-5)


def test_great_scores_of_a_block_do_not_overflow(attend_block):
    q, k, v = _block_inputs()
    options = {"scale": 40.0, "window": 3}
    got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    expected = plain_attention.attend(q, k, v, BLOCK_QUERIES, BLOCK_POSITIONS, **options)
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-3)  # see test_great_scores_do_not_overflow


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_block_in_half_precision(attend_block, dtype):
    q, k, v = (jnp.asarray(x, dtype) for x in _block_inputs())
    options = {"scale": 0.4, "window": 3, "num_sinks": 2, "soft_cap": 5.0}
    got = attend_block(q, jnp.asarray(BLOCK_QUERIES), _block(k, v), **options)
    exact_q, exact_k, exact_v = (np.asarray(x, np.float32) for x in (q, k, v))
    expected = plain_attention.attend(exact_q, exact_k, exact_v, BLOCK_QUERIES, BLOCK_POSITIONS, **options)
    assert got.dtype == dtype
    unit = float(jnp.finfo(dtype).eps) / 2
    atol = (5 + 1 + 1) * 3 * unit  # see test_half_precision
    np.testing.assert_allclose(np.asarray(got, np.float32), expected, rtol=0, atol=atol)
    assert np.abs(np.asarray(got, np.float32) - expected).max() > 0
