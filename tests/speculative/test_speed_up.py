"""The expected speed-up: figures of the paper's formulas worked out by hand, and the ends of every range."""

import math

import pytest

from jdecode.speculative import speed_up


@pytest.mark.parametrize(
    ("alpha", "gamma", "tokens"),
    [
        (0.8, 5, 3.68928),  # 0.8^6 = 0.262144; (1 - 0.262144) / 0.2
        (0.6, 2, 1.96),  # 1 + 0.6 + 0.36
        (0.5, 3, 1.875),  # 1 + 1/2 + 1/4 + 1/8
        (0, 7, 1),  # the target's own token
        (1, 7, 8),  # all, and the target's own
        (0.3, 0, 1),
        (1 - 1e-13, 3, 4),  # the quotient of the closed form would lose its digits here
    ],
)
def test_expected_tokens(alpha: float, gamma: int, tokens: float):
    assert speed_up.expected_tokens(alpha, gamma) == pytest.approx(tokens, rel=1e-12)


def test_ends_of_the_range_are_exact():
    for gamma in (0, 1, 64):
        assert speed_up.expected_tokens(0, gamma) == 1.0
        assert speed_up.expected_tokens(1, gamma) == gamma + 1
        assert speed_up.expected_tokens_by_place([1.0] * gamma) == gamma + 1
        assert speed_up.operations_factor(1, gamma, 0.0) == 1.0
    assert speed_up.expected_tokens_by_place([0.0, 1.0]) == 1.0


def test_expected_tokens_by_place():
    assert speed_up.expected_tokens_by_place([]) == 1.0
    # 1 + 0.5 + 0.5 * 0.8 + 0.5 * 0.8 * 0.25 = 1 + 0.5 + 0.4 + 0.1
    assert speed_up.expected_tokens_by_place([0.5, 0.8, 0.25]) == pytest.approx(2.0, rel=1e-12)
    # One rate at every place is the paper's case.
    assert speed_up.expected_tokens_by_place([0.8] * 5) == pytest.approx(3.68928, rel=1e-12)


def test_speed_up_of_the_paper_and_of_a_dearer_block():
    # 3.68928 / (5 * 0.05 + 1) = 3.68928 / 1.25
    assert speed_up.speed_up(0.8, 5, 0.05) == pytest.approx(2.951424, rel=1e-12)
    # A block of six places that takes 1.75 plain steps: 3.68928 / 2
    assert speed_up.speed_up(0.8, 5, 0.05, 1.75) == pytest.approx(1.84464, rel=1e-12)
    # A free draft: the tokens themselves.
    assert speed_up.speed_up(0.8, 5, 0) == pytest.approx(3.68928, rel=1e-12)
    assert speed_up.speed_up(0.9, 0, 0.3) == 1.0
    # A draft as slow as the target that is never right: 1 / (3 + 1)
    assert speed_up.speed_up(0, 3, 1) == 0.25


@pytest.mark.parametrize(
    ("alpha", "gamma", "gain", "operations"),
    # Table 1 of the paper, which rounds to two digits; there c = ĉ = 0.
    [(0.6, 2, 1.96, 1.53), (0.7, 3, 2.53, 1.58), (0.8, 2, 2.44, 1.23), (0.8, 5, 3.69, 1.63), (0.9, 10, 6.86, 1.60)],
)
def test_table_of_the_paper(alpha: float, gamma: int, gain: float, operations: float):
    assert round(speed_up.speed_up(alpha, gamma, 0), 2) == gain
    assert round(speed_up.operations_factor(alpha, gamma, 0), 2) == operations


def test_operations():
    # (5 * 0.1 + 5 + 1) / 3.68928 = 6.5 / 3.68928
    assert speed_up.operations_factor(0.8, 5, 0.1) == pytest.approx(1.761861, rel=1e-6)
    # Nothing accepted: all the work for one token.
    assert speed_up.operations_factor(0, 3, 0.5) == 5.5
    # Of four rounds one has 3 proposals, all accepted: 3 * 1 + 1 steps and 3 * 1.5 + 1 more, for 3 + 4 tokens
    assert speed_up.operations_factor(1, 3, 0.5, 0.25) == pytest.approx(8.5 / 7, rel=1e-12)


