"""Text of any length: which layers get a window, memory that does not grow, and drafts and chats on top of it."""

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jdecode import chat_session, config, language_model, streaming
from jdecode.cache import layout_ring, ledger
from tests import tiny_model, tiny_models
from tests.speculative import drafts_under_test
from tests.test_chat_session import DIGITS, PLAIN, say, with_template

W, N = 9, 2
GREEDY = {"ignore_eos": True}


@pytest.fixture(scope="module")
def lm() -> language_model.LanguageModel:
    return tiny_model.load("llama_gqa").with_window(W, N)


def test_layers_by_hand():
    rope = [layer.rope for layer in tiny_models.MIXED.layers]
    model = streaming.with_window(tiny_models.MIXED, config.StreamingConfig(window=7, num_sinks=1))
    assert model.layers == (
        config.LayerConfig(window=4, rope=rope[0]),
        config.LayerConfig(window=4, num_sinks=2, rope=rope[1]),
        config.LayerConfig(window=7, num_sinks=1, rope=rope[2]),
    )
    assert dataclasses.replace(model, layers=tiny_models.MIXED.layers) == tiny_models.MIXED
    assert config.StreamingConfig(window=3).num_sinks == 4


def test_the_same_model_with_windows():
    base = tiny_model.load("llama_gqa")
    own = base.with_window(W, num_sinks=N)
    assert own.params is base.params and own.tokenizer is base.tokenizer
    assert own.model.config == own.config != base.config
    assert {(layer.window, layer.num_sinks) for layer in own.config.layers} == {(W, N)}


def test_what_would_be_no_use_is_refused(lm):
    base = tiny_model.load("llama_gqa")
    most = base.config.max_positions
    base.with_window(most - N, N)
    not_whole: Any = 3.0
    for act, message in [
        (lambda: base.with_window(most - N + 1, N), f"window: expected window and sinks of at most {most:,} positions"),
        (lambda: base.with_window(0), "window: expected a count of at least 1, got 0"),
        (lambda: base.with_window(not_whole), "window: expected a count of at least 1, got 3.0"),
        (lambda: base.with_window(3, -1), "num_sinks: expected a count of at least 0, got -1"),
        (lambda: lm.with_window(W), "window: expected a model with layers that have no window, got one whose every"),
    ]:
        with pytest.raises(ValueError) as refused:
            act()
        assert str(refused.value).startswith(message) and "\n" not in str(refused.value)
    layers: list[dict[str, Any]] = [{}, {"num_sinks": 1}, {"window": 3}]
    for own in layers:
        with pytest.raises(ValueError, match=r"^sink_positions: expected a window with sinks beside text, got none"):
            config.LayerConfig(**own, sink_positions="text")
    with pytest.raises(ValueError, match=r"^sink_positions: expected cache or text, got 'ring'"):
        config.LayerConfig(window=3, num_sinks=1, sink_positions="ring")


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_the_ledger_says_what_is_allocated(lm, dtype):
    cache_config = config.CacheConfig(dtype=dtype, slack=3)
    asked = config.StreamingConfig(window=W, num_sinks=N)
    plan = ledger.Plan(
        model=streaming.with_window(tiny_model.load("llama_gqa").config, asked),
        cache=cache_config,
        batch_size=3,
        capacity=500,
        compute_dtype="float32",
    )
    cache = lm.init_cache(batch_size=3, capacity=500, cache=cache_config)
    assert ledger.ledger(plan).num_bytes == cache.num_bytes
    assert cache.layouts == (layout_ring.RingLayout(window=W, slack=3, num_sinks=N),)
    assert cache.max_len is None


def test_nothing_grows_with_the_text_but_its_tokens(lm):
    """Past the trained length (256), too. Two buffers have a place a token: the output and the penalties' history."""
    cache_bytes, state_bytes, texts = [], [], []
    for num_tokens in (600, 1500):
        stream = lm.stream([5, 6, 7], max_new_tokens=num_tokens, steps_per_look=500, **GREEDY)
        list(stream)
        assert stream.result is not None
        cache_bytes.append(stream.result.stats["kv_cache_bytes"])
        state_bytes.append(sum(leaf.nbytes for leaf in jax.tree.leaves(stream._state)))
        texts.append(tiny_model.rows(stream.result)[0])
    assert cache_bytes[0] == cache_bytes[1] == lm.init_cache(batch_size=1, capacity=10**6).num_bytes
    assert state_bytes[1] - state_bytes[0] == 2 * (2048 - 1024) * 4
    assert texts[1][:600] == texts[0]


