"""What a caller asks for, checked and resolved to one entry a row."""

import dataclasses
import secrets
from collections.abc import Callable, Sequence
from typing import Any, TypedDict

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode import sampling as sampling_lib
from jdecode.decode import stopping
from jdecode.text import tokenizer as tokenizer_lib

Prompts = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]] | np.ndarray
SamplingConfigs = config_lib.SamplingConfig | Sequence[config_lib.SamplingConfig]

MOST_NEW_TOKENS = 2**24
"""The longest output of one request: its buffer is allocated before the first token."""


class DraftOptions(TypedDict, total=False):
    """The options of speculative decoding; see ``LanguageModel.stream``."""

    draft: Any
    num_draft_tokens: int
    verify: str
    adaptive_draft: bool


class Options(DraftOptions, total=False):
    """The options of ``LanguageModel.stream`` and ``LanguageModel.generate``; see the former."""

    max_new_tokens: int
    sampling: SamplingConfigs
    num_samples: int
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    ignore_eos: bool
    logprobs: int | None
    transforms: Sequence[sampling_lib.Transform]
    cache: config_lib.CacheConfig
    capacity: int | None
    prefix_cache: Any
    lengths: Sequence[int] | np.ndarray | None
    steps_per_look: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
    """One generation, resolved to numbers. Rows are samples of prompts, prompt by prompt.

    Attributes:
      prompts: ids, one list a prompt.
      num_samples: rows a prompt; they share its prefill.
      sampling_configs: one a row.
      seeds: one a row; samples of one prompt share theirs and are told apart by their number.
      max_new_tokens: of every row.
      stop_ids: tokens that end a row.
      stop: strings that end a row.
      transforms: the caller's own.
      num_top_logprobs: ``None`` for no log-probabilities.
      steps_per_look: tokens a row between two looks of the host.
      continues_text: one a prompt: whether the new text follows text, and so keeps a first space.
    """

    prompts: list[list[int]]
    num_samples: int
    sampling_configs: list[config_lib.SamplingConfig]
    seeds: list[int]
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    stop: tuple[str, ...]
    transforms: tuple[sampling_lib.Transform, ...]
    num_top_logprobs: int | None
    steps_per_look: int
    continues_text: list[bool]

    @property
    def num_rows(self) -> int:
        """B."""
        return len(self.prompts) * self.num_samples

    @property
    def row_prompts(self) -> list[list[int]]:
        """The prompt of each row."""
        return [prompt for prompt in self.prompts for _ in range(self.num_samples)]


def resolve(
    prompts: list[list[int]],
    *,
    vocab_size: int,
    tokenizer: tokenizer_lib.Tokenizer | None,
    end_token_ids: Sequence[int],
    max_new_tokens: int,
    sampling: SamplingConfigs,
    num_samples: int = 1,
    stop: str | Sequence[str] = (),
    stop_token_ids: Sequence[int] = (),
    ignore_eos: bool = False,
    logprobs: int | None = None,
    transforms: Sequence[sampling_lib.Transform] = (),
    steps_per_look: int,
    continues_text: bool | None = None,
) -> Request:
    """Checks options and spreads them over rows.

    Args:
      prompts: ids, as ``prompt_rows`` returns them.
      vocab_size: V.
      tokenizer, end_token_ids: of the model.
      max_new_tokens, num_samples, logprobs: whole numbers in range, see ``count``.
      continues_text: ``None`` decides by whether a prompt holds any text.
      The others are those of ``LanguageModel.stream``.

    Raises:
      ValueError, TypeError: an option that cannot be honoured, one line.
    """
    for name, value in (("stop_token_ids", stop_token_ids), ("transforms", transforms), ("stop", stop)):
        if not is_list(value) and not (name == "stop" and isinstance(value, str)):
            raise TypeError(f"{name}: expected a list, got {type(value).__name__}")
    configs = _sampling_configs(sampling, len(prompts))
    seeds = [secrets.randbits(63) if config.seed is None else config.seed for config in configs]
    configs = [_without_nameless_tokens(config, tokenizer, vocab_size) for config in configs]
    if continues_text is None:
        texts = [_has_text(prompt, tokenizer) for prompt in prompts]
    else:
        texts = [continues_text] * len(prompts)
    return Request(
        prompts=prompts,
        num_samples=num_samples,
        sampling_configs=[config for config in configs for _ in range(num_samples)],
        seeds=[seed for seed in seeds for _ in range(num_samples)],
        max_new_tokens=max_new_tokens,
        stop_ids=stopping.stop_ids(end_token_ids, stop_token_ids, ignore_eos=ignore_eos, vocab_size=vocab_size),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        transforms=tuple(transforms),
        num_top_logprobs=logprobs,
        steps_per_look=count("steps_per_look", steps_per_look, least=1),
        continues_text=texts,
    )


