"""min(1, q / p) along a target's text, against plain numpy over whole logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.models import transformer
from jdecode.training import draft_scores
from tests import tiny_models

VOCAB = 13
PROMPTS = [[3, 1, 4, 1, 5], [9, 2], [6, 5, 3, 5]]
WRITTEN = [[8, 9, 7], [9, 3, 2, 3, 8, 4], [6]]


CONFIG = config.ModelConfig(
    vocab_size=VOCAB,
    hidden_size=8,
    intermediate_size=10,
    num_heads=2,
    num_kv_heads=1,
    head_dim=4,
    layers=(config.LayerConfig(window=3), config.LayerConfig()),
)


@functools.cache
def make(seed: int, model_config: config.ModelConfig = CONFIG):
    return transformer.Transformer(model_config), {"params": tiny_models.random_params(model_config, seed)}


def logits(model_and_params, prompt: list[int], written: list[int]) -> np.ndarray:
    """Returns those of each written token: float64 (M, V)."""
    model, params = model_and_params
    (row_TV,) = tiny_models.whole(model, params["params"], [prompt + written], width=12)
    return row_TV[len(prompt) - 1 : -1].astype(np.float64)


def num_programs() -> int:
    """Returns how many shapes have been compiled."""
    return draft_scores._scores._cache_size()  # pyright: ignore[reportAttributeAccessIssue]


def softmax(row: np.ndarray) -> np.ndarray:
    weights = np.exp(row - row.max())
    return weights / weights.sum()


def expected(target, draft, law) -> list[list[float]]:
    """Applies min(1, q / p), where ``law(logits, prompt, written so far)`` is the processed law."""
    result = []
    for prompt, written in zip(PROMPTS, WRITTEN, strict=True):
        p_MV, q_MV = (
            [law(row, prompt, written[:place]) for place, row in enumerate(logits(model, prompt, written))]
            for model in (target, draft)
        )
        laws = zip(written, p_MV, q_MV, strict=True)
        result.append([min(1, q[token] / p[token]) if p[token] else float(q[token] > 0) for token, p, q in laws])
    return result


def assert_close(found: list[np.ndarray], wanted: list[list[float]]) -> None:
    assert [len(row) for row in found] == [len(row) for row in wanted] == [3, 6, 1]
    for row, wanted_row in zip(found, wanted, strict=True):
        # float32 logits of about 10, whose rounding of 1e-6 the temperature of 0.7 and the exponential pass on.
        np.testing.assert_allclose(row, wanted_row, rtol=2e-5, atol=1e-7)


@pytest.mark.parametrize("batch_size", [2, 3])
def test_ragged_texts_at_a_temperature(batch_size: int, monkeypatch: pytest.MonkeyPatch):
    # Two models over the longest row: 8 tokens of 13 scores.
    monkeypatch.setattr(draft_scores, "SCORES_IN_MEMORY", batch_size * 2 * 8 * VOCAB)
    target, draft = make(1), make(2)
    sampling = config.SamplingConfig(temperature=0.7)
    before = num_programs()
    found = draft_scores.accept_probabilities(target, draft, PROMPTS, WRITTEN, sampling)
    assert num_programs() == before + 1  # the last batch has the shape of the others
    wanted = expected(target, draft, lambda row, *_: softmax(row / 0.7))
    assert min(map(min, wanted)) < 0.5 and max(map(max, wanted)) == 1  # both branches of the minimum
    assert_close(found, wanted)


def test_laws_are_those_after_penalties_and_filters():
    def law(row: np.ndarray, prompt: list[int], before: list[int]) -> np.ndarray:
        row = row.copy()
        for token in {*prompt, *before}:
            row[token] = row[token] / 1.5 if row[token] > 0 else row[token] * 1.5
        for token in set(before):  # the prompt has no presence
            row[token] -= 0.75
        row = row / 0.9
        row[np.argsort(-row)[7:]] = -np.inf  # top-k
        return softmax(row)

    target, draft = make(1), make(2)
    sampling = config.SamplingConfig(temperature=0.9, top_k=7, repetition_penalty=1.5, presence_penalty=0.75)
    found = draft_scores.accept_probabilities(target, draft, PROMPTS, WRITTEN, sampling)
    wanted = expected(target, draft, law)
    assert 0 in [entry for row in wanted for entry in row]  # the filter dropped some
    assert_close(found, wanted)


def test_token_that_the_target_does_not_allow_depends_on_the_draft():
    # The target's law is its argmax alone, which the written tokens mostly are not; the draft allows everything by
    # being asked at those places where its own argmax is the token.
    def law(row: np.ndarray, *_) -> np.ndarray:
        return (np.arange(VOCAB) == row.argmax()).astype(float)

    target, draft = make(1), make(2)
    found = draft_scores.accept_probabilities(
        target, draft, PROMPTS, WRITTEN, config.SamplingConfig(temperature=1.0, top_k=1)
    )
    assert_close(found, expected(target, draft, law))


def test_greedy_accepts_the_draft_s_argmax_alone():
    target, draft = make(1), make(2)
    written: list[list[int]] = []
    for prompt in PROMPTS:
        ids = [*prompt]
        for _ in range(6):
            ids.append(int(logits(target, ids, [0])[0].argmax()))
        written.append(ids[len(prompt) :])
    found = draft_scores.accept_probabilities(target, draft, PROMPTS, written)
    for prompt, ids, row in zip(PROMPTS, written, found, strict=True):
        best = logits(draft, prompt, ids).argmax(axis=1)
        assert row.tolist() == (best == ids).astype(float).tolist()
    everything = np.concatenate(found)
    assert 0 < everything.sum() < everything.size
    own = draft_scores.accept_probabilities(target, target, PROMPTS, written)
    assert np.concatenate(own).tolist() == [1.0] * 18


def test_stop_tokens_are_held_back_from_both():
    # Token 8 cannot be drawn before two tokens are out: then the others share what it had.
    def law(row: np.ndarray, prompt: list[int], before: list[int]) -> np.ndarray:
        return softmax(np.where((np.arange(VOCAB) == 8) & (len(before) < 2), -np.inf, row))

    target, draft = make(1), make(2)
    sampling = config.SamplingConfig(temperature=1.0, min_new_tokens=2)
    found = draft_scores.accept_probabilities(target, draft, PROMPTS, WRITTEN, sampling, stop_token_ids=[8])
    assert found[0][0] == 0  # 8 itself, the first token of row 0
    assert_close(found, expected(target, draft, law))


def test_logits_that_are_not_finite_are_an_error():
    model, params = make(1)
    broken = jax.tree.map(lambda leaf: leaf * jnp.nan, params)
    for target, draft in (((model, params), (model, broken)), ((model, broken), (model, params))):
        with pytest.raises(FloatingPointError, match="logits: expected finite numbers"):
            draft_scores.accept_probabilities(target, draft, PROMPTS, WRITTEN)


def test_what_does_not_fit_is_refused():
    target = make(1)
    other = make(1, dataclasses.replace(CONFIG, vocab_size=14))
    for draft, prompts, written, message in (
        (other, PROMPTS, WRITTEN, "draft: expected one with the target's vocabulary of 13, got 14"),
        (target, PROMPTS, WRITTEN[:2], "continuations: expected 3, one for each prompt, got 2"),
        (target, [[1], []], [[2], [3]], "prompts: expected at least one token in each"),
        (target, [[1]], [[13]], "token ids: expected 0 to 12, got 13"),
        (target, [[-1]], [[3]], "token ids: expected 0 to 12, got -1"),
    ):
        with pytest.raises(ValueError, match=message):
            draft_scores.accept_probabilities(target, draft, prompts, written)
    assert draft_scores.accept_probabilities(target, target, [], []) == []
