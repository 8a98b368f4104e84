"""What speculative decoding would accept of a draft, computed along text that the target wrote, without drawing.

Speculative sampling (Leviathan et al. 2023, Algorithm 1) has a draft propose γ tokens and tests them in order. A
proposal y, drawn from the draft's law q, is accepted with probability min(1, p(y) / q(y)); the first one that is
refused is replaced by a draw from the normalised max(0, p - q), and the round ends. After γ acceptances the target
adds a token of its own, which nothing tests. So a round emits its accepted tokens and one more.

Whatever the rounds, each emitted token has the target's law p. At a tested place "x was proposed and accepted" has the
probability q(x) min(1, p(x) / q(x)) = min(p(x), q(x)), so, given that x was emitted,

    P(accepted | x emitted) = min(p(x), q(x)) / p(x) = min(1, q(x) / p(x)) = a.

Given the text, then, the tests are independent, each with the a of its place, and only which places are tested is
left to chance: the places at which rounds begin form a renewal chain. ``text_rounds`` sums over that chain exactly. A
greedy target and draft are the case in which p and q each hold one token: a is 1 where the draft's argmax is the
target's token, and else 0.

What is left to chance in the result is the text alone; ``standard_error`` says how much.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Expected counts over rounds that are complete.

    Attributes:
      num_rounds: rounds.
      num_tested: proposals that were tested; those after a refused one never are.
      num_accepted: proposals that were accepted.
    """

    num_rounds: float
    num_tested: float
    num_accepted: float

    @property
    def accepted_a_round(self) -> float:
        """Accepted proposals a round, 0 to γ. NaN without a round."""
        return _ratio(self.num_accepted, self.num_rounds)

    @property
    def emitted_a_round(self) -> float:
        """Tokens a round: the accepted ones and one of the target. NaN without a round."""
        return _ratio(self.num_accepted + self.num_rounds, self.num_rounds)

    @property
    def acceptance_rate(self) -> float:
        """The share of tested proposals that were accepted (α). NaN without a round."""
        return _ratio(self.num_accepted, self.num_tested)


def text_rounds(accept: Sequence[float] | np.ndarray, num_draft_tokens: int) -> Rounds:
    """Sums over the rounds of one text.

    The first round begins with the first new token. Rounds count that begin at least γ + 1 places before the end, so
    that none is cut off by it, whatever is accepted: a cut one would look like a bad one.

    Args:
      accept: for each new token of the text, the probability that it is accepted where it is tested.
      num_draft_tokens: γ, at least 1.

    Raises:
      ValueError: an entry is no probability, or γ is under 1.
    """
    if num_draft_tokens < 1:
        raise ValueError(f"num_draft_tokens: expected a count of at least 1, got {num_draft_tokens}")
    probability = np.asarray(accept, np.float64).tolist()
    if not all(0 <= value <= 1 for value in probability):
        raise ValueError(f"accept: expected numbers from 0 to 1, got {accept!r:.80}")
    begins = [1.0] + [0.0] * len(probability)  # P(a round begins at the place)
    num_rounds = num_tested = num_accepted = 0.0
    for start in range(len(probability) - num_draft_tokens):
        num_rounds += begins[start]
        reached = begins[start]  # P(a round begins at `start`, and this place is tested in it)
        for place in range(start, start + num_draft_tokens):
            num_tested += reached
            begins[place + 1] += reached * (1 - probability[place])
            reached *= probability[place]
            num_accepted += reached
        begins[start + num_draft_tokens + 1] += reached  # the token between is the target's own
    return Rounds(num_rounds=num_rounds, num_tested=num_tested, num_accepted=num_accepted)


def total(texts: Sequence[Rounds]) -> Rounds:
    """Returns the sums over texts. Ratios of sums weigh each round alike, whatever its text."""
    return Rounds(
        num_rounds=math.fsum(text.num_rounds for text in texts),
        num_tested=math.fsum(text.num_tested for text in texts),
        num_accepted=math.fsum(text.num_accepted for text in texts),
    )


def standard_error(texts: Sequence[Rounds]) -> float:
    """Returns the standard error of ``total(texts).accepted_a_round`` for independent texts.

    It is that of a ratio of means, to first order (Cochran 1977, section 2.11). NaN for fewer than two texts.
    """
    return _root_of_sum(_influences(texts))


def difference(texts: Sequence[Rounds], others: Sequence[Rounds]) -> tuple[float, float]:
    """Compares two drafts along the same texts.

    Args:
      texts: rounds of one draft.
      others: rounds of another, text by text.

    Returns:
      Accepted tokens a round of the first less those of the second, and the standard error of that for independent
      texts: far under that of either where texts are easy or hard for both.
    """
    pairs = zip(_influences(texts), _influences(others), strict=True)
    error = _root_of_sum([first - second for first, second in pairs])
    return total(texts).accepted_a_round - total(others).accepted_a_round, error


def _influences(texts: Sequence[Rounds]) -> list[float]:
    """Returns, to first order, how far each text moves the ratio of sums."""
    whole = total(texts)
    ratio = whole.accepted_a_round
    return [_ratio(text.num_accepted - ratio * text.num_rounds, whole.num_rounds) for text in texts]


def _root_of_sum(influences: Sequence[float]) -> float:
    if len(influences) < 2:
        return math.nan
    return math.sqrt(math.fsum(value**2 for value in influences) * len(influences) / (len(influences) - 1))


def _ratio(count: float, of: float) -> float:
    return count / of if of else math.nan
