"""Caches of every kind with a draft: greedy text is what the same cache writes without one."""

import dataclasses
import functools
from typing import Any

import pytest

from jdecode import config, generation, language_model, sampling
from jdecode.models import transformer
from tests import tiny_model, tiny_models
from tests.speculative import drafts_under_test

NUM_NEW, G = 40, 4
LEAST_GAP = 1e-3  # nats; blocks of other widths differ by less than 2e-4
PROMPTS = [[5, 6, 7, 8, 9, 10, 5, 6, 7, 8, 9, 10, 5, 6, 7], [20, 21, 22, 20, 21, 22, 20], [11, 17]]
MODEL = dataclasses.replace(tiny_models.MIXED, layers=(config.LayerConfig(), config.LayerConfig()))

GROUPS: dict[str, Any] = {"group_len": 8, "slack": G}  # with less slack, on either side, other tokens would be exact
CACHES = {
    "paged": config.CacheConfig(layout="paged", page_len=8),
    "int8 paged": config.CacheConfig(layout="paged", page_len=8, dtype="int8"),
    "snapkv": config.CacheConfig(budget=6, eviction="snapkv", num_recent=2),
    "int8_channel": config.CacheConfig(dtype="int8_channel", **GROUPS),
    "int4": config.CacheConfig(dtype="int4", **GROUPS),
    "ring with sinks": config.CacheConfig(),
}
LAYOUTS = {"paged": "Paged", "int8 paged": "Paged", "snapkv": "Kept", "ring with sinks": "Ring"}


@pytest.fixture(autouse=True)
def short_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves out the transforms that greedy texts have no use for: they take half of the time to compile."""
    monkeypatch.setattr(sampling, "standard_chain", lambda transforms: sampling.Chain((sampling.Temperature(),)))


@functools.cache
def model(name: str) -> language_model.LanguageModel:
    """Returns the model of a cache: each layer sees the whole text, or a window of 9 and 2 sinks."""
    params = {"params": tiny_models.random_params(MODEL, seed=2)}
    lm = language_model.LanguageModel(config=MODEL, model=transformer.Transformer(MODEL), params=params, tokenizer=None)
    return lm.with_window(9, num_sinks=2) if name == "ring with sinks" else lm


@functools.cache
def plain(name: str) -> generation.GenerateResult:
    """Returns what is written without a draft."""
    result = model(name).generate(PROMPTS, max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=2, cache=CACHES[name])
    assert tiny_model.least_gap(result) > LEAST_GAP
    return result


ORDINARY = {
    "paged": "model",
    "int8 paged": "ngram",
    "snapkv": "ngram",
    "int8_channel": "ngram",
    "int4": "model",
    "ring with sinks": "model",
}
CASES = [
    pytest.param(name, kind, marks=[] if ORDINARY[name] == kind else pytest.mark.slow)
    for name in CACHES
    for kind in ("model", "ngram")
]


@pytest.mark.parametrize(("name", "kind"), CASES)
def test_greedy_is_plain_greedy(name, kind):
    lm = model(name)
    stream = lm.stream(
        PROMPTS,
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        cache=CACHES[name],
        draft=drafts_under_test.make(kind, lm),
        num_draft_tokens=G,
        adaptive_draft=False,
    )
    for _ in stream:
        pass
    assert stream.result is not None
    assert tiny_model.rows(stream.result) == tiny_model.rows(plain(name))
    stats = stream.result.stats
    assert stats["tested"] > stats["accepted"] > 0
    # The latest tokens of a group lie in a ring of their own.
    expected = {LAYOUTS[name]} if name in LAYOUTS else {"Full", "Ring"}
    assert {type(own).__name__.removesuffix("Layout") for own in stream.cache.layouts} == expected


# A full layer said once that it could take back no more than its capacity, so that so many proposals were refused.
@pytest.mark.parametrize("kind", ["ngram", pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["full", "paged", "int8"])
def test_a_block_may_be_longer_than_the_cache(name, kind):
    lm, prompt = model(name), PROMPTS[0]
    own = {
        "full": config.CacheConfig(layout="full"),
        "paged": config.CacheConfig(layout="paged", page_len=11),
        "int8": config.CacheConfig(dtype="int8"),
    }[name]
    options: dict[str, Any] = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "cache": own}
    options["capacity"] = len(prompt) + NUM_NEW
    expected = lm.generate(prompt, logprobs=2, **options)
    assert tiny_model.least_gap(expected) > LEAST_GAP
    draft = drafts_under_test.make(kind, lm)
    stream = lm.stream(prompt, draft=draft, num_draft_tokens=64, adaptive_draft=False, **options)
    for _ in stream:
        pass
    assert stream.result is not None and stream.cache.max_len == len(prompt) + NUM_NEW == 55
    assert tiny_model.rows(stream.result) == tiny_model.rows(expected)
    assert stream.result.stats["tested"] > stream.result.stats["accepted"] > 0
