"""Generation with a cache that keeps a part of the text: by the model's public functions, with numbers by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import cache_plan, config, generation, language_model
from jdecode import request as request_lib
from jdecode.cache import allocate, compress, ledger
from tests import tiny_model, tiny_models

FULL, RING = config.LayerConfig(), config.LayerConfig(window=4)
SHAPES = {
    "vocab_size": 11,
    "hidden_size": 12,
    "intermediate_size": 20,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "layers": (FULL, RING, FULL),
}
PROMPTS = tiny_models.random_rows([37, 5], 11)
NEW = 30
SNAPKV = config.CacheConfig(budget=8, eviction="snapkv", num_recent=3)
H2O = config.CacheConfig(budget=8, eviction="h2o", num_recent=3)
SLOT = 2 * 2 * 8 * 4
"""Bytes of keys and values of a slot: two sides of 2 heads of 8 in float32."""


@pytest.fixture(scope="module")
def lm() -> language_model.LanguageModel:
    return tiny_model.make(**SHAPES)


@pytest.fixture(scope="module")
def kept(lm):
    return lm.generate(PROMPTS, max_new_tokens=NEW, cache=SNAPKV, logprobs=0)


@pytest.fixture(scope="module")
def evicting(lm):
    return lm.generate(PROMPTS, max_new_tokens=NEW, cache=H2O, logprobs=0)


def test_a_budget_that_holds_the_text_changes_no_bit(lm):
    plain = lm.generate(PROMPTS, max_new_tokens=NEW, logprobs=0)
    for eviction, budget in (("snapkv", 37), ("h2o", 37 + NEW)):
        cache = config.CacheConfig(budget=budget, eviction=eviction)
        result = lm.generate(PROMPTS, max_new_tokens=NEW, logprobs=0, cache=cache)
        np.testing.assert_array_equal(result.tokens, plain.tokens)
        np.testing.assert_array_equal(result.logprobs, plain.logprobs)
        assert result.stats["kv_cache_bytes"] == plain.stats["kv_cache_bytes"]
        assert result.stats["tokens_evicted"] == 0


@pytest.mark.parametrize("dtype", [name for name in config.CACHE_DTYPES if name not in config.GROUPED_DTYPES])
@pytest.mark.parametrize(("eviction", "enough"), [("snapkv", 37), ("h2o", 37 + NEW)])
def test_a_budget_that_holds_the_text_is_the_same_plan_with_every_codec(eviction, enough, dtype):
    def plan(cache: config.CacheConfig) -> cache_plan.CachePlan:
        model = config.ModelConfig(**SHAPES)
        return cache_plan.plan(model, cache, "float32", longest_prompt=37, max_new_tokens=NEW, capacity=None)

    plain = plan(config.CacheConfig(dtype=dtype))
    assert plan(config.CacheConfig(dtype=dtype, eviction=eviction, budget=enough)) == plain
    less = plan(config.CacheConfig(dtype=dtype, eviction=eviction, budget=enough - 1))
    assert less.how is not None and less.prompt_capacity == 256


def test_bytes_and_what_was_evicted(kept, evicting):
    # Two layers of 8 + 64 slots with a table each, a ring of 4 with its own, a length; two rows.
    assert kept.stats["kv_cache_bytes"] == 2 * (2 * 72 * (SLOT + 4) + 4 * (SLOT + 4) + 4)
    assert kept.stats["tokens_evicted"] == 37 - 8
    # Two layers of 8 slots with a table and the attention that they got. The latest token is not fed.
    assert evicting.stats["kv_cache_bytes"] == 2 * (2 * 8 * (SLOT + 8) + 4 * (SLOT + 4) + 4)
    assert evicting.stats["tokens_evicted"] == (37 + NEW - 1 - 8) + (5 + NEW - 1 - 8)
    for result in (kept, evicting):  # the prompts had 256 slots a layer, one table for two layers
        assert result.stats["prompt_cache_bytes"] == 2 * (256 * (2 * SLOT + 4) + 4 * (SLOT + 4) + 4)


@pytest.mark.parametrize("cache", [SNAPKV, H2O], ids=lambda cache: cache.eviction)
def test_ledger_is_what_a_run_holds(cache, kept, evicting):
    plan = ledger.Plan(
        model=config.ModelConfig(**SHAPES), cache=cache, batch_size=2, capacity=256, compute_dtype="float32", num_new=64
    )
    result = kept if cache.eviction == "snapkv" else evicting
    assert ledger.ledger(plan).num_bytes == result.stats["kv_cache_bytes"]


def test_scores_of_a_continuation_are_those_of_writing_it(lm, kept, evicting):
    for cache, result in ((SNAPKV, kept), (H2O, evicting)):
        scores = lm.score_continuation(PROMPTS, tiny_model.rows(result), cache=cache)
        assert [score.dtype for score in scores] == [np.float32] * 2
        np.testing.assert_allclose(np.stack(scores), result.logprobs, rtol=0, atol=1e-4)
    # Of ragged continuations, without eviction, they are those of the whole text.
    more = [kept.tokens[0, :7].tolist(), kept.tokens[1, :1].tolist()]
    whole = lm.score([[*prompt, *ids] for prompt, ids in zip(PROMPTS, more, strict=True)])
    for row, score in enumerate(lm.score_continuation(PROMPTS, more)):
        np.testing.assert_allclose(score, whole[row][-len(more[row]) :], rtol=0, atol=1e-5)


@pytest.mark.parametrize("draft", ["ngram", pytest.param("layer_skip", marks=pytest.mark.slow)])
def test_a_draft_writes_the_same_text(lm, draft):
    options = {"max_new_tokens": NEW, "cache": SNAPKV, "sampling": config.SamplingConfig(temperature=1.0, seed=5)}
    plain = lm.generate(PROMPTS, logprobs=0, **options)
    drafted = lm.generate(PROMPTS, draft=draft, verify="coupled", adaptive_draft=False, **options)
    np.testing.assert_array_equal(drafted.tokens, plain.tokens)
    assert drafted.stats["tested"] > drafted.stats["accepted"] > 0  # so some stayed, and some were taken back
    assert drafted.stats["tokens_evicted"] == 37 - 8


@pytest.mark.slow
def test_rows_are_what_they_are_alone_streamed_or_in_samples(lm, evicting):
    alone = lm.stream(PROMPTS[0], max_new_tokens=NEW, cache=H2O, steps_per_look=7)
    assert [token for chunk in alone for token in chunk.token_ids] == tiny_model.rows(evicting)[0]
    twice = lm.generate(PROMPTS, max_new_tokens=NEW, cache=H2O, num_samples=2)
    np.testing.assert_array_equal(twice.tokens, np.repeat(evicting.tokens, 2, axis=0))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "int8", "fp8"])
def test_every_codec_writes_and_scores_alike(lm, dtype):
    plain = lm.generate(PROMPTS, max_new_tokens=NEW, logprobs=0, cache=config.CacheConfig(dtype=dtype))
    for cache in (SNAPKV, H2O):
        enough = dataclasses.replace(cache, dtype=dtype, budget=37 + NEW)
        same = lm.generate(PROMPTS, max_new_tokens=NEW, logprobs=0, cache=enough)
        np.testing.assert_array_equal(same.logprobs, plain.logprobs)
        result = lm.generate(PROMPTS, max_new_tokens=NEW, logprobs=0, cache=dataclasses.replace(cache, dtype=dtype))
        rows = tiny_model.rows(result)
        scores = lm.score_continuation(PROMPTS, rows, cache=dataclasses.replace(cache, dtype=dtype))
        # Float32 sums of another block may round a key to another step of the stored dtype.
        np.testing.assert_allclose(np.stack(scores), result.logprobs, rtol=0, atol=0.05)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"cache": H2O, "draft": "ngram"}, "draft: expected a cache that can take tokens back, got the eviction h2o"),
        ({"cache": SNAPKV, "capacity": 99}, "capacity: expected none beside the eviction snapkv"),
    ],
)
def test_what_does_not_go_together(lm, options, words):
    with pytest.raises(ValueError, match=words):
        lm.generate(PROMPTS, **options)


@pytest.mark.parametrize("eviction", config.EVICTIONS)
def test_a_step_writes_in_place(lm, eviction):
    caches = config.CacheConfig(budget=2048, eviction=eviction)
    cache = allocate.init_compressed(
        lm.config, caches, batch_size=2, capacity=4096, num_new=2048, compute_dtype="float32"
    )

    def run(params, cache, tokens_B1):
        def step(_, carry):
            logits_B1V, cache = lm.model.apply(params, carry[1], carry[0])
            return cache, jnp.argmax(logits_B1V, axis=-1).astype(jnp.int32)

        return jax.lax.fori_loop(0, 9, step, (cache, tokens_B1))

    compiled = jax.jit(run, donate_argnums=1).lower(lm.params, cache, jnp.ones((2, 1), jnp.int32)).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    # No array of keys is copied, of 16 numbers a slot; a few of one number a slot are there.
    assert memory.temp_size_in_bytes < sum(leaf.nbytes for leaf in jax.tree.leaves(cache.stores[0].keys))


def test_a_stream_refuses_more_tokens_than_there_are_slots_for(lm):
    how = compress.compression(SNAPKV, num_new=5)
    plan = cache_plan.CachePlan(model=lm.config, cache=config.CacheConfig(), compute_dtype="float32", capacity=40)

    def stream(max_new_tokens: int) -> generation.TextStream:
        request = request_lib.resolve(
            PROMPTS,
            vocab_size=11,
            tokenizer=None,
            end_token_ids=(),
            max_new_tokens=max_new_tokens,
            sampling=config.SamplingConfig(),
            steps_per_look=1,
        )
        return generation.TextStream(lm.model, lm.params, None, request, plan.init(2), how=how)

    stream(5)  # though 40 slots would not hold 37 tokens and 5
    with pytest.raises(ValueError, match="max_new_tokens: expected at most the 5 slots"):
        stream(6)


def test_other_doors_refuse_an_eviction(lm):
    with pytest.raises(ValueError, match="a cache is compressed after its prompt"):
        lm.init_cache(batch_size=1, capacity=9, cache=SNAPKV)
    with pytest.raises(ValueError, match="expected none in a conversation"):
        lm.chat_session(cache=H2O)
    rings = tiny_model.make(**{**SHAPES, "layers": (RING,)})
    with pytest.raises(ValueError, match="one whose every layer has one; leave snapkv out"):
        rings.generate(PROMPTS, cache=SNAPKV)
    with pytest.raises(ValueError, match="expected snapkv or h2o, got none; use init_cache"):
        allocate.init_compressed(
            lm.config, config.CacheConfig(), batch_size=1, capacity=9, num_new=1, compute_dtype="float32"
        )
    with pytest.raises(ValueError, match="row 1: expected at least one token"):
        lm.score_continuation(PROMPTS, [[1], []], cache=SNAPKV)
    with pytest.raises(ValueError, match="continuations: expected one for each of 2 prompts, got 1"):
        lm.score_continuation(PROMPTS, [[1]])
