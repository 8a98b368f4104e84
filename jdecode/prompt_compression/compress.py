"""``compress_prompt``: a prompt without the tokens that a small model finds most predictable.

Predictable tokens carry little (Selective Context, Li et al. 2023; LLMLingua, Jiang et al. 2023): a model that reads
what is left can often fill them in. Tokens are never changed or moved, only left out, and the surprise of each is that
in the whole prompt. Where a question is known, what matters is not what is surprising but what the question makes less
so: the score is then the difference of a token's surprise without and with the question before it (LongLLMLingua,
Jiang et al. 2024, section 4.1).
"""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from jdecode import request
from jdecode.prompt_compression import protection, selection, token_scorer, units
from jdecode.prompt_compression import token_text as token_text_lib

if TYPE_CHECKING:
    from jdecode import language_model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompressedPrompt:
    """A prompt, and what is left of it.

    Attributes:
      ids: what is left, as token ids; encoding ``text`` anew may give others.
      text: the same as text, without what ``encode`` adds round a text; ``None`` without a tokenizer.
      kept: the index of each of ``ids`` in the prompt's ids, ascending.
      prompt_ids: of the whole prompt.
      stats: ``prompt_tokens``, ``kept_tokens``, ``dropped_tokens``, ``budget_tokens`` and
        ``compress_seconds``.
    """

    ids: tuple[int, ...]
    text: str | None
    kept: tuple[int, ...]
    prompt_ids: tuple[int, ...]
    stats: dict[str, Any]


def compress_prompt(
    lm: "language_model.LanguageModel",
    prompt: str | Sequence[int] | np.ndarray,
    *,
    budget: int | float,
    protected: protection.Protected | Sequence[protection.Protected] = (),
    question: str | Sequence[int] | None = None,
    unit: str | None = None,
    keep_structure: bool = True,
    scorer: token_scorer.TokenScorer | None = None,
) -> CompressedPrompt:
    """Leaves out of a prompt what is most predictable, so that a budget is kept.

    Units stay or go whole, the best first, of equal ones the earlier; one that no longer fits is passed over, so what
    stays can be less than the budget. A number, a word (but for ``unit="token"``) and a character are never cut.
    Control tokens, the roles of a chat template and what ``encode`` adds round a text always stay.

    Args:
      lm: the small model, and the tokenizer of the ids: a draft, or the model that reads the prompt itself.
      prompt: a text, or token ids (those of ``encode_chat`` too).
      budget: what may stay, in tokens (a whole number of at least 1) or as a share of the prompt (a float over 0 to
        1.0). A prompt that is within it is returned as it is, and nothing is computed.
      protected: what stays: strings (each occurrence), spans of characters ``(start, end)`` of the prompt's text, and
        ``range(start, stop)`` of token indices. A unit that they touch stays whole. If the prompt holds the question or
        instructions, protect them.
      question: what the prompt will be asked. The units whose tokens it makes more likely stay.
      unit: ``"token"``, ``"word"`` or ``"sentence"``; ``None`` for sentences, which a model reads best, or for tokens
        where there is no tokenizer.
      keep_structure: what stays of a line keeps the line's break and list marker, and what stays of a sentence its end.
      scorer: says how surprising tokens are; ``None`` for ``lm``.

    Returns:
      A ``CompressedPrompt``. The same arguments give the same.

    Raises:
      ValueError, TypeError: an argument that cannot be honoured, or a budget too small for what must stay; one line.
      FloatingPointError: the scores are not numbers.

    Example::

      short = jdecode.compress_prompt(draft, document + question, budget=0.5, protected=question)
      result = lm.generate([short.ids])
    """
    started = time.perf_counter()
    if scorer is not None and (isinstance(scorer, type) or not isinstance(scorer, token_scorer.TokenScorer)):
        raise TypeError(f"scorer: expected a TokenScorer or None, got {scorer!r:.80}")
    if not isinstance(keep_structure, bool):  # a text such as "no" would count as true
        raise TypeError(f"keep_structure: expected True or False, got {keep_structure!r:.80}")
    unit = _checked_unit(unit, has_text=lm.tokenizer is not None)
    tokenizer, ids = lm.tokenizer, _token_ids(lm, prompt, "prompt")
    most = budget_tokens(budget, len(ids))
    placed = None if tokenizer is None else token_text_lib.token_text(ids, tokenizer)
    wanted = protection.protected_tokens(placed, protected, prompt=prompt, num_tokens=len(ids))
    question_ids = None if question is None else question_context(lm, question)
    kept = tuple(range(len(ids)))
    if most < len(ids):
        if placed is None:
            division = units.divide_ids(ids)
        else:
            division = units.divide(placed, unit, keep_structure=keep_structure)
        required = selection.required(division, wanted)
        _check_room(division, required, most, is_enough=bool(wanted), unit=unit)
        scorer = token_scorer.ModelScorer(lm=lm) if scorer is None else scorer
        num_start = 0 if placed is None else placed.num_start
        scores = unit_scores(division, scorer, ids, num_start=num_start, question_ids=question_ids)
        kept = selection.select(division, scores, required, most)
    left = tuple(ids[idx] for idx in kept)
    text = None
    if tokenizer is not None:
        text = token_text_lib.token_text(left, tokenizer).text
        if isinstance(prompt, str) and len(left) == len(ids):
            text = prompt
    return CompressedPrompt(
        ids=left,
        text=text,
        kept=kept,
        prompt_ids=ids,
        stats={
            "prompt_tokens": len(ids),
            "kept_tokens": len(left),
            "dropped_tokens": len(ids) - len(left),
            "budget_tokens": most,
            "compress_seconds": time.perf_counter() - started,
        },
    )