def _sampling_configs(sampling: SamplingConfigs, num_prompts: int) -> list[config_lib.SamplingConfig]:
    configs = [sampling] * num_prompts if isinstance(sampling, config_lib.SamplingConfig) else sampling
    if not is_list(configs) or not all(isinstance(config, config_lib.SamplingConfig) for config in configs):
        raise TypeError(f"sampling: expected a SamplingConfig, or a list of them, got {sampling!r}")
    if len(configs) != num_prompts:
        raise ValueError(f"sampling: expected one config, or one for each prompt ({num_prompts}), got {len(configs)}")
    return list(configs)


def _without_nameless_tokens(
    config: config_lib.SamplingConfig, tokenizer: tokenizer_lib.Tokenizer | None, vocab_size: int
) -> config_lib.SamplingConfig:
    """Bans the ids past the tokenizer's last, which stand for nothing: embeddings are often padded."""
    if tokenizer is None or tokenizer.vocab_size >= vocab_size:
        return config
    nameless = range(tokenizer.vocab_size, vocab_size)
    return dataclasses.replace(config, banned_token_ids=(*config.banned_token_ids, *nameless))


def _has_text(ids: Sequence[int], tokenizer: tokenizer_lib.Tokenizer | None) -> bool:
    if tokenizer is None:
        return False
    return any(token_id < tokenizer.vocab_size and not tokenizer.is_special(token_id) for token_id in ids)


def prompt_rows(
    prompts: Prompts,
    lengths: Sequence[int] | np.ndarray | None,
    *,
    encode: Callable[[str], list[int]],
    vocab_size: int,
) -> list[list[int]]:
    """Turns what callers may pass as prompts into lists of ids, one a row.

    Args:
      prompts: a string, a list of token ids, a list of either, or a padded int array with ``lengths``.
      lengths: how many ids of each row of an array are real.
      encode: turns text into ids.
      vocab_size: V.

    Raises:
      ValueError, TypeError: anything else, one line.
    """
    if isinstance(prompts, np.ndarray | jax.Array):
        rows = _array_rows(np.asarray(prompts), lengths)
    elif lengths is not None:
        raise ValueError("lengths: expected only beside an array of prompts; lists are ragged as they are")
    elif isinstance(prompts, str):
        rows = [encode(prompts)]
    elif not is_list(prompts):
        raise TypeError(f"prompts: expected text, token ids or a list of either, got {type(prompts).__name__}")
    elif len(prompts) and all(is_integer(prompt) for prompt in prompts):
        rows = [list(prompts)]
    else:
        rows = [_row_ids(row, prompt, encode) for row, prompt in enumerate(prompts)]
    if not rows:
        raise ValueError("prompts: expected at least one, got none")
    return [_checked_ids(row, ids, vocab_size) for row, ids in enumerate(rows)]


def _row_ids(row: int, prompt: Any, encode: Callable[[str], list[int]]) -> list[Any]:
    if isinstance(prompt, str):
        return encode(prompt)
    if isinstance(prompt, np.ndarray | jax.Array) and prompt.ndim == 1:
        return np.asarray(prompt).tolist()
    if not is_list(prompt):
        raise TypeError(f"prompt of row {row}: expected text or a list of token ids, got {prompt!r}")
    return list(prompt)


def _checked_ids(row: int, ids: Sequence[Any], vocab_size: int) -> list[int]:
    if not ids:
        raise ValueError(f"prompt of row {row}: expected at least one token, got none; give it a start token")
    for token_id in ids:
        if not is_integer(token_id) or not 0 <= token_id < vocab_size:
            raise ValueError(f"prompt of row {row}: expected token ids from 0 to {vocab_size - 1}, got {token_id!r}")
    return [int(token_id) for token_id in ids]


def _array_rows(array: np.ndarray, lengths: Sequence[int] | np.ndarray | None) -> list[list[int]]:
    """Cuts a padded array into rows; padding stands at their ends."""
    if array.ndim != 2 or not np.issubdtype(array.dtype, np.integer):
        raise ValueError(f"prompts: expected an int array (rows, tokens), got {array.dtype} of shape {array.shape}")
    if lengths is None:
        raise ValueError("lengths: expected the number of real ids of each row beside an array of prompts, got none")
    counts = np.asarray(lengths)
    is_count = counts.shape == (len(array),) and np.issubdtype(counts.dtype, np.integer)
    if not is_count or not ((counts >= 1) & (counts <= array.shape[1])).all():
        raise ValueError(f"lengths: expected {len(array)} counts from 1 to {array.shape[1]}, got {counts.tolist()}")
    return [row[:length].tolist() for row, length in zip(array, counts.tolist(), strict=True)]


def count(name: str, value: Any, *, least: int, most: int = 2**31 - 1) -> int:
    """Returns a whole number as a plain int.

    Raises:
      ValueError: it is none, or out of range.
    """
    if not is_integer(value) or not least <= value <= most:
        raise ValueError(f"{name}: expected a whole number from {least} to {most}, got {value!r}")
    return int(value)


def is_integer(value: Any) -> bool:
    """Says whether a value is a whole number; a bool is none."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def is_list(value: Any) -> bool:
    """Says whether a value is a sequence of things; text is none."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)
