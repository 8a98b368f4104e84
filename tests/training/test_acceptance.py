"""Accepted tokens a round: by hand, and against speculative sampling as it is written down, drawn in plain Python."""

import itertools
import math
import random

import numpy as np
import pytest

from jdecode.training import acceptance

# A target and a draft over three tokens, each with a law for every token that may stand before.
TARGET = ((0.6, 0.3, 0.1), (0.05, 0.15, 0.8), (0.4, 0.35, 0.25))
DRAFT = ((0.3, 0.3, 0.4), (0.7, 0.2, 0.1), (0.35, 0.45, 0.2))


def rounds(num_rounds: float, num_tested: float, num_accepted: float) -> acceptance.Rounds:
    return acceptance.Rounds(num_rounds=num_rounds, num_tested=num_tested, num_accepted=num_accepted)


def test_two_rounds_by_hand():
    # γ = 2 and four tokens: rounds at places 0 and 1 are complete whatever happens.
    # Place 0: tests place 0 for sure and place 1 with 0.5; accepts 0.5 + 0.5 * 0.25.
    # Place 1 begins a round iff place 0 was refused, 0.5: tests 0.5 + 0.5 * 0.25, accepts 0.5 * 0.25 + 0.5 * 0.25 * 1.
    found = acceptance.text_rounds([0.5, 0.25, 1.0, 0.0], 2)
    assert found == rounds(1.5, 1 + 0.5 + 0.5 + 0.125, 0.5 + 0.125 + 0.125 + 0.125)
    assert found.accepted_a_round == 0.875 / 1.5
    assert found.emitted_a_round == 2.375 / 1.5
    assert found.acceptance_rate == 0.875 / 2.125


def test_token_after_a_full_round_is_not_tested():
    # γ = 1: place 0 is accepted, place 1 is the target's own, place 2 is refused, place 3 begins the next round.
    assert acceptance.text_rounds([1, 0, 0, 1, 0.5], 1) == rounds(3, 3, 2)
    # γ = 2: 0 and 1 accepted, 2 the target's own, 3 refused; then a round at 4, which needs places up to 6.
    assert acceptance.text_rounds([1, 1, 0, 0, 0, 1, 1], 2) == rounds(3, 2 + 1 + 1, 2)


@pytest.mark.parametrize("gamma", [1, 3, 8])
def test_constant_probability_has_a_closed_form(gamma: int):
    # Leviathan et al. 2023, equation 1: a round emits (1 - a^(γ + 1)) / (1 - a).
    a = 0.7
    found = acceptance.text_rounds([a] * 40, gamma)
    assert found.emitted_a_round == pytest.approx((1 - a ** (gamma + 1)) / (1 - a), rel=1e-12)
    assert found.acceptance_rate == pytest.approx(a, rel=1e-12)


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_text_shorter_than_a_round_has_none(num_tokens: int):
    found = acceptance.text_rounds([0.5] * num_tokens, 3)
    assert found == rounds(0, 0, 0)
    assert math.isnan(found.accepted_a_round) and math.isnan(found.acceptance_rate)
    assert acceptance.text_rounds([0.5] * 4, 3).num_rounds == 1


def draw(rng: random.Random, law) -> int:
    return rng.choices(range(len(law)), weights=law)[0]


def speculative_text(rng: random.Random, num_tokens: int, gamma: int) -> tuple[list[int], acceptance.Rounds]:
    """Draws a text by Algorithm 1 of Leviathan et al. 2023, and counts the rounds that cannot be cut off."""
    text = [0]  # of which the first is the prompt
    num_rounds = num_tested = num_accepted = 0
    while len(text) - 1 < num_tokens:
        counts = len(text) - 1 <= num_tokens - gamma - 1
        num_rounds += counts
        proposed: list[int] = []
        for _ in range(gamma):
            proposed.append(draw(rng, DRAFT[(text + proposed)[-1]]))
        for token in proposed:
            p, q = TARGET[text[-1]], DRAFT[text[-1]]
            is_accepted = rng.random() < min(1, p[token] / q[token])
            num_tested += counts
            num_accepted += counts and is_accepted
            if not is_accepted:
                text.append(draw(rng, [max(0, ours - theirs) for ours, theirs in zip(p, q, strict=True)]))
                break
            text.append(token)
        else:
            text.append(draw(rng, TARGET[text[-1]]))
    return text[: num_tokens + 1], rounds(num_rounds, num_tested, num_accepted)


@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_expectation_is_that_of_drawn_rounds(gamma: int):
    # 4,000 texts of 11 tokens. Given its text, the mean of each count is the computed one, so the differences have mean
    # 0; z is their sum over its standard error. |z| < 5 fails by chance once in 1.7 million, for nine z in all once in
    # 190,000 (and never for this seed).
    rng = random.Random(gamma)
    differences = []
    for _ in range(4000):
        text, drawn = speculative_text(rng, 11, gamma)
        accept = [min(1, DRAFT[before][token] / TARGET[before][token]) for before, token in itertools.pairwise(text)]
        expected = acceptance.text_rounds(accept, gamma)
        differences.append(
            (
                drawn.num_rounds - expected.num_rounds,
                drawn.num_tested - expected.num_tested,
                drawn.num_accepted - expected.num_accepted,
            )
        )
    array = np.asarray(differences)
    z = array.sum(axis=0) / (array.std(axis=0) * math.sqrt(len(array)))
    assert np.all(np.abs(z) < 5), z


def test_totals_and_errors_by_hand():
    texts = [rounds(2, 5, 3), rounds(4, 7, 3), rounds(2, 4, 2)]
    others = [rounds(2, 3, 1), rounds(4, 6, 3), rounds(2, 3, 0)]
    assert acceptance.total(texts) == rounds(8, 16, 8)
    # 8 / 8 accepted a round. Over 8 rounds, the texts accept 1, -1 and 0 more than that: sqrt(2 * 3 / 2) / 8.
    assert acceptance.standard_error(texts) == pytest.approx(math.sqrt(3) / 8, rel=1e-12)
    # The others: 4 / 8, and 0, 1 and -1 more than that. Differences 1, -2, 1: sqrt(6 * 3 / 2) / 8.
    gain, error = acceptance.difference(texts, others)
    assert gain == 0.5
    assert error == pytest.approx(3 / 8, rel=1e-12)
    assert acceptance.difference(texts, texts) == (0, 0)


def test_error_needs_two_texts_and_a_round():
    assert math.isnan(acceptance.standard_error([rounds(2, 5, 3)]))
    assert math.isnan(acceptance.standard_error([rounds(0, 0, 0)] * 2))
    with pytest.raises(ValueError):
        acceptance.difference([rounds(2, 5, 3)] * 2, [rounds(2, 5, 3)] * 3)


@pytest.mark.parametrize("accept", [[0.5, 1.25], [-0.5], [math.nan]])
def test_what_is_no_probability_is_refused(accept: list[float]):
    with pytest.raises(ValueError, match="accept: expected numbers from 0 to 1, got"):
        acceptance.text_rounds(accept, 2)


def test_a_round_without_a_proposal_is_refused():
    with pytest.raises(ValueError, match="num_draft_tokens: expected a count of at least 1, got 0"):
        acceptance.text_rounds([0.5], 0)
