"""With a draft the text is what it is without: greedy under both rules, and drawn under ``coupled``."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from jdecode import config
from tests import tiny_model
from tests.speculative import drafts_under_test

# Full layers, rings of 16 slots and the slack, and both: a prompt and 60 new tokens are over three windows.
MODELS = ("llama_gqa", "mistral_w16", "gemma3_text")
NUM_NEW = 60
LEAST_GAP = 1e-3  # nats; blocks of other widths differ by less than 2e-4, as below
SAMPLED = config.SamplingConfig(temperature=0.8, top_p=0.95)
PENALISED = config.SamplingConfig(
    temperature=0.8,
    top_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.2,
    frequency_penalty=0.1,
    no_repeat_ngram_size=3,
    min_new_tokens=5,
)


@pytest.fixture(autouse=True)
def forget_each_program():
    """Drops the programs of each test: all of this module's together would take more memory maps than a process has."""
    yield
    jax.clear_caches()


def ragged(lm, num_rows: int) -> list[list[int]]:
    """Returns prompts of different lengths, with repeats that prompt lookup finds."""
    random = np.random.default_rng(4)
    rows = []
    for row in range(num_rows):
        phrase = random.integers(3, lm.config.vocab_size, 4 + row).tolist()
        rows.append([*phrase, *random.integers(3, lm.config.vocab_size, 1 + 5 * row).tolist(), *phrase[:3]])
    return rows


def check_equal(
    lm, prompts, draft, num_draft_tokens, *, adaptive: bool, rule: str = "rejection", is_same: bool = False, **options
):
    """Compares texts and scores with those of plain decoding; ``is_same``: the draft is the target itself."""
    plain = lm.generate(prompts, max_new_tokens=NUM_NEW, logprobs=2, **options)
    speculation = {"draft": draft, "num_draft_tokens": num_draft_tokens, "verify": rule, "adaptive_draft": adaptive}
    result = lm.generate(prompts, max_new_tokens=NUM_NEW, logprobs=2, **speculation, **options)
    assert tiny_model.rows(result) == tiny_model.rows(plain)
    assert result.finish_reasons == plain.finish_reasons
    # Blocks of other widths sum in another order: float32, logits of about 10, 8 layers at most.
    np.testing.assert_allclose(result.logprobs, plain.logprobs, atol=2e-4)
    best = [[[top[0][0] for top in row] for row in own.top_logprobs] for own in (result, plain)]
    assert best[0] == best[1]
    # The test means something only where proposals are accepted, and refused unless the draft cannot be wrong.
    drafted, tested, accepted = (result.stats[name] for name in ("drafted", "tested", "accepted"))
    assert drafted >= tested >= accepted > 0
    assert (tested == accepted) == is_same
    return result


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_plain_greedy(name, kind):
    lm = tiny_model.load(name)
    check_equal(lm, ragged(lm, 4), drafts_under_test.make(kind, lm), 3, adaptive=name == "gemma3_text")


@pytest.mark.parametrize("rule", ["rejection", "coupled"])
def test_a_draft_that_is_the_target_is_accepted_whole(rule):
    lm = tiny_model.load("mistral_w16")
    options = {"sampling": dataclasses.replace(SAMPLED, seed=7)} if rule == "coupled" else {}
    result = check_equal(lm, ragged(lm, 4), lm, 3, adaptive=False, rule=rule, is_same=True, **options)
    # So each call of the target writes four tokens a row, but for the first token and the last round.
    assert result.stats["target_calls"] == -(-(max(result.lengths) - 1) // 4)


@functools.cache
def plain_greedy(name: str) -> list[list[int]]:
    """Returns what a model writes without a draft, past every end token."""
    lm = tiny_model.load(name)
    result = lm.generate(ragged(lm, 4), max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=2)
    assert tiny_model.least_gap(result) > LEAST_GAP
    return tiny_model.rows(result)


@pytest.mark.slow
@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", drafts_under_test.blocks(5))
@pytest.mark.parametrize("name", MODELS)
def test_greedy_is_plain_greedy_for_every_number_of_proposals(name, num_draft_tokens, kind):
    lm = tiny_model.load(name)
    draft = drafts_under_test.make(kind, lm)
    options = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "adaptive_draft": False}
    result = lm.generate(ragged(lm, 4), draft=draft, num_draft_tokens=num_draft_tokens, **options)
    assert tiny_model.rows(result) == plain_greedy(name)
    stats = result.stats
    assert stats["drafted"] >= stats["tested"] > stats["accepted"] > 0


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
def test_coupled_writes_the_text_of_every_seed(kind):
    # The seeds are rows: 25 with the filters alone and 25 with penalties, each with its own prompt.
    lm = tiny_model.load("mistral_w16")
    sampling = [
        config.SamplingConfig(**{**vars(SAMPLED if seed < 25 else PENALISED), "seed": 100 + seed}) for seed in range(50)
    ]
    prompts = ragged(lm, 5) * 10
    draft = drafts_under_test.make(kind, lm)
    result = check_equal(lm, prompts, draft, 4, adaptive=False, sampling=sampling, rule="coupled")
    # The test means something only where texts differ, and proposals are accepted and refused (``check_equal``).
    assert len({tuple(row) for row in tiny_model.rows(result)}) == 50


def test_rejection_draws_other_texts_of_the_same_seed_alike_in_any_batch():
    lm = tiny_model.load("llama_gqa")
    draft = drafts_under_test.noisy(lm)
    prompts = ragged(lm, 3)
    sampling = [config.SamplingConfig(temperature=0.8, seed=seed) for seed in (5, 6, 7)]
    options = {"max_new_tokens": 30, "ignore_eos": True}
    plain = tiny_model.rows(lm.generate(prompts, sampling=sampling, **options))
    options |= {"draft": draft, "num_draft_tokens": 3, "adaptive_draft": False}
    result = lm.generate(prompts, sampling=sampling, **options)
    together = tiny_model.rows(result)
    assert result.stats["tested"] > result.stats["accepted"] > 0
    # The first token comes from the prompt, without a draft; the texts part where one is drawn by the rule.
    for row, other in zip(together, plain, strict=True):
        assert row[0] == other[0] and row != other
    alone = [
        tiny_model.rows(lm.generate([prompt], sampling=[own], **options))[0]
        for prompt, own in zip(prompts, sampling, strict=True)
    ]
    assert together == alone
    again = tiny_model.rows(lm.generate(prompts[::-1], sampling=sampling[::-1], **options))
    assert again == together[::-1]
