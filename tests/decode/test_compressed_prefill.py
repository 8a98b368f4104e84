"""Prompts read into a cache that keeps a part of them, beside a plain model in float64 with explicit lists of keys."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import allocate, compress
from jdecode.decode import compressed_prefill, prefill
from jdecode.models import transformer
from tests import plain_transformer, tiny_models

EMPTY = int(visibility.EMPTY)
# A ring and two layers that are compressed, each with its own rope.
MODEL = dataclasses.replace(
    tiny_models.MIXED,
    vocab_size=11,
    layers=(tiny_models.MIXED.layers[2], tiny_models.MIXED.layers[0], tiny_models.MIXED.layers[2]),
)
FULL = (0, 2)
PARAMS = tiny_models.random_params(MODEL)
ROWS = tiny_models.random_rows([17, 4, 9], MODEL.vocab_size)
HOW = compress.Compression(budget=7, num_recent=3, smoothing=3, num_new=5)


def model_of(backend: str = "auto") -> transformer.Transformer:
    return transformer.Transformer(MODEL, backend=backend)


def read(rows, how=HOW, *, dtype="float32", chunk_len=512, capacity=32):
    config = config_lib.CacheConfig(dtype=dtype)
    cache = allocate.init_cache(
        MODEL, config, batch_size=len(rows), capacity=capacity, prompt_capacity=18, compute_dtype="float32"
    )
    # What nobody wrote is no number.
    cache = tiny_models.fill_unused(cache, np.nan, is_unused=lambda position, length: position == EMPTY)
    return compressed_prefill.prefill(model_of(), {"params": PARAMS}, rows, cache, how, chunk_len=chunk_len)


def plain(
    tokens: list[int], num_prompt: int, how=HOW, held: dict[tuple[int, int], list[int]] | None = None
) -> tuple[np.ndarray, dict[int, list[int]]]:
    """Runs a text whose first tokens are a prompt: the logits of each place, and what each layer keeps of the prompt.

    Scores are computed from projections, turned by their true positions; nothing of the package's cache is used.

    Args:
      held: for a layer and a place after the prompt, the positions that its query sees; ``None`` for those that were
        kept of the prompt, and all after it.
    """
    stream = [np.asarray(PARAMS["embedding"]["weight"], np.float64)[token] for token in tokens]
    group, kept = MODEL.num_heads // MODEL.num_kv_heads, {}
    for idx, layer in enumerate(MODEL.layers):
        own = PARAMS[f"layers_{idx}"]
        normed = [plain_transformer._norm(x, own["attention_norm"], MODEL) for x in stream]
        sides = [
            [plain_transformer._linear(x, own["attention"][name]) for x in normed] for name in ("query", "key", "value")
        ]
        q, k = ([plain_transformer._rotate(x, t, layer.rope) for t, x in enumerate(side)] for side in sides[:2])

        def weights(t: int, n: int, seen: list[int], q=q, k=k) -> list[float]:
            raw = [math.exp(q[t][n] @ k[s][n // group] / math.sqrt(MODEL.head_dim)) for s in seen]
            return [weight / sum(raw) for weight in raw]

        if idx in FULL:
            received, recent = np.zeros(num_prompt), range(max(num_prompt - how.num_recent, 0), num_prompt)
            for t in recent:
                for n in range(MODEL.num_heads):
                    received[: t + 1] += weights(t, n, list(range(t + 1)))
            others, reach = range(recent[0]), how.smoothing // 2
            worth = {p: max(received[o] for o in others if abs(o - p) <= reach) for p in others}
            best = sorted(others, key=lambda p: -worth[p])[: how.budget - len(recent)]
            kept[idx] = sorted([*best, *recent])
        for t, x in enumerate(stream):
            seen = [s for s in range(t + 1) if layer.window is None or t - s < layer.window]
            if idx in FULL and t >= num_prompt:
                seen = [*kept[idx], *range(num_prompt, t + 1)] if held is None else held[idx, t]
            heads = [
                sum(w * sides[2][s][n // group] for w, s in zip(weights(t, n, seen), seen, strict=True))
                for n in range(MODEL.num_heads)
            ]
            stream[t] = x + plain_transformer._linear(np.stack(heads), own["attention"]["output"])
        for t, x in enumerate(stream):
            y = plain_transformer._norm(x, own["feed_forward_norm"], MODEL)
            stream[t] = x + plain_transformer._feed_forward(y, own["feed_forward"], MODEL)
    head = np.asarray((PARAMS["embedding"] if MODEL.tie_embeddings else PARAMS["head"])["weight"], np.float64)
    return np.stack([head @ plain_transformer._norm(x, PARAMS["final_norm"], MODEL) for x in stream]), kept


def kept_of(cache, layer: int, row: int) -> list[int]:
    position = np.asarray(cache.positions[cache.layout_idx[layer]][row])
    return position[position < int(cache.length_B[row])].tolist()


def test_beside_a_plain_model():
    more = tiny_models.random_rows([4, 4, 4], MODEL.vocab_size, seed=7)
    cache, logits_BV = read(ROWS)
    texts = [plain([*row, *new], len(row)) for row, new in zip(ROWS, more, strict=True)]
    for row, ids in enumerate(ROWS):
        logits, kept = texts[row]
        np.testing.assert_allclose(logits_BV[row], logits[len(ids) - 1], rtol=0, atol=tiny_models.LOGITS_ATOL)
        assert {layer: kept_of(cache, layer, row) for layer in FULL} == kept
    assert kept_of(cache, 0, 0) != kept_of(cache, 2, 0)  # layers choose on their own
    # One new token, then a block of three: each query sees what was kept and what is new before it, by positions.
    for first, end in ((0, 1), (1, 4)):
        tokens_BT, num_B = tiny_models.padded([new[first:end] for new in more], end - first)
        got, cache = tiny_models.apply(model_of(), PARAMS, tokens_BT, cache, num_B)
        for row, ids in enumerate(ROWS):
            want = texts[row][0][len(ids) + first : len(ids) + end]
            np.testing.assert_allclose(got[row], want, rtol=0, atol=tiny_models.LOGITS_ATOL)


# Positions were counted anew from the rows that were left, and a block after an eviction saw by their order
# (rajveer43/VeloxQuant-MLX#137, #370). Which tokens go is held against lists in tests/cache/test_compress.py.
def test_evictions_while_text_is_written_move_no_position():
    how, new = dataclasses.replace(HOW, num_new=None), tiny_models.random_rows([9, 9, 9], MODEL.vocab_size, seed=7)
    cache, _ = read(ROWS, how)
    held, logits = [{} for _ in ROWS], [[] for _ in ROWS]
    for first, end in ((0, 1), (1, 4), (4, 7), (7, 8), (8, 9)):  # single tokens, and blocks of three
        tokens_BT, num_B = tiny_models.padded([row[first:end] for row in new], end - first)
        got, cache = tiny_models.apply(model_of(), PARAMS, tokens_BT, cache, num_B)
        for row, ids in enumerate(ROWS):
            logits[row].extend(np.asarray(got[row]))
            for layer in FULL:
                left = sorted(kept_of(cache, layer, row))
                held[row] |= {(layer, t): [p for p in left if p <= t] for t in range(len(ids) + first, len(ids) + end)}
    for row, ids in enumerate(ROWS):
        want = plain([*ids, *new[row]], len(ids), how, held[row])[0][len(ids) :]
        np.testing.assert_allclose(np.stack(logits[row]), want, rtol=0, atol=tiny_models.LOGITS_ATOL)
        for left in (held[row][layer, len(ids) + 8] for layer in FULL):
            assert len(left) == 7 < left[-1] - left[0]  # with gaps


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_a_row_is_what_it_is_alone(dtype):
    cache, logits_BV = read(ROWS, dtype=dtype)
    tokens_B1 = jnp.asarray([[3], [5], [7]])
    after_BTV, _ = tiny_models.apply(model_of("reference"), PARAMS, tokens_B1, cache)
    # Chunks that cut elsewhere; a row of 4 tokens has no other than its end to read.
    for row, ids in enumerate(ROWS):
        alone, logits_1V = read([ids], dtype=dtype, chunk_len=5)
        assert [kept_of(alone, layer, 0) for layer in FULL] == [kept_of(cache, layer, row) for layer in FULL]
        atol = tiny_models.LOGITS_ATOL if dtype == "float32" else 0.2  # another chunk rounds to another step of 8 bits
        np.testing.assert_allclose(logits_1V[0], logits_BV[row], rtol=0, atol=atol)
        if dtype == "float32":
            alone_BTV, _ = tiny_models.apply(model_of(), PARAMS, tokens_B1[row : row + 1], alone)
            np.testing.assert_allclose(alone_BTV[0], after_BTV[row], rtol=0, atol=atol)


def test_a_prompt_that_has_no_more_tokens_than_the_budget_keeps_all():
    rows = [ids[:6] for ids in ROWS]
    cache, logits_BV = read(rows)
    whole = tiny_models.empty_cache(MODEL, 3)
    whole, expected_BV = prefill.prefill(model_of(), {"params": PARAMS}, rows, whole)
    tokens_B1 = jnp.asarray([[3], [5], [7]])
    got, _ = tiny_models.apply(model_of(), PARAMS, tokens_B1, cache)
    expected, _ = tiny_models.apply(model_of(), PARAMS, tokens_B1, whole)
    np.testing.assert_allclose(logits_BV, expected_BV, rtol=0, atol=tiny_models.LOGITS_ATOL)
    np.testing.assert_allclose(got, expected, rtol=0, atol=tiny_models.LOGITS_ATOL)


def test_what_is_refused():
    with pytest.raises(ValueError, match="capacity: expected room for 19 tokens in row 0"):
        read([[1] * 19])
    with pytest.raises(ValueError, match="row 1: expected at least one token"):
        read([[1] * 9, []])
    cache, _ = read(ROWS[:1])
    prefill.check_room(cache, [5])
    with pytest.raises(ValueError, match=r"expected room for 23 tokens in row 0 \(17 held, 6 more\), got 22 slots"):
        prefill.check_room(cache, [6])


def test_the_cache_is_the_one_that_the_plan_allocates():
    config = config_lib.CacheConfig(budget=7, eviction="h2o", num_recent=3)
    how = compress.compression(config, 5)
    assert how is not None
    cache, _ = read(ROWS, how)
    planned = allocate.init_compressed(MODEL, config, batch_size=3, capacity=32, num_new=5, compute_dtype="float32")
    assert jax.tree.structure(planned) == jax.tree.structure(cache)
    assert [leaf.shape for leaf in jax.tree.leaves(planned)] == [leaf.shape for leaf in jax.tree.leaves(cache)]
