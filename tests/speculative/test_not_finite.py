"""A token whose weights are not finite: with a draft the model fails just where it fails without one, or not at all.

``tiny_model.RepeatPrompt`` says what a row writes; the scripted draft proposes just that, and ``WRONG`` in one place.
The row of ``WRONG`` in the embedding is NaN, so that its keys and values are NaN in every layer.
"""

import dataclasses

import numpy as np
import pytest

from jdecode import config
from tests import tiny_model
from tests.speculative import drafts_under_test

G = 4
WRONG = 7
"""What ``ScriptedDraft`` proposes in the wrong place."""

SCRIPTS = [list(range(20, 47)), list(range(50, 60))]


def make(name: str, backend: str = "auto"):
    lm = tiny_model.with_nan(tiny_model.load(name), ("embedding", "weight"), WRONG)
    return dataclasses.replace(lm, model=dataclasses.replace(lm.model, backend=backend))


def run(lm, scripts, *, draft=None, **options):
    given = {} if draft is None else {"draft": draft, "num_draft_tokens": G, "adaptive_draft": False}
    options = {"max_new_tokens": 24, "transforms": [tiny_model.RepeatPrompt()], "ignore_eos": True, **options}
    return lm.generate(scripts, logprobs=0, **given, **options)


@pytest.mark.parametrize(
    ("name", "backend", "layout"),
    [
        ("llama_gqa", "auto", "auto"),
        ("llama_gqa", "reference", "auto"),
        ("mistral_w16", "auto", "auto"),
        ("mistral_w16", "auto", "full"),
    ],
)
def test_a_refused_proposal_harms_nobody(name, backend, layout):
    # At every place of the block, and last in the first place again and again.
    lm, draft = make(name, backend), drafts_under_test.ScriptedDraft((3, 1, 64, 2, 0))
    cache = config.CacheConfig(layout=layout)
    plain, result = run(lm, SCRIPTS, cache=cache), run(lm, SCRIPTS, cache=cache, draft=draft)
    assert result.stats["tested"] > result.stats["accepted"] > 0
    # The second row goes on by itself after its script.
    assert tiny_model.rows(result) == tiny_model.rows(plain)
    assert tiny_model.rows(plain)[0] == SCRIPTS[0][:24]
    assert plain.logprobs is not None and result.logprobs is not None
    assert np.isfinite(plain.logprobs).all()
    np.testing.assert_allclose(result.logprobs, plain.logprobs, rtol=0, atol=1e-4)


def test_slots_past_the_length_harm_nobody():
    # The first round leaves WRONG in the slots; after it nothing is proposed, and steps of one token see past it.
    lm, draft = make("llama_gqa"), drafts_under_test.ScriptedDraft((0,), num_proposed=(4, 0))
    result = run(lm, SCRIPTS, draft=draft)
    assert result.stats["drafted"] == len(SCRIPTS) * G
    assert tiny_model.rows(result) == tiny_model.rows(run(lm, SCRIPTS))


def test_a_token_that_is_written_fails_where_it_fails_without_a_draft():
    # The draft is the model without the fault: it proposes the token, which is right, and more tokens after it.
    whole, places = tiny_model.load("llama_gqa"), []
    for prompt, golden in zip(tiny_model.prompts("llama_gqa"), tiny_model.greedy("llama_gqa"), strict=True):
        for place in range(1, tiny_model.NUM_GREEDY - G):
            if golden[place] in [*prompt, *golden[:place]]:
                continue
            lm = tiny_model.with_nan(whole, ("embedding", "weight"), golden[place])
            with pytest.raises(FloatingPointError, match=f"after {place + 1} new tokens"):
                run(lm, [prompt], draft=whole, transforms=[])
            places.append(place)
    assert {place % (G + 1) for place in places} == set(range(G + 1))  # at every place of a block
