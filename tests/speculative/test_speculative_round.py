"""The round: one call of the target, caches that hold what the text says, nothing copied, nothing asked of the host."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.decode import loop
from jdecode.models import transformer
from jdecode.speculative import draft_layer_skip, draft_ngram, pace, speculation, verify
from tests import tiny_model
from tests.speculative import drafts_under_test, rounds

PROMPTS = [[5, 6, 7, 8, 9, 10, 11], [21, 22, 23], [31, 32, 33, 34, 35, 36, 37, 38, 39, 40, 41, 42]]


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
@pytest.mark.parametrize("num_draft_tokens", [1, *(pytest.param(num, marks=pytest.mark.slow) for num in (2, 3, 4)), 5])
def test_a_draft_that_is_the_target_is_always_accepted(num_draft_tokens, rule):
    lm = tiny_model.load("mistral_w16")
    most = (3, 0, 0, num_draft_tokens)  # also after rounds without proposals
    own = rounds.with_model(lm, num_draft_tokens, rule=rule, most=most)
    state = rounds.begin(lm, PROMPTS, own, max_new=200, temperature=0.9)
    for _ in range(50):
        state = rounds.run(lm, own, state, 1)
    counts = jax.tree.map(np.asarray, state.drafting.counts)
    assert counts.target_calls == 50
    assert counts.rounds_B.tolist() == [50, 50, 50]
    asked = sum(min(num_draft_tokens, most[turn % 4]) for turn in range(50))
    assert counts.drafted_B.tolist() == [asked] * 3
    assert counts.accepted_BG.sum(axis=1).tolist() == [asked] * 3
    assert state.decode.num_new_B.tolist() == [1 + 50 + asked] * 3


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_w16"])
def test_after_every_accept_count_both_caches_hold_the_text(name):
    lm = tiny_model.load(name)
    draft, G, most = drafts_under_test.noisy(lm), 3, (3, 2, 0, 3, 2)
    own = rounds.with_model(draft, G, most=most)
    state = rounds.begin(lm, PROMPTS, own, max_new=120)
    draft_lens, seen = [len(prompt) for prompt in PROMPTS], set()
    for turn in range(25):
        before_B, asked = np.asarray(state.decode.num_new_B), most[turn % len(most)]
        state = rounds.run(lm, own, state, 1)
        accepted_B = (np.asarray(state.decode.num_new_B) - before_B - 1).tolist()
        seen |= {(asked, accepted) for accepted in accepted_B}
        texts = [rounds.text(state, prompt, row) for row, prompt in enumerate(PROMPTS)]
        # The target has read all but the latest token. So has the draft, where it was asked, but its own last proposal,
        # which it has not read; where it paused, it is as it was.
        target_lens = [len(text) - 1 for text in texts]
        if asked:
            draft_lens = [
                length - (accepted == asked) for length, accepted in zip(target_lens, accepted_B, strict=True)
            ]
        check_cache(lm, state.decode.cache, texts, target_lens)
        check_cache(draft, state.drafting.memory["own"], texts, draft_lens)
    assert seen == {(asked, accepted) for asked in set(most) for accepted in range(asked + 1)}


def check_cache(lm, cache, texts: list[list[int]], lengths: list[int]) -> None:
    """Compares what a cache holds with what reading the beginnings of the texts gives."""
    assert cache.length_B.tolist() == lengths
    fresh = rounds.fresh_cache(lm, [text[:length] for text, length in zip(texts, lengths, strict=True)], slack=3)
    for layer, config_of_layer in enumerate(lm.config.layers):
        for row, length in enumerate(lengths):
            held, expected = rounds.rows_held(cache, row, layer), rounds.rows_held(fresh, row, layer)
            seen = range(max(0, length - (config_of_layer.window or length) + 1), length)
            got, want = (np.stack([own[position] for position in seen]) for own in (held, expected))
            np.testing.assert_allclose(got, want, atol=1e-4)


def test_a_round_of_five_with_four_accepted_is_one_call_over_six_places(monkeypatch):
    lm = tiny_model.load_text()
    widths = []
    apply = transformer.Transformer.__call__

    @chex.assert_max_traces(n=4)
    def traced(tokens_BT):
        widths.append(tokens_BT.shape[1])

    def counted(self, tokens_BT, *arguments, **options):
        traced(tokens_BT)
        return apply(self, tokens_BT, *arguments, **options)

    monkeypatch.setattr(transformer.Transformer, "__call__", counted)
    script = list(range(40, 61))
    result = lm.generate(
        [script],
        max_new_tokens=1 + 3 * 5,
        transforms=[tiny_model.RepeatPrompt()],
        draft=drafts_under_test.ScriptedDraft((4,)),
        num_draft_tokens=5,
        adaptive_draft=False,
    )
    assert tiny_model.rows(result) == [script[:16]]
    # Three rounds of five tokens each, the last of which has room for four proposals only.
    assert result.stats["target_calls"] == 3
    assert result.stats["target_places"] == 3 * 6
    assert result.stats["accepted"] == 4 + 4 + 4
    # Traced, beside the prompt's chunk: a block of six places, and a block of one for rounds without proposals.
    assert sorted(width for width in widths if width != 32) == [1, 6]


def test_a_draft_that_never_proposes_is_asked_ever_more_rarely():
    lm = tiny_model.load("llama_gqa")
    broken = tiny_model.with_nan(lm, ("head", "weight"))
    costs = pace.estimate("cpu", target_bytes=lm.weight_bytes, draft_share=0.1, is_drawn=True)
    own = dataclasses.replace(rounds.with_model(broken, 3), costs=costs)
    state = rounds.begin(lm, PROMPTS, own, max_new=100)
    asked_B = np.zeros(len(PROMPTS), int)
    for _ in range(90):
        asked_B += np.asarray(pace.want(state.drafting.pace)) > 0
        state = rounds.run(lm, own, state, 1)
    assert not state.drafting.counts.drafted_B.any() and state.decode.num_new_B.tolist() == [91] * len(PROMPTS)
    # Some first rounds, then one after each pause of 4, 8, 16, 32 and 64 rounds.
    assert (asked_B <= 9).all() and (asked_B >= 5).all()


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
def test_the_loop_holds_the_caches_once_and_never_asks_the_host(kind, monkeypatch):
    monkeypatch.setattr(rounds, "MAX_LEN", 4096)  # slots, so that a copy of the cache stands out
    lm = tiny_model.make(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=16,
        layers=(config.LayerConfig(), config.LayerConfig(), config.LayerConfig()),
    )
    draft, params = {
        "model": (rounds.with_model(lm, 4).draft, lm.params),
        "ngram": (draft_ngram.NgramDraft(), ()),
        "layer_skip": (draft_layer_skip.LayerSkipDraft.of(lm.model), ()),
    }[kind]
    own = speculation.Speculation(
        draft=draft, draft_params=params, num_draft_tokens=4, verify=verify.RULES["rejection"], costs=None
    )
    state = rounds.begin(lm, [[5, 6, 7], [8, 9]], own, max_new=20, temperature=0.7)
    program = loop._run.lower(own.step(lm.model, rounds.CHAIN), own.params(lm.params), state, jnp.int32(4))
    # A host callback, whatever its kind, is a custom call of that name; the rest are operations of their own.
    for word in ("callback", "infeed", "outfeed", "stablehlo.send", "stablehlo.recv"):
        assert word not in program.as_text()
    memory = program.compile().memory_analysis()
    assert memory is not None
    # A copy of the cache would be all of it; a conditional round the target's call makes one.
    assert memory.temp_size_in_bytes < 0.3 * rounds.num_bytes(state.decode.cache)