@pytest.mark.parametrize("kind", ["layer_skip", *(pytest.param(k, marks=pytest.mark.slow) for k in ("model", "ngram"))])
def test_a_draft_changes_no_token(lm, kind):
    rows = [[5, 6, 7] * 6, [9, 8]]
    plain = lm.generate(rows, max_new_tokens=40, **GREEDY)
    drafted = lm.generate(
        rows,
        max_new_tokens=40,
        draft=drafts_under_test.make(kind, lm),
        num_draft_tokens=3,
        adaptive_draft=False,
        **GREEDY,
    )
    assert drafted.stats["tested"] > drafted.stats["accepted"] > 0
    assert tiny_model.rows(drafted) == tiny_model.rows(plain)
    # A model as the draft has the window, too, and so a cache that does not grow.
    assert drafted.stats.get("draft_cache_bytes", 0) <= drafted.stats["kv_cache_bytes"] or kind == "ngram"


def test_a_draft_that_does_not_go_on_where_the_model_does(lm):
    """Its cache would grow with the text, and its proposals past the trained length (256) would be worth nothing."""
    base, prompt = tiny_model.load("llama_gqa"), [5, 6, 7]
    most = base.config.max_positions - len(prompt)
    message = (
        r"^draft: expected one that goes on past its trained length, as the target does, for a text of 257 tokens, got "
        r"one trained for 256; give one with a window \(draft=lm.with_window\(W\)\), or ngram$"
    )
    for act in (lm.stream, lm.generate):
        with pytest.raises(ValueError, match=message):
            act(prompt, max_new_tokens=most + 1, draft=base)
    with pytest.raises(ValueError, match=message):
        with_template(tiny_model.load_text(), PLAIN).with_window(W, N).chat_session(capacity=257, draft=base)
    # A text that it can hold, a draft that goes on, one without a cache, and a model that does not go on itself.
    lm.stream(prompt, max_new_tokens=most, draft=base)
    lm.chat_session(capacity=256, draft=base)
    lm.stream(prompt, max_new_tokens=most + 1, draft=lm)
    for kind in ("ngram", "layer_skip"):
        lm.stream(prompt, max_new_tokens=most + 1, draft=kind)
    base.stream(prompt, max_new_tokens=most + 1, draft=base)
    # What counts is the longer of the two: until there nothing is past the length that either was trained for.
    longer = dataclasses.replace(base, config=dataclasses.replace(base.config, max_positions=300))
    longer = dataclasses.replace(longer, model=dataclasses.replace(base.model, config=longer.config))
    lm.stream(prompt, max_new_tokens=297, draft=longer)
    longer.with_window(W, N).stream(prompt, max_new_tokens=297, draft=base)


def test_rows_alone_and_scores(lm):
    """What is written is what is scored, step by step and in chunks, in a batch and alone."""
    rows = [[5, 6, 7] * 6, [9, 8]]
    together = lm.generate(rows, max_new_tokens=30, logprobs=0, **GREEDY)
    texts = [row + new for row, new in zip(rows, tiny_model.rows(together), strict=True)]
    scores = lm.score(texts)
    for row, own, score in zip(rows, together.logprobs, scores, strict=True):
        np.testing.assert_allclose(score[len(row) - 1 :], own, rtol=0, atol=1e-4)
    full = tiny_model.load("llama_gqa").score(texts)
    for score, other in zip(scores, full, strict=True):
        np.testing.assert_allclose(score[: N + W - 1], other[: N + W - 1], rtol=0, atol=1e-4)
        assert np.abs(score[N + W :] - other[N + W :]).max() > 1e-3


def test_a_conversation_past_the_trained_length():
    base = with_template(tiny_model.load_text(), PLAIN)
    lm = base.with_window(60)
    assert streaming.is_endless(lm.config) and not streaming.is_endless(base.config)
    session = lm.chat_session(sampling=DIGITS)
    say(session, "the hat", num_new=200)
    result, messages = say(session, "in it", num_new=100)  # the model was trained for 256 tokens
    assert result.lengths[0] == 100
    alone = lm.chat_session(sampling=DIGITS)
    alone.messages = messages[:-1]
    again, _ = say(alone, "in it", num_new=100)
    assert tiny_model.rows(again) == tiny_model.rows(result)
    # A draft that sees everything, or a layout with every slot, keeps the trained length.
    assert lm.chat_session(draft=base)._capacity == 256
    assert lm.chat_session(cache=config.CacheConfig(layout="full"))._capacity == 256
    assert lm.chat_session(draft=lm)._capacity == chat_session.ENDLESS_CAPACITY
