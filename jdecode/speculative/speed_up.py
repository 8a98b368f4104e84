"""What speculative decoding should gain: the arithmetic of Leviathan et al. 2023, sections 3.1 to 3.5.

The paper's names: α is the acceptance rate (the share of tested proposals that are accepted), γ the number of proposals
of a round, c the time of one draft step over that of one plain step of the target, ĉ the same ratio of arithmetic
operations. The paper takes the target's block of γ + 1 places to cost as much as a plain step. That holds where reading
the weights decides; where computing does, as on a CPU, the block costs v > 1 plain steps, and v stands beside c here.

Acceptance is taken to be independent from place to place, with one α. Where it is not, ``expected_tokens_by_place``
takes a rate for each place.

Plain Python; all times are in plain steps of the target.
"""

import math
from collections.abc import Callable, Sequence

from jdecode import config


def expected_tokens(alpha: float, gamma: int) -> float:
    """Returns the tokens that a round emits, (1 - α^(γ+1)) / (1 - α): 1 to γ + 1 (equation 1).

    Args:
      alpha: α, 0 to 1.
      gamma: γ, 0 or more; with 0 a round is a plain step.

    Raises:
      ValueError: a value out of range, one line. So do all functions of this module.
    """
    _check_rate("alpha", alpha)
    config.check_count("gamma", gamma, 0)
    # The geometric sum itself: no quotient of two small numbers near α = 1.
    return math.fsum(alpha**idx for idx in range(gamma + 1))


def expected_tokens_by_place(rates: Sequence[float]) -> float:
    """Returns the tokens that a round emits, 1 + a₁ + a₁a₂ + …

    Args:
      rates: for each place of the block, the share of the proposals tested there that are accepted; a place is tested
        when all before it were accepted.
    """
    tokens = reached = 1.0
    for place, rate in enumerate(rates, start=1):
        _check_rate(f"rate of place {place}", rate)
        reached *= rate
        tokens += reached
    return tokens


def round_speed_up(tokens: float, draft_cost: float, block_cost: float = 1.0, proposing: float = 1.0) -> float:
    """Returns tokens over time for rounds, relative to plain decoding: one token a plain step.

    Args:
      tokens: emitted by a round that has proposals, 1 or more.
      draft_cost: of all that the draft does in a round, in plain steps.
      block_cost: v, of the target's block, in plain steps.
      proposing: the share of rounds in which the draft has anything to propose (``ngram`` may have nothing). The others
        are plain steps, and pay the draft for looking.
    """
    config.check_number("tokens", tokens, 1, math.inf, "a number of at least 1")
    _check_cost("draft_cost", draft_cost)
    _check_block_cost(block_cost)
    _check_rate("proposing", proposing)
    plain = 1 - proposing
    return (proposing * tokens + plain) / (draft_cost + proposing * block_cost + plain)


def speed_up(alpha: float, gamma: int, cost_ratio: float, block_cost: float = 1.0) -> float:
    """Returns the expected improvement of the wall time, (1 - α^(γ+1)) / ((1 - α)(γc + v)) (theorem 3.8, where v = 1).

    Args:
      alpha, gamma: see ``expected_tokens``.
      cost_ratio: c, 0 or more.
      block_cost: v, over 0.
    """
    tokens = expected_tokens(alpha, gamma)
    _check_cost("cost_ratio", cost_ratio)
    return round_speed_up(tokens, gamma * cost_ratio, block_cost)


def best_gamma(
    alpha: float, cost_ratio: float, most: int, block_cost: Callable[[int], float] = lambda gamma: 1.0
) -> int:
    """Returns the γ from 0 to ``most`` that ``speed_up`` puts highest, the least one of equals (section 3.5).

    0 says that plain decoding is the fastest.

    Args:
      alpha, cost_ratio: see ``speed_up``.
      most: the largest γ.
      block_cost: v for each γ from 1 on; the paper's is 1.
    """
    config.check_count("most", most, 0)
    gains = [speed_up(alpha, 0, cost_ratio)]  # 1
    gains += [speed_up(alpha, gamma, cost_ratio, block_cost(gamma)) for gamma in range(1, most + 1)]
    return gains.index(max(gains))


def operations_factor(alpha: float, gamma: int, operations_ratio: float, proposing: float = 1.0) -> float:
    """Returns by what factor arithmetic operations grow, (1 - α)(γĉ + γ + 1) / (1 - α^(γ+1)) (theorem 3.11).

    Args:
      alpha, gamma: see ``expected_tokens``.
      operations_ratio: ĉ, operations of a draft step over those of a plain step, 0 or more.
      proposing: see ``round_speed_up``; the theorem's is 1.
    """
    tokens = expected_tokens(alpha, gamma)
    _check_cost("operations_ratio", operations_ratio)
    _check_rate("proposing", proposing)
    return (proposing * gamma * (operations_ratio + 1) + 1) / (proposing * tokens + 1 - proposing)


def _check_rate(name: str, value: float) -> None:
    config.check_number(name, value, 0, 1, "a number from 0 to 1")


def _check_cost(name: str, value: float) -> None:
    config.check_number(name, value, 0, math.inf, "a finite number of at least 0")


def _check_block_cost(value: float) -> None:
    config.check_number("block_cost", value, 0, math.inf, "a finite number over 0", exclusive=True)
