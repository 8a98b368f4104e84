"""The flags that shorten a prompt before the model reads it."""

import argparse
import dataclasses
import sys
from typing import TYPE_CHECKING, Any

from jdecode import command_line, flag_names

if TYPE_CHECKING:
    from jdecode import language_model
    from jdecode.prompt_compression import compress

UNITS = (
    "token",
    "word",
    "sentence",
)  # those of jdecode.prompt_compression, which imports jax; a test holds them together


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shortening:
    """Holds what the flags ask for.

    Attributes:
      budget: tokens, or a share of the prompt.
      keep: texts of the prompt that stay.
      question: the part of the prompt that asks; it stays, and says what else should.
      unit: how finely the prompt is cut; ``None`` for the default.
    """

    budget: int | float
    keep: tuple[str, ...] = ()
    question: str | None = None
    unit: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags."""
    group = parser.add_argument_group("a shorter prompt")
    group.add_argument(
        "--prompt-budget",
        metavar="N_OR_SHARE",
        type=_budget,
        help="leave out what is most predictable of the prompt: keep N tokens, or a share such as 0.5",
    )
    group.add_argument(
        "--prompt-keep",
        metavar="TEXT",
        action="append",
        default=[],
        type=command_line.plain_text,
        help="with --prompt-budget: this text of the prompt stays; may be given several times",
    )
    group.add_argument(
        "--prompt-question",
        metavar="TEXT",
        type=command_line.plain_text,
        help="with --prompt-budget: this text of the prompt stays, and so do the sentences that it asks for",
    )
    group.add_argument(
        "--prompt-unit", choices=UNITS, help="with --prompt-budget: what stays or goes whole; sentences unless given"
    )


def shortening(arguments: argparse.Namespace) -> Shortening | None:
    """Reads the flags; ``None`` to leave the prompt as it is.

    Raises:
      ValueError: a flag acts on a budget, and there is none.
    """
    if arguments.prompt_budget is None:
        flags = {
            "--prompt-keep": arguments.prompt_keep,
            "--prompt-question": arguments.prompt_question,
            "--prompt-unit": arguments.prompt_unit,
        }
        for flag, value in flags.items():
            if value:
                raise ValueError(f"{flag}: acts on a budget, and there is none; add --prompt-budget, or leave it out")
        return None
    return Shortening(
        budget=arguments.prompt_budget,
        keep=tuple(arguments.prompt_keep),
        question=arguments.prompt_question,
        unit=arguments.prompt_unit,
    )


def shorten(
    lm: "language_model.LanguageModel",
    ids: list[int],
    asked: Shortening,
    *,
    message: str | None = None,
    draft: Any = None,
) -> "compress.CompressedPrompt":
    """Compresses a prompt as the flags ask.

    Args:
      lm: the model that will read it.
      ids: of the prompt.
      message: what a chat says, of which alone something may go; ``None`` for a prompt that is no chat.
      draft: of speculative decoding; the surprise that counts is its own where it is a model.

    Raises:
      ValueError: it cannot be done; one line.
    """
    from jdecode.prompt_compression import compress, token_scorer, token_text  # late: they import jax

    protected: list[Any] = list(asked.keep)
    text = "" if lm.tokenizer is None else token_text.token_text(ids, lm.tokenizer).text
    if asked.question is not None:
        if asked.question not in text:
            raise ValueError(f"--prompt-question: expected a part of the prompt, got {asked.question!r}"[:200])
        protected.append(asked.question)
    if message is not None:
        message = message.strip()
        start = text.rfind(message)
        if start < 0:
            raise ValueError("--prompt-budget: expected a chat template that writes the message as it is; use --prompt")
        protected += [(0, start), (start + len(message), len(text))]
    flags = {
        "protected": "--prompt-keep",
        "question": "--prompt-question",
        "budget": "--prompt-budget",
        "unit": "--prompt-unit",
    }
    with flag_names.named(flags):
        return compress.compress_prompt(
            lm,
            ids,
            budget=asked.budget,
            protected=protected,
            question=asked.question,
            unit=asked.unit,
            scorer=None if draft is None or isinstance(draft, str) else token_scorer.ModelScorer(lm=draft),
        )


def print_statistics(stats: dict[str, Any]) -> None:
    """Says on standard error what was left out."""
    print(
        f"prompt {stats['prompt_tokens']} tokens, {stats['dropped_tokens']} left out, {stats['kept_tokens']} kept, "
        f"in {stats['compress_seconds']:.3f} s",
        file=sys.stderr,
        flush=True,
    )


def _budget(text: str) -> int | float:
    """Parses a whole number of tokens, or a share."""
    for kind in (int, float):
        try:
            value = kind(text)
        except ValueError:
            continue
        if value >= 1 if kind is int else 0 < value <= 1:
            return value
    raise argparse.ArgumentTypeError(f"expected a number of tokens from 1, or a share such as 0.5, got {text!r}")
