"""Text that a teacher writes for its student: continuations of random places in the corpus.

A draft has to predict what its target writes, which is not quite what people wrote (Kim and Rush 2016, §3.2).
"""

import pathlib
from collections.abc import Callable, Sequence

import numpy as np
import tqdm

PROMPT_LEN = 48
"""Tokens of the corpus that the teacher continues; they stay in the text."""

BATCH_SIZE = 32

Generate = Callable[[list[list[int]], int, Sequence[int]], Sequence[Sequence[int]]]
"""``generate(prompts, max_new_tokens, seeds)`` returns the new ids of each prompt, drawn by a seed of its own: with one
seed for all, prompts of one length would be continued by the same draws."""


def save(path: pathlib.Path, texts: Sequence[np.ndarray]) -> None:
    """Writes texts; they appear under their name only when all of them are written."""
    part = path.with_name(f"{path.name}.part")
    with part.open("wb") as file:
        np.savez(file, tokens=np.concatenate(texts), ends=np.cumsum([len(text) for text in texts]))
    part.replace(path)


def load(path: pathlib.Path) -> list[np.ndarray]:
    """Reads what ``save`` wrote.

    Raises:
      ValueError: the file is damaged.
    """
    try:
        with path.open("rb") as file, np.load(file) as stored:  # numpy leaves a damaged file open
            return np.split(stored["tokens"], stored["ends"][:-1])
    except Exception as error:  # numpy, zipfile and zlib raise many types; each is the same to the user
        raise ValueError(
            f"{path}: expected the teacher's text, got: {' '.join(str(error).split())[:200]}; remove it, and the "
            "teacher writes it again"
        ) from error


def write(
    generate: Generate,
    documents: Sequence[np.ndarray],
    *,
    num_tokens: int,
    text_len: int,
    end_token_id: int,
    seed: int,
    is_quiet: bool = True,
) -> list[np.ndarray]:
    """Has a teacher write.

    Args:
      generate: of the teacher.
      documents: ids of the corpus, to take prompts from; each place is as likely as any other.
      num_tokens: to write, at least; prompts are not counted.
      text_len: tokens a text, prompt and continuation; more than ``PROMPT_LEN``.
      end_token_id: put after each text.
      seed: of prompts and draws.
      is_quiet: show no progress.

    Returns:
      The texts, int32, each with its end token.
    """
    if text_len <= PROMPT_LEN:
        raise ValueError(f"sequence_len: expected over {PROMPT_LEN} tokens for a teacher's text, got {text_len}")
    tokens = np.concatenate(documents)
    if len(tokens) < PROMPT_LEN:
        raise ValueError(f"corpus: expected at least {PROMPT_LEN} tokens to take prompts from, got {len(tokens)}")
    rng = np.random.default_rng(seed)
    texts: list[np.ndarray] = []
    written = 0
    with tqdm.tqdm(total=num_tokens, unit="token", desc="teacher", disable=is_quiet) as progress:
        while written < num_tokens:
            starts = rng.integers(len(tokens) - PROMPT_LEN + 1, size=BATCH_SIZE)
            prompts = [tokens[start : start + PROMPT_LEN].tolist() for start in starts]
            seeds = [int(number) for number in rng.integers(2**63, size=BATCH_SIZE)]
            rows = generate(prompts, text_len - PROMPT_LEN, seeds)
            new = sum(len(row) for row in rows)
            for prompt, row in zip(prompts, rows, strict=True):
                ids = [*prompt, *row]
                texts.append(np.asarray(ids if ids[-1] == end_token_id else [*ids, end_token_id], np.int32))
            if not new:
                raise ValueError("teacher: expected new tokens, got none for any prompt; is it a trained model?")
            written += new
            progress.update(new)
    return texts
