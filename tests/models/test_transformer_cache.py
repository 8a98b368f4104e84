"""Equalities of model and cache: however a text is cut, batched, rolled back or stored, its logits are the same."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import blockwise, select
from jdecode.cache import cache_rows, kv_cache
from jdecode.models import transformer
from tests import tiny_models

W = tiny_models.WINDOW
MODEL = transformer.Transformer(tiny_models.MIXED)
REFERENCE = dataclasses.replace(MODEL, backend="reference")
PARAMS = tiny_models.random_params(tiny_models.MIXED)
LENGTHS = [5 * W + 3, 3 * W + 2, W + 2]
ROWS = tiny_models.random_rows(LENGTHS)
WHOLE_LEN = 24

CHUNK_LENS = sorted({1, 3, W - 1, W, W + 1, 2 * W + 1})
LAYOUTS: dict[str, dict[str, Any]] = {
    "full": {"layout": "full"},
    "ring": {"slack": 0},
    "ring+2": {"slack": 2},
    "ring+5": {"slack": 5},
}


def empty(layout: str, batch_size: int = len(ROWS)) -> kv_cache.KVCache:
    return tiny_models.empty_cache(tiny_models.MIXED, batch_size, **LAYOUTS[layout])


@pytest.fixture(scope="module")
def expected() -> list[np.ndarray]:
    """The logits of the rows in one block, without a cache, by the reference attention."""
    return tiny_models.whole(REFERENCE, PARAMS, ROWS, WHOLE_LEN)


def test_one_key_matters(expected):
    """What the tolerance must tell apart: a window of one position more or less moves some logit by over 1e-2."""
    for window in (W - 1, W + 1):
        layers = tuple(
            layer if layer.window is None else dataclasses.replace(layer, window=window)
            for layer in tiny_models.MIXED.layers
        )
        other = dataclasses.replace(REFERENCE, config=dataclasses.replace(tiny_models.MIXED, layers=layers))
        got = tiny_models.whole(other, PARAMS, ROWS, WHOLE_LEN)
        first = min(window, W)  # the first position at which the two windows differ
        np.testing.assert_allclose(got[0][:first], expected[0][:first], rtol=0, atol=tiny_models.LOGITS_ATOL)
        assert (np.abs(got[0] - expected[0]).max(axis=-1)[first:] > 1e-2).all()


# A forward without a cache skipped what a cached one does (ml-explore/mlx-lm#323).
def test_blockwise_without_cache_equals_reference(expected):
    tiny_models.assert_rows_close(tiny_models.whole(MODEL, PARAMS, ROWS, WHOLE_LEN), expected)


# Chunked prefill let rows see keys outside the window (huggingface/transformers#41228, pytorch/executorch#21857); a
# block longer than the window lost tokens inside it after the ring had wrapped (ollama/ollama#15591). A chunk of one
# is decoding step by step; the rings have windows with and without sinks.
@pytest.mark.parametrize("chunk_len", CHUNK_LENS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunked_equals_whole(layout, chunk_len, expected):
    got, cache = tiny_models.feed(MODEL, PARAMS, ROWS, empty(layout), chunk_len)
    tiny_models.assert_rows_close(got, expected)
    np.testing.assert_array_equal(cache.length_B, LENGTHS)


# A prefill that began after tokens held already gave other texts than one from the start (tenstorrent/vllm#415).
@pytest.mark.parametrize("layout", ["full", "ring", "ring+2"])
def test_going_on_from_every_cut_equals_whole(layout, expected):
    text, cuts = ROWS[0], range(LENGTHS[0])
    _, cache = tiny_models.feed(MODEL, PARAMS, [text[:cut] for cut in cuts], empty(layout, len(cuts)), WHOLE_LEN)
    np.testing.assert_array_equal(cache.length_B, list(cuts))
    got, _ = tiny_models.feed(MODEL, PARAMS, [text[cut:] for cut in cuts], cache, WHOLE_LEN)
    tiny_models.assert_rows_close(got, [expected[0][cut:] for cut in cuts])


@pytest.mark.parametrize("layout", ["full", "ring+2"])
def test_reference_backend_through_cache(layout, expected):
    got, _ = tiny_models.feed(REFERENCE, PARAMS, ROWS, empty(layout), 2 * W + 1)
    tiny_models.assert_rows_close(got, expected)


# Blocks of two slots: a text of 23 tokens is many of them, and those before the window, or past the end, are skipped.
@pytest.mark.parametrize("chunk_len", [3, 2 * W + 1])
@pytest.mark.parametrize("layout", ["full", "ring+2"])
def test_small_attention_blocks_through_cache(layout, chunk_len, expected, monkeypatch):
    monkeypatch.setitem(select.BACKENDS, "small blocks", functools.partial(blockwise.attend, block_size=2))
    model = dataclasses.replace(MODEL, backend="small blocks")
    got, _ = tiny_models.feed(model, PARAMS, ROWS, empty(layout), chunk_len)
    tiny_models.assert_rows_close(got, expected)
    # The long row alone: its first slots are skipped, which shorter rows beside it forbid.
    alone, _ = tiny_models.feed(model, PARAMS, ROWS[:1], empty(layout, 1), chunk_len)
    tiny_models.assert_rows_close(alone, expected[:1])


def test_layouts_are_what_the_names_say():
    window, sinks, full = tiny_models.MIXED.layers
    assert (window.window, sinks.num_sinks, full.window) == (W, 2, None)
    for layout, slots in {"full": [32, 32, 32], "ring": [4, 6, 32], "ring+5": [9, 11, 32]}.items():
        assert [store.keys.num_slots for store in empty(layout).stores] == slots


def test_one_block_without_lengths_equals_one_with(expected):
    tokens_BT = jnp.asarray([ROWS[0][:13], ROWS[1][:13], ROWS[0][5:18]])
    got, cache = tiny_models.apply(MODEL, PARAMS, tokens_BT, empty("ring+2"))
    np.testing.assert_array_equal(cache.length_B, [13, 13, 13])
    for idx in range(2):
        np.testing.assert_allclose(got[idx], expected[idx][:13], rtol=0, atol=tiny_models.LOGITS_ATOL)
    uncached, nothing = tiny_models.apply(MODEL, PARAMS, tokens_BT, None)
    assert nothing is None
    np.testing.assert_allclose(uncached, got, rtol=0, atol=tiny_models.LOGITS_ATOL)


def test_last_only_scores_the_last_real_token(expected):
    tokens_BT, num_tokens_B = tiny_models.padded(ROWS, WHOLE_LEN)
    got, _ = tiny_models.apply(MODEL, PARAMS, tokens_BT, None, num_tokens_B, last_only=True)
    assert got.shape == (3, 1, tiny_models.MIXED.vocab_size)
    for idx in range(3):
        np.testing.assert_allclose(got[idx, 0], expected[idx][-1], rtol=0, atol=tiny_models.LOGITS_ATOL)
    got, _ = tiny_models.apply(MODEL, PARAMS, tokens_BT[:, : W + 2], None, last_only=True)
    np.testing.assert_allclose(got[2, 0], expected[2][-1], rtol=0, atol=tiny_models.LOGITS_ATOL)


# The row that is longest decides nothing for the others: one shared position vector garbled every shorter row of a
# padded batch (unslothai/unsloth#3699), pad counts taken from equalised lengths were 0 (Blaizzy/mlx-vlm#1542), and one
# term of a position was wrong only with cache and padding together (mosaicml/examples#257).
@pytest.mark.parametrize("chunk_len", [5, 9])  # prompts of 1, 5 and 9 tokens: two chunks, one chunk
@pytest.mark.parametrize("layout", ["full", "ring", "ring+2"])
def test_greedy_batch_equals_rows_alone(layout, chunk_len):
    prompts = tiny_models.random_rows([1, 5, 9], seed=5)
    together = _greedy(empty(layout), prompts, chunk_len)
    assert len({tuple(row) for row in together}) == 3
    for prompt, row in zip(prompts, together, strict=True):
        assert _greedy(empty(layout, 1), [prompt], chunk_len) == [row]
        assert _greedy_without_cache(prompt) == row


NUM_NEW = 2 * W + 1


def _greedy(cache: kv_cache.KVCache, prompts: list[list[int]], chunk_len: int) -> list[list[int]]:
    logits, cache = tiny_models.feed(MODEL, PARAMS, prompts, cache, chunk_len, padding=7)
    rows = [[int(row[-1].argmax())] for row in logits]
    while len(rows[0]) < NUM_NEW:
        logits, cache = tiny_models.feed(MODEL, PARAMS, [row[-1:] for row in rows], cache, 1)
        for row, last in zip(rows, logits, strict=True):
            row.append(int(last[-1].argmax()))
    return rows


def _greedy_without_cache(prompt: list[int]) -> list[int]:
    text = list(prompt)
    for _ in range(NUM_NEW):
        text.append(int(tiny_models.whole(MODEL, PARAMS, [text], WHOLE_LEN, padding=11)[0][-1].argmax()))
    return text[len(prompt) :]


def test_rows_may_pause(expected):
    """A row without tokens in a call is as it was, while the others run on."""
    cache, got = empty("ring+2"), [[], [], []]
    done = [0, 0, 0]
    for turn in range(60):
        take = [min(count, length - at) for count, length, at in zip(_takes(turn), LENGTHS, done, strict=True)]
        parts = [row[at : at + count] for row, at, count in zip(ROWS, done, take, strict=True)]
        if not any(take):
            continue
        tokens_BT, num_tokens_B = tiny_models.padded(parts, 3, padding=4)
        logits_BTV, cache = tiny_models.apply(MODEL, PARAMS, tokens_BT, cache, num_tokens_B)
        for row, new in zip(got, tiny_models.unpadded(logits_BTV, parts), strict=True):
            row.append(new)
        done = [at + count for at, count in zip(done, take, strict=True)]
    assert done == LENGTHS
    tiny_models.assert_rows_close([np.concatenate(row) for row in got], expected)


def _takes(turn: int) -> list[int]:
    return [turn % 4, (turn // 2) % 3, int(turn % 5 == 4)]


def rejected(start: int, count: int) -> list[int]:
    """Ids that none of ``ROWS`` continues with."""
    return [(row_id + 13) % 28 + 1 for row_id in ROWS[0][start : start + count]]


# Rejected drafts: `(layout, tokens seen before the draft)`; 13 is past the first turn of every ring.
@pytest.mark.parametrize("held", [3, W + 2, 13])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_rollback_then_continue_equals_never_there(layout, held, expected):
    limit = min(empty(layout).max_rollback, 6)
    rows = [ROWS[0], ROWS[0][:14], ROWS[0]]
    # The draft is written as a driver would: step by step, and in one block where one may be.
    _, before = tiny_models.feed(MODEL, PARAMS, [row[:held] for row in rows], empty(layout), 3)
    for count in range(limit + 1):
        cache = before
        if count:
            _, cache = tiny_models.feed(MODEL, PARAMS, [rejected(held, count)] * 3, cache, count if count < 4 else 1)
            np.testing.assert_array_equal(cache.length_B, [held + count] * 3)
            cache = kv_cache.truncate(cache, jnp.full(3, held, jnp.int32))
        np.testing.assert_array_equal(cache.length_B, [held] * 3)
        for chunk_len in (1, 3, 2 * W + 1):
            got, _ = tiny_models.feed(MODEL, PARAMS, [row[held : held + 11] for row in rows], cache, chunk_len)
            tiny_models.assert_rows_close(got, [expected[0][held : held + len(row)] for row in got])


def test_rollback_takes_each_row_back_by_its_own(expected):
    layout, held = "ring+2", [9, 7, 3]
    _, cache = tiny_models.feed(MODEL, PARAMS, [row[:n] for row, n in zip(ROWS, held, strict=True)], empty(layout), 3)
    tokens_BT = jnp.asarray([ROWS[0][9:10] + rejected(3, 2), ROWS[1][7:9] + rejected(5, 1), rejected(6, 3)])
    _, cache = tiny_models.apply(MODEL, PARAMS, tokens_BT, cache, jnp.full(3, 3, jnp.int32))
    cache = kv_cache.truncate(cache, jnp.asarray([10, 9, 3], jnp.int32))
    np.testing.assert_array_equal(cache.length_B, [10, 9, 3])
    # A length over the row's own does nothing.
    cache = kv_cache.truncate(cache, jnp.asarray([10, 99, 12], jnp.int32))
    np.testing.assert_array_equal(cache.length_B, [10, 9, 3])
    for chunk_len in (1, 2 * W + 1):
        got, _ = tiny_models.feed(MODEL, PARAMS, [ROWS[0][10:], ROWS[1][9:], ROWS[2][3:]], cache, chunk_len)
        tiny_models.assert_rows_close(got, [expected[0][10:], expected[1][9:], expected[2][3:]])


@pytest.mark.parametrize("layout", ["full", "ring+2"])
def test_take_rows(layout, expected):
    cut = [11, 5, 2]
    _, cache = tiny_models.feed(MODEL, PARAMS, [row[:n] for row, n in zip(ROWS, cut, strict=True)], empty(layout), 3)
    taken = cache_rows.take_rows(cache, jnp.asarray([1, 0, 1], jnp.int32))
    np.testing.assert_array_equal(taken.length_B, [5, 11, 5])
    tails = [ROWS[1][5:], ROWS[0][11:], ROWS[1][5:8]]
    got, _ = tiny_models.feed(MODEL, PARAMS, tails, taken, 3)
    tiny_models.assert_rows_close(got, [expected[1][5:], expected[0][11:], expected[1][5:8]])
    # One prompt, many samples.
    many = cache_rows.take_rows(cache_rows.take_rows(cache, jnp.asarray([0])), jnp.zeros(3, jnp.int32))
    got, _ = tiny_models.feed(MODEL, PARAMS, [ROWS[0][11:]] * 3, many, 3)
    tiny_models.assert_rows_close(got, [expected[0][11:]] * 3)


# Half-precision caches: every key and value is off by at most half a unit in its last place, in three layers.
@pytest.mark.parametrize("chunk_len", [1, 2 * W + 1])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_cache(dtype, chunk_len, expected):
    cache = tiny_models.empty_cache(tiny_models.MIXED, len(ROWS), dtype=dtype)
    got, _ = tiny_models.feed(MODEL, PARAMS, ROWS, cache, chunk_len)
    error = np.concatenate([(one - other).ravel() for one, other in zip(got, expected, strict=True)])
    # Six independent roundings (keys and values of three layers), each some 0.4 of this unit, into logits of standard
    # deviation 1.5, scores of a few times that: some 1.5 to 5 units. No rounding at all would be none.
    unit = float(jnp.finfo(dtype).eps) / 2
    assert unit / 4 < np.sqrt(np.mean(error**2)) < 6 * unit
