"""Nothing reaches back: later tokens, padding, and what unused cache memory holds."""

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.attention import blockwise, select, visibility
from jdecode.cache import kv_cache
from jdecode.models import transformer
from tests import tiny_models

W = tiny_models.WINDOW
LEN = 3 * W + 1
MODEL = transformer.Transformer(tiny_models.MIXED)
PARAMS = tiny_models.random_params(tiny_models.MIXED)
PROMPT = tiny_models.random_rows([LEN], seed=14)[0]
EARLIER = tiny_models.random_rows([LEN - 2], seed=15)[0]


def _changed(j: int) -> list[int]:
    return [*PROMPT[:j], PROMPT[j] % 28 + 1, *PROMPT[j + 1 :]]


# One batch is the prompt LEN times; in the other, row j has another token j. Both run through the same program, so
# equal rows must agree to the last bit.
SAME, CHANGED = [PROMPT] * LEN, [_changed(j) for j in range(LEN)]


def _without_cache(rows: list[list[int]]) -> list[np.ndarray]:
    return tiny_models.whole(MODEL, PARAMS, rows, LEN)


def _through_cache(rows: list[list[int]], *, slack: int, chunk_len: int, earlier: bool) -> list[np.ndarray]:
    cache = tiny_models.empty_cache(tiny_models.MIXED, LEN, slack=slack)
    if earlier:
        _, cache = tiny_models.feed(MODEL, PARAMS, [EARLIER] * LEN, cache, chunk_len)
    return tiny_models.feed(MODEL, PARAMS, rows, cache, chunk_len)[0]


RUNS = {"without cache": _without_cache}
for slack, chunk_len in [(0, LEN), (0, W + 1), (2, 3)]:
    for earlier in (False, True):
        name = f"slack {slack}, chunks of {chunk_len}, {'rolled' if earlier else 'fresh'}"
        RUNS[name] = functools.partial(_through_cache, slack=slack, chunk_len=chunk_len, earlier=earlier)


# A prompt longer than the window let early tokens attend to later ones, where the ring was overwritten while its mask
# went by slots; the repair missed a cache already rolled (Lightning-AI/litgpt#2182, #2215).
@pytest.mark.parametrize("run", RUNS)
def test_a_token_changes_nothing_before_it(run):
    before, after = RUNS[run](SAME), RUNS[run](CHANGED)
    for j in range(LEN):
        np.testing.assert_array_equal(after[j][:j], before[j][:j])
        # The full layer sees token j from everywhere after it.
        assert (np.abs(after[j][j:] - before[j][j:]).max(axis=-1) > 1e-4).all()


LAYOUTS = [(0, "auto"), (2, "auto"), (0, "full")]
ROWS = tiny_models.random_rows([2 * W + 3, W - 1, 1], seed=16)
RUN_LENS = [W + 1, 3]


def _is_empty(position_BS, length_B1):
    del length_B1
    return position_BS == int(visibility.EMPTY)


def _feed(cache: kv_cache.KVCache, chunk_len: int, padding: int = 0) -> list[np.ndarray]:
    logits, cache = tiny_models.feed(MODEL, PARAMS, ROWS, cache, chunk_len, padding)
    more, _ = tiny_models.feed(MODEL, PARAMS, [row[-1:] for row in ROWS], cache, 1)
    return logits + more


# Pages that were never written, or freed, were read (pegainfer-project/pegainfer#291): zeros hid it.
@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("chunk_len", RUN_LENS)
@pytest.mark.parametrize(("slack", "layout"), LAYOUTS)
def test_unused_memory_is_not_read(slack, layout, chunk_len, poison):
    clean = tiny_models.empty_cache(tiny_models.MIXED, 3, slack=slack, layout=layout)
    poisoned = tiny_models.fill_unused(clean, poison, is_unused=_is_empty)
    assert not np.array_equal(poisoned.stores[0].keys.block(0, 1), clean.stores[0].keys.block(0, 1))
    for got, expected in zip(_feed(poisoned, chunk_len), _feed(clean, chunk_len), strict=True):
        np.testing.assert_array_equal(got, expected)


