"""``prefix_cache=`` of ``lm.generate`` and ``lm.stream``: the texts are those of a cold run, whatever else is asked."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import jdecode
from tests import tiny_model
from tests.serving.prefix_reading import CONFIG, LM, check_accounts, init, make_lm, text
from tests.speculative import drafts_under_test

SEEDED = jdecode.SamplingConfig(temperature=0.9, top_p=0.95, seed=5)


def same_as_cold(prefixes: jdecode.PrefixCache, prompts, **options) -> dict:
    """Checks texts and log-probabilities, and returns the statistics of the run with the prefix cache."""
    options = {"max_new_tokens": 9, "logprobs": 0, **options}
    cold = LM.generate(prompts, **options)
    warm = LM.generate(prompts, prefix_cache=prefixes, **options)
    assert tiny_model.rows(cold) == tiny_model.rows(warm)
    assert cold.logprobs is not None and warm.logprobs is not None
    np.testing.assert_allclose(warm.logprobs, cold.logprobs, atol=1e-4)
    assert warm.prompt_tokens == cold.prompt_tokens and warm.stats["prompt_tokens"] == cold.stats["prompt_tokens"]
    assert "prefix_tokens_reused" not in cold.stats
    for count in ("drafted", "accepted", "target_calls"):
        assert warm.stats.get(count) == cold.stats.get(count)
    check_accounts(prefixes)
    return dict(warm.stats)


def test_ragged_prompts_with_a_ring_that_wraps():
    prefixes, base = init(), text(19)
    assert same_as_cold(prefixes, [base, text(3, seed=3), text(11, seed=4)])["prefix_tokens_reused"] == 0
    prompts = [base, [*text(3, seed=3), 5, 6], base + text(9, seed=6)]
    assert same_as_cold(prefixes, prompts)["prefix_tokens_reused"] == 18 + 3 + 19


def test_samples_share_what_was_read():
    prefixes, base = init(), text(19)
    for prompt, reused in ((base, 0), ([*base, 7], 19)):
        stats = same_as_cold(prefixes, [prompt], num_samples=2, sampling=SEEDED)
        assert stats["prefix_tokens_reused"] == reused
    assert prefixes.statistics.prompts == 2


COUPLED = {"num_samples": 2, "sampling": SEEDED, "verify": "coupled"}


@pytest.mark.parametrize(
    "kind, options",
    [
        ("ngram", {}),
        ("model", COUPLED),
        pytest.param("ngram", COUPLED, marks=pytest.mark.slow),
        pytest.param("model", {}, marks=pytest.mark.slow),
        pytest.param("layer_skip", {}, marks=pytest.mark.slow),
    ],
)
def test_drafts(kind, options):
    prefixes, base = init(), text(11)
    drafting = {"draft": drafts_under_test.make(kind, LM), "num_draft_tokens": 3, "adaptive_draft": False, **options}
    for prompt, reused in ((base, 0), ([*base, 3, 4], 11)):
        # A text that says its prompt again, and then goes on alone, gives the look-up something to find.
        repeating = {"transforms": [tiny_model.RepeatPrompt()], "max_new_tokens": 19}
        stats = same_as_cold(prefixes, [prompt], **repeating, **drafting)
        assert stats["prefix_tokens_reused"] == reused and stats["accepted"] > 0
    assert prefixes.statistics.tokens_reused == 11  # a request without a draft shares with them
    assert same_as_cold(prefixes, [[*base, 3, 4]])["prefix_tokens_reused"] == 12


def test_stream_is_that_of_a_cold_run():
    prefixes, base = init(), text(19)
    for reused in (0, 18):
        stream = LM.stream([base], max_new_tokens=9, logprobs=0, prefix_cache=prefixes, steps_per_look=2)
        tokens = [token for chunk in stream for token in chunk.token_ids]
        assert stream.result is not None and stream.result.stats["prefix_tokens_reused"] == reused
        assert [tokens] == tiny_model.rows(LM.generate([base], max_new_tokens=9, logprobs=0))


def test_stream_that_is_left_holds_nothing():
    prefixes, base = init(), text(19)
    stream = LM.stream([base], max_new_tokens=9, logprobs=0, prefix_cache=prefixes)
    assert prefixes.statistics.prompts == 0  # nothing is read before somebody reads
    next(iter(stream))
    check_accounts(prefixes)
    assert same_as_cold(prefixes, [base])["prefix_tokens_reused"] == 18


def test_conversations_refuse_one():
    with pytest.raises(
        TypeError, match=r"^prefix_cache: expected an option of a conversation \(.*\), got another; leave"
    ):
        LM.chat_session(prefix_cache=init())  # pyright: ignore[reportCallIssue]


def test_what_cannot_be_honoured_is_refused_before_anything_is_computed():
    prefixes = init()
    for options, error, match in (
        ({"prefix_cache": "folder"}, TypeError, "prefix_cache: expected a PrefixCache, got str"),
        ({"cache": jdecode.CacheConfig(dtype="int8")}, ValueError, "cache dtype: expected float32, .* got int8"),
    ):
        with pytest.raises(error, match=match):
            LM.stream([[1, 2]], **{"prefix_cache": prefixes, **options})
    with pytest.raises(ValueError, match="prefix_cache: expected one that was made for this model"):
        make_lm(dataclasses.replace(CONFIG, norm_eps=1e-4)).stream([[1, 2]], prefix_cache=prefixes)


def test_error_of_the_model_is_an_error_of_the_request_alone():
    weight = LM.params["params"]["embedding"]["weight"]
    params = {"params": {**LM.params["params"], "embedding": {"weight": weight.at[7].set(jnp.nan)}}}
    lm = dataclasses.replace(LM, params=params)
    prefixes = lm.init_prefix_cache(num_pages=20, page_len=2)
    sampling = jdecode.SamplingConfig(banned_token_ids=(7,))
    for _ in range(2):
        with pytest.raises(
            FloatingPointError, match=r"^logits of row 0: expected finite numbers, .* after 0 new tokens"
        ):
            lm.generate([[1, 2, 7]], max_new_tokens=9, logprobs=0, sampling=sampling, prefix_cache=prefixes)
        assert prefixes.statistics.pages_held == 0
    check_accounts(prefixes)