def budget_tokens(budget: int | float, num_tokens: int) -> int:
    """Returns how many tokens may stay: a count as it is, a share of ``num_tokens`` rounded down, at least 1.

    Raises:
      ValueError: it is neither a whole number from 1 nor a float over 0 and up to 1.
    """
    if request.is_integer(budget) and budget >= 1:
        return int(budget)
    if isinstance(budget, float | np.floating) and 0 < budget <= 1:
        # A share such as 0.29 is no binary fraction: 0.29 * 100 is a little under 29.
        return max(1, math.floor(float(budget) * num_tokens + 1e-9))
    raise ValueError(
        f"budget: expected a whole number of tokens from 1, or a share as a float over 0 up to 1.0, got {budget!r}"
    )


def _check_room(division: units.Division, required: frozenset[int], most: int, *, is_enough: bool, unit: str) -> None:
    """Refuses a budget that what must stay is over; or, where that is nothing of the caller's, that no unit fits."""
    num_needed, what = len(required), "which must stay"
    if not is_enough:
        num_needed += min((len(selection.additional(each, required)) for each in division.units), default=0)
        what = f"which the shortest {unit} takes beside what must stay"
    if num_needed > most:
        raise ValueError(
            f"budget: expected at least {num_needed} tokens, {what}, got {most}; raise the budget, protect less or "
            "give a finer unit"
        )


def unit_scores(
    division: units.Division,
    scorer: token_scorer.TokenScorer,
    ids: Sequence[int],
    *,
    num_start: int = 0,
    question_ids: Sequence[int] | None = None,
) -> list[float]:
    """Scores the units of a prompt; the higher stay.

    Args:
      division: of the prompt.
      scorer: asked about the prompt, and with a question about the prompt behind the question.
      ids: of the prompt.
      num_start: how many of them ``encode`` puts before every text; they are in no unit.
      question_ids: ``None`` for no question.

    Returns:
      For each unit the mean of its tokens' surprise in nats; or with a question, the quadratic mean of how many nats
      less they are behind it: one name that the question foretells says more than many small gains.
    """
    start, text = ids[:num_start], ids[num_start:]
    if question_ids is None:
        scores = token_scorer.surprise_of_text(scorer, text, context=start)
        return [float(scores[_places(unit, num_start)].mean()) for unit in division.units]
    gains = token_scorer.contrast(scorer, text, question_ids, start)
    return [math.sqrt(np.square(gains[_places(unit, num_start)]).mean()) for unit in division.units]


def _places(unit: units.Unit, num_start: int) -> list[int]:
    return [idx - num_start for idx in unit.tokens]


def question_context(lm: "language_model.LanguageModel", question: str | Sequence[int]) -> tuple[int, ...]:
    """Returns the ids of a question as they precede a prompt when it is scored: a text has an empty line behind it."""
    return _token_ids(lm, f"{question}\n\n" if isinstance(question, str) and question else question, "question")


def _checked_unit(unit: str | None, *, has_text: bool) -> str:
    if unit is None:
        return "sentence" if has_text else "token"
    if unit not in units.UNITS:
        raise ValueError(f"unit: expected one of {', '.join(units.UNITS)}, got {unit!r}")
    if unit != "token" and not has_text:
        raise ValueError(f"unit: expected token for a model without a tokenizer, got {unit!r}")
    return unit


def _token_ids(lm: "language_model.LanguageModel", text: Any, name: str) -> tuple[int, ...]:
    """Returns the ids of a text, or ids as they were given."""
    if isinstance(text, str):
        if not text:
            raise ValueError(f"{name}: expected some text, got an empty one")
        return tuple(lm.encode(text))
    ids = text.tolist() if isinstance(text, np.ndarray) else text
    if not request.is_list(ids):
        raise TypeError(f"{name}: expected text or a list of token ids, got {type(text).__name__}")
    last = lm.config.vocab_size - 1
    for token_id in ids:
        if not request.is_integer(token_id) or not 0 <= token_id <= last:
            raise ValueError(f"{name}: expected token ids from 0 to {last}, got {token_id!r}"[:200])
    if not len(ids):
        raise ValueError(f"{name}: expected at least one token id, got none")
    return tuple(map(int, ids))
