"""A quantised cache through whole models: close to float32, and the same whatever chunks, layout and draft."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.cache import allocate
from jdecode.models import transformer
from tests import tiny_model, tiny_models
from tests.speculative import drafts_under_test

DTYPES = ("int8", "fp8", "int8_channel", "int4")
MOST_OFF = {"int8": 0.5, "fp8": 2.0, "int8_channel": 0.5, "int4": 3.0}  # logits of about 5
MODEL = transformer.Transformer(config=tiny_models.MIXED, backend="blockwise", dtype="float32")
PARAMS = tiny_models.random_params(tiny_models.MIXED)
ROWS = tiny_models.random_rows((17, 5, 11))

ATOL = 5e-3
"""Other chunks sum in another order, and a number between two steps of 8 bits may then fall to either. A key more or
less moves some logit by over 1e-2 (``tests/models/test_transformer_cache.py``)."""


def _logits(dtype: str, chunk_len: int, **options) -> np.ndarray:
    cache = tiny_models.empty_cache(tiny_models.MIXED, len(ROWS), dtype=dtype, **options)
    return np.concatenate(tiny_models.feed(MODEL, PARAMS, ROWS, cache, chunk_len)[0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_close_to_float32_but_not_the_same(dtype):
    difference = np.abs(_logits(dtype, 17) - _logits("float32", 17))
    assert ATOL < difference.max() < MOST_OFF[dtype]
    assert difference.mean() < (0.05 if "int8" in dtype else 0.3)


# What should stay exact was quantised with the prompt (huggingface/transformers#35185). Of groups of 16 the first is
# stored when 4 tokens have come after it: to the query at 19, not to those before, in one block or right after it.
@pytest.mark.parametrize("dtype", ["int4", pytest.param("int8_channel", marks=pytest.mark.slow)])
def test_the_latest_tokens_are_exact_within_a_prompt_and_after_it(dtype):
    cache_config = config.CacheConfig(dtype=dtype, group_len=16)
    cache = allocate.init_cache(tiny_models.MIXED, cache_config, batch_size=2, capacity=32, compute_dtype="float32")
    text = tiny_models.random_rows([23])[0]
    whole = tiny_models.whole(MODEL, PARAMS, [text], 23)[0]
    heads, cache = tiny_models.feed(MODEL, PARAMS, [text, text[:17]], cache, 23)
    tails, _ = tiny_models.feed(MODEL, PARAMS, [[], text[17:]], cache, 1)
    for got in (heads[0], np.concatenate([heads[1], tails[1]])):
        off = np.abs(got - whole).max(axis=-1)
        assert off[:19].max() < tiny_models.LOGITS_ATOL < 2e-4 < off[19:].min()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("chunk_len", [1, 3, 4, 5, 9])
def test_chunked_is_whole(dtype, chunk_len):
    np.testing.assert_allclose(_logits(dtype, chunk_len), _logits(dtype, 17), atol=ATOL)


@pytest.mark.parametrize(
    "dtype", [name if name in ("int8", "int4") else pytest.param(name, marks=pytest.mark.slow) for name in DTYPES]
)
def test_going_on_from_every_cut_is_whole(dtype):
    text, cuts = ROWS[0], range(17)
    cache = tiny_models.empty_cache(tiny_models.MIXED, len(cuts), dtype=dtype)
    _, cache = tiny_models.feed(MODEL, PARAMS, [text[:cut] for cut in cuts], cache, 17)
    got, _ = tiny_models.feed(MODEL, PARAMS, [text[cut:] for cut in cuts], cache, 17)
    whole = _logits(dtype, 17)[:17]
    tiny_models.assert_rows_close(got, [whole[cut:] for cut in cuts], ATOL)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slack", [0, 3])
def test_ring_is_full(dtype, slack):
    ring, full = (_logits(dtype, 3, slack=slack, layout=layout) for layout in ("auto", "full"))
    np.testing.assert_allclose(ring, full, atol=ATOL)


@pytest.mark.parametrize("dtype", DTYPES)
def test_backends_agree(dtype):
    cache = tiny_models.empty_cache(tiny_models.MIXED, len(ROWS), dtype=dtype)
    plain = transformer.Transformer(config=tiny_models.MIXED, backend="reference", dtype="float32")
    got = np.concatenate(tiny_models.feed(plain, PARAMS, ROWS, cache, 5)[0])
    np.testing.assert_allclose(got, _logits(dtype, 5), atol=ATOL)


DRAFTS = [
    ("llama_gqa", "model", "int8", "auto"),
    ("mistral_w16", "ngram", "int8", "auto"),
    ("mistral_w16", "layer_skip", "fp8", "auto"),
    ("llama_gqa", "ngram", "int4", "auto"),
    ("llama_gqa", "ngram", "int4", "paged"),
    ("mistral_w16", "layer_skip", "int4", "auto"),
]
DRAFTS += [
    pytest.param(name, kind, dtype, layout, marks=pytest.mark.exhaustive)
    for name in ("llama_gqa", "mistral_w16")
    for kind in drafts_under_test.KINDS
    for dtype in ("int8", "fp8", "int8_channel", "int4")
    for layout in (("auto", "paged") if name == "llama_gqa" else ("auto",))
    if (name, kind, dtype, layout) not in DRAFTS
]


@pytest.mark.parametrize(("name", "kind", "dtype", "layout"), DRAFTS)
def test_greedy_with_a_draft_is_plain_greedy(name, kind, dtype, layout):
    lm = tiny_model.load(name)
    rows = [[5, 6, 7] * 6, [9, 8], [3] * 11]
    # Of 16 tokens the latest 4 are exact, whatever slack a draft of 3 needs.
    groups: dict[str, Any] = {"group_len": 16} if dtype in config.GROUPED_DTYPES else {}
    options: dict[str, Any] = {
        "max_new_tokens": 40,
        "ignore_eos": True,
        "cache": config.CacheConfig(dtype=dtype, layout=layout, **groups),
    }
    plain = lm.generate(rows, **options)
    drafted = lm.generate(rows, draft=drafts_under_test.make(kind, lm), num_draft_tokens=3, **options)
    assert drafted.stats["tested"] > drafted.stats["accepted"] > 0
    assert tiny_model.rows(drafted) == tiny_model.rows(plain)


@pytest.mark.parametrize("dtype", ["int8", "fp8"])
def test_bytes(dtype):
    cache = tiny_models.empty_cache(tiny_models.MIXED, 2, dtype=dtype, layout="full", capacity=32)
    K, H, L = tiny_models.MIXED.num_kv_heads, tiny_models.MIXED.head_dim, tiny_models.MIXED.num_layers
    stores = 2 * L * 2 * 32 * K * (H + 4)  # keys and values, rows, slots, heads: a byte a number, four a scale
    assert cache.num_bytes == stores + 4 * (2 * 32 + 2)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(cache.stores)}
    assert dtypes == {jnp.dtype("int8"), jnp.dtype("float32")}


@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
def test_bytes_of_groups(dtype):
    cache = tiny_models.empty_cache(tiny_models.MIXED, 2, dtype=dtype, layout="full", capacity=32, slack=3)
    K, H, L, Z = tiny_models.MIXED.num_kv_heads, tiny_models.MIXED.head_dim, tiny_models.MIXED.num_layers, 4
    latest = Z + (3 + 1) + 3  # a group, the slack and a quarter of a group after it, and the slack
    exact = 2 * latest * K * H * 4
    if dtype == "int8_channel":  # a byte a number; four a channel and group, and a token and head
        stores = 2 * 32 * K * H + 32 // Z * K * H * 4 + 32 * K * 4
    else:  # half a byte; twice four a channel and group, twice two a token and head, whose 6 channels are one run
        stores = 32 * K * H + 32 // Z * K * H * 8 + 32 * K * 4
    assert cache.num_bytes == 2 * (L * (stores + exact) + 4 * (32 + latest + 1))
