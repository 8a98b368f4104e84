"""How surprising the tokens of a prompt are to a small model."""

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np

from jdecode import request

if TYPE_CHECKING:
    from jdecode import language_model

MOST_SURPRISE = 1e4
"""Nats, the bound of one token's surprise: what a model holds for impossible stays comparable."""

WINDOW_LEN = 2048
"""Tokens that a model reads at once unless said otherwise: what it scores depends on little further back."""


QUESTION_WINDOW_LEN = 128
"""Tokens of a question and a stretch of the text that are scored together."""


@runtime_checkable
class TokenScorer(Protocol):
    """Says how surprising tokens are.

    ``window_len`` is the most tokens, context and scored ones together, that ``surprise`` is asked about at once. The
    same question has the same answer.
    """

    @property
    def window_len(self) -> int:
        """At least 2."""
        ...

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """Returns the surprise of every token but the first, given those before it.

        Args:
          ids: 2 to ``window_len`` of them.

        Returns:
          Float (len(ids) - 1), nats: the negative logarithm of the probability.
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelScorer:
    """Asks a language model.

    Attributes:
      lm: whose surprise counts.
      max_window_len: tokens that it reads at once; ``None`` for the least of ``WINDOW_LEN`` and its trained length.
    """

    lm: "language_model.LanguageModel"
    max_window_len: int | None = None

    def __post_init__(self) -> None:
        if self.max_window_len is not None:
            request.count("max_window_len", self.max_window_len, least=2, most=self.lm.config.max_positions)

    @property
    def window_len(self) -> int:
        """See ``TokenScorer``."""
        return min(WINDOW_LEN, self.lm.config.max_positions) if self.max_window_len is None else self.max_window_len

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        return -self.lm.score([list(ids)])[0]


def surprise_of_text(
    scorer: TokenScorer, ids: Sequence[int], *, context: Sequence[int] = (), text_len: int | None = None
) -> np.ndarray:
    """Scores a text of any length, in windows.

    A window holds the context and a stretch of the text; the first quarter of the stretch, which the window before has
    scored, is only there to be read. So every token but the earliest is scored after at least a quarter.

    Args:
      scorer: asked about one window at a time.
      ids: of the text.
      context: ids that every window starts with: a question, or what starts every text, without which a model that
        expects it scores badly.
      text_len: tokens of the text in a window, at least 2; ``None`` for as many as the scorer reads at once.

    Returns:
      float64 (len(ids)), nats, at most ``MOST_SURPRISE``. The first token of a text without a context, which nothing
      predicts, has the mean of the others.

    Raises:
      ValueError: the scorer's answer has another shape.
      FloatingPointError: the scorer's answer is not a number.
    """
    text_len = scorer.window_len - len(context) if text_len is None else text_len
    scores = np.zeros(len(ids))
    known = 0 if context else 1  # tokens that need no score any more
    while known < len(ids):
        is_first = known <= 1
        stop = min(len(ids), text_len if is_first else known + max(1, text_len * 3 // 4))
        window = [*context, *ids[0 if is_first else max(0, stop - text_len) : stop]]
        answer = np.asarray(scorer.surprise(window), np.float64)
        if answer.shape != (len(window) - 1,):
            raise ValueError(f"scorer: expected {len(window) - 1} numbers for {len(window)} tokens, got {answer.shape}")
        scores[known:stop] = answer[len(answer) - (stop - known) :]
        known = stop
    if np.isnan(scores).any():
        raise FloatingPointError("scorer: expected numbers, got NaN; the weights or the logits are not finite")
    scores = np.minimum(scores, MOST_SURPRISE)
    if not context and len(ids) > 1:
        scores[0] = scores[1:].mean()
    return scores


def contrast(
    scorer: TokenScorer, ids: Sequence[int], question_ids: Sequence[int], start_ids: Sequence[int] = ()
) -> np.ndarray:
    """Says how much less surprising the tokens of a text are behind a question.

    Small models soon forget a question, so it stands before each stretch of the text, which is short
    (``QUESTION_WINDOW_LEN``); the same stretches are scored without it.

    Args:
      scorer: asked about one window at a time.
      ids: of the text.
      question_ids: at least one.
      start_ids: what starts every text; put before the question where it does not start with it.

    Returns:
      float64 (len(ids)), nats, at least 0: a token that the question makes less likely says nothing against its
      sentence.

    Raises:
      ValueError: the question is too long, or as ``surprise_of_text``.
      FloatingPointError: as ``surprise_of_text``.
    """
    start_ids, question_ids = tuple(start_ids), tuple(question_ids)
    if question_ids[: len(start_ids)] != start_ids:
        question_ids = start_ids + question_ids
    window_len = min(max(QUESTION_WINDOW_LEN, 2 * len(question_ids)), scorer.window_len)
    stretch_len = window_len - len(question_ids)
    if stretch_len < 2:
        raise ValueError(
            f"question: expected at most {scorer.window_len - 2} tokens, as many as are scored at once, got "
            f"{len(question_ids)}; shorten it"
        )
    without = surprise_of_text(scorer, ids, context=start_ids, text_len=stretch_len)
    behind = surprise_of_text(scorer, ids, context=question_ids, text_len=stretch_len)
    gains = np.maximum(without - behind, 0.0)
    if not start_ids:
        gains[:1] = 0.0  # nothing predicts the first token without the question
    return gains