# What padding holds is nothing: not for its own row, not for the others (Blaizzy/mlx-vlm#1542).
@pytest.mark.parametrize("chunk_len", RUN_LENS)
@pytest.mark.parametrize(("slack", "layout"), LAYOUTS)
def test_padding_tokens_are_not_seen(slack, layout, chunk_len):
    runs = [
        _feed(tiny_models.empty_cache(tiny_models.MIXED, 3, slack=slack, layout=layout), chunk_len, padding)
        for padding in (0, 17)
    ]
    for got, expected in zip(*runs, strict=True):
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("chunk_len", [1, W + 1])
@pytest.mark.parametrize(("slack", "layout"), [(2, "auto"), (2, "full")])
def test_taken_back_tokens_are_not_read(slack, layout, chunk_len):
    """Slots that hold a position past the length."""
    _, cache = tiny_models.feed(
        MODEL, PARAMS, [EARLIER] * 3, tiny_models.empty_cache(tiny_models.MIXED, 3, slack=slack, layout=layout), 3
    )
    cache = kv_cache.truncate(cache, jnp.asarray([LEN - 2, LEN - 3, LEN - 5], jnp.int32))

    def is_dead(position_BS, length_B1):
        return position_BS >= length_B1

    poisoned = tiny_models.fill_unused(cache, 1e4, is_unused=is_dead)
    clean_rows = np.asarray(cache.stores[2].keys.block(0, 32))
    assert not np.array_equal(poisoned.stores[2].keys.block(0, 32), clean_rows)
    for got, expected in zip(_feed(poisoned, chunk_len), _feed(cache, chunk_len), strict=True):
        np.testing.assert_array_equal(got, expected)


EXPIRED = [
    ("small blocks", 0, "full", "int8"),
    ("small blocks", 0, "full", "int4"),
    ("reference", 4, "auto", "bfloat16"),
]
EXPIRED += [
    pytest.param(*case, dtype, marks=pytest.mark.slow)
    for case in (("small blocks", 0, "full"), ("reference", 4, "auto"))
    for dtype in config.CACHE_DTYPES
    if dtype != "auto" and (*case, dtype) not in EXPIRED
]


# What lies behind a window was handed to others and read all the same, with a quantised cache and layers of two kinds
# (vllm-project/vllm#42273). A ring has such slots for as long as it has slack; the layout full keeps them all.
@pytest.mark.parametrize(("backend", "slack", "layout", "dtype"), EXPIRED)
def test_expired_tokens_are_not_read(backend, slack, layout, dtype, monkeypatch):
    monkeypatch.setitem(select.BACKENDS, "small blocks", functools.partial(blockwise.attend, block_size=4))
    model = dataclasses.replace(MODEL, backend=backend)
    rows = [EARLIER, EARLIER[:-3], EARLIER[: W - 1]]  # the last has not filled its window
    cache = tiny_models.empty_cache(tiny_models.MIXED, 3, slack=slack, layout=layout, dtype=dtype)
    _, cache = tiny_models.feed(model, PARAMS, rows, cache, 3)
    poisoned = cache
    for idx, layer in enumerate(tiny_models.MIXED.layers[:2]):

        def is_expired(position_BS, length_B1, num_sinks=layer.num_sinks):
            return (position_BS <= length_B1 - W) & (position_BS >= num_sinks)

        poisoned = tiny_models.fill_unused(poisoned, 1e4, is_unused=is_expired, layers=[idx])
        before, after = (
            np.asarray(own.stores[idx].keys.block(0, own.stores[idx].keys.num_slots)) for own in (cache, poisoned)
        )
        is_changed_B = (before != after).any(axis=(1, 2, 3))
        assert is_changed_B[0] and not is_changed_B[2]
    tails = [row[-7:] for row in ROWS]
    got, expected = (tiny_models.feed(model, PARAMS, tails, own, 3)[0] for own in (poisoned, cache))
    for own, row in zip(got, expected, strict=True):
        assert np.isfinite(row).all()
        np.testing.assert_array_equal(own, row)