def test_rounds_without_proposals_are_plain_steps_that_pay_the_draft():
    # Of four rounds three emit 3 tokens in 1.5 steps, one emits 1 in 1; each pays 0.125: 10 / (0.5 + 4.5 + 1)
    assert speed_up.round_speed_up(3, 0.125, 1.5, 0.75) == pytest.approx(10 / 6, rel=1e-12)
    assert speed_up.round_speed_up(3, 0.25, 1.5, 0.0) == 0.8  # 1 / 1.25
    assert speed_up.round_speed_up(3, 0.0) == 3.0


def test_best_gamma():
    # α = 0.5, c = 0.25: 1.5 / 1.25 = 1.2; 1.75 / 1.5 = 1.167; 1.875 / 1.75 = 1.071
    assert speed_up.best_gamma(0.5, 0.25, 9) == 1
    # α = 0.8, c = 0.05: γ = 6 gives 3.951424 / 1.30 = 3.0396, 7 gives 4.161139 / 1.35 = 3.0823,
    # 8 gives 4.328911 / 1.40 = 3.0921, 9 gives 4.463129 / 1.45 = 3.0780.
    assert speed_up.best_gamma(0.8, 0.05, 20) == 8
    assert speed_up.best_gamma(0.8, 0.05, 7) == 7  # the maximum counts
    assert speed_up.best_gamma(0.2, 0.25, 9) == 0  # 1.2 / 1.25 < 1
    assert speed_up.best_gamma(0.25, 0.25, 9) == 0  # 1.25 / 1.25: no gain, and the least of equals
    assert speed_up.best_gamma(0.9, 0.0, 0) == 0
    assert speed_up.best_gamma(0.9, 0.1, 9, lambda gamma: 9.0) == 0
    # v = 1.5 for one proposal, 1.5 for two, 3 from three on; α = 1: 2 / 1.5, 3 / 1.5, 4 / 3
    assert speed_up.best_gamma(1, 0, 3, lambda gamma: 1.5 if gamma < 3 else 3.0) == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: speed_up.expected_tokens(1.5, 2), "alpha: expected a number from 0 to 1, got 1.5"),
        (lambda: speed_up.expected_tokens(-0.1, 2), "alpha: expected a number from 0 to 1, got -0.1"),
        (lambda: speed_up.expected_tokens(math.nan, 2), "alpha: expected a number from 0 to 1, got nan"),
        (lambda: speed_up.expected_tokens(True, 2), "alpha: expected a number from 0 to 1, got True"),
        (lambda: speed_up.expected_tokens(0.5, -1), "gamma: expected a count of at least 0, got -1"),
        (lambda: speed_up.expected_tokens(0.5, 1.5), "gamma: expected a count"),  # pyright: ignore
        (lambda: speed_up.expected_tokens_by_place([0.5, 1.1]), "rate of place 2: expected a number from 0 to 1"),
        (lambda: speed_up.speed_up(0.5, 2, -1), "cost_ratio: expected a finite number of at least 0, got -1"),
        (lambda: speed_up.speed_up(0.5, 0, math.inf), "cost_ratio: expected a finite number of at least 0, got inf"),
        (lambda: speed_up.speed_up(0.5, 2, 0, 0), "block_cost: expected a finite number over 0, got 0"),
        (lambda: speed_up.round_speed_up(0.5, 0), "tokens: expected a number of at least 1, got 0.5"),
        (lambda: speed_up.round_speed_up(2, 0, 1, 2), "proposing: expected a number from 0 to 1, got 2"),
        (lambda: speed_up.best_gamma(0.5, 0, -1), "most: expected a count of at least 0, got -1"),
        (lambda: speed_up.operations_factor(0.5, 2, -1), "operations_ratio: expected a finite number of at least 0"),
    ],
)
def test_value_out_of_range_is_one_line(call, message: str):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)
