"""The one order in which everything is applied, and the way from configs to the numbers it needs."""

import operator
from collections.abc import Iterable, Sequence

import jax.numpy as jnp
import numpy as np

from jdecode import config, shapes
from jdecode.sampling import chain, masks, penalties, protocol, temperature, truncation

_LEAST_WIDTH = 8  # of a padded list, so that short lists of any length share a shape
_LEAST_PROMPT_WIDTH = 16  # that of a padded chunk of prompt
_GREATEST_INT = 2**31 - 1
_SMALLEST_FLOAT = float(np.finfo(np.float32).tiny)


def standard_chain(extra: tuple[protocol.Transform, ...] = ()) -> chain.Chain:
    """Returns the chain of every decode: bias, bans, penalties, ``extra``, temperature, filters.

    It is the same whatever the values, so one compilation serves them all; a step pays for a transform only while a
    row of the batch uses it.

    Args:
      extra: the caller's own transforms, applied before the temperature. Hashable.
    """
    return chain.chain(
        masks.LogitBias(),
        masks.PermittedTokens(),
        penalties.TokenPenalties(),
        penalties.NoRepeatNgram(),
        masks.MinNewTokens(),
        *extra,
        temperature.Temperature(),
        truncation.TopK(),
        truncation.TopP(),
        truncation.MinP(),
        truncation.TypicalP(),
    )


def params_from_configs(
    configs: Sequence[config.SamplingConfig],
    *,
    vocab_size: int,
    prompts: Sequence[Sequence[int]],
    history_len: int,
    stop_ids: Sequence[Sequence[int]],
) -> protocol.SamplingParams:
    """Builds the numbers of a batch on the host, and checks them against the vocabulary.

    Lists of ids are padded to a power of two, at least 8, so that shapes seldom change. Filters of greedy rows are
    switched off: they cannot change an argmax.

    Args:
      configs: one a row.
      vocab_size: V.
      prompts: the token ids of each row's prompt.
      history_len: how many tokens, prompt and output together, a row can ever hold.
      stop_ids: the tokens that end each row.

    Returns:
      ``SamplingParams`` for ``len(configs)`` rows.

    Raises:
      ValueError: for lists of different lengths, ids outside the vocabulary, numbers that float32 cannot hold, prompts
        longer than ``history_len``, and rows in which no token could be drawn.
      TypeError: for ids that are not whole numbers.
    """
    batch = len(configs)
    for name, rows in (("prompts", prompts), ("stop_ids", stop_ids)):
        if len(rows) != batch:
            raise ValueError(f"{name}: expected one list for each of {batch} configs, got {len(rows)}")
    if history_len < 1:
        raise ValueError(f"history_len: expected a count of at least 1, got {history_len}")
    for row, prompt in enumerate(prompts):
        if len(prompt) > history_len:
            raise ValueError(f"prompt of row {row}: expected at most {history_len} tokens, got {len(prompt)}")
    biases = [tuple(entry.logit_bias) for entry in configs]
    bias_ids = _ids("logit_bias", [[token for token, _ in bias] for bias in biases], vocab_size)
    allowed = _ids("allowed_token_ids", [entry.allowed_token_ids for entry in configs], vocab_size)
    banned = _ids("banned_token_ids", [entry.banned_token_ids for entry in configs], vocab_size)
    stops = _ids("stop_ids", stop_ids, vocab_size)
    prompts = _ids("prompts", prompts, vocab_size)
    for row, entry in enumerate(configs):
        _check_not_empty(row, entry, allowed[row], banned[row], stops[row], vocab_size)

    random_only = [entry if entry.temperature >= _SMALLEST_FLOAT else config.SamplingConfig() for entry in configs]
    top_k = [entry.top_k if 0 < entry.top_k < vocab_size else 0 for entry in random_only]
    # No row can hold an n-gram, or output, that is longer than the history.
    sizes = [min(entry.no_repeat_ngram_size, history_len + 1) for entry in configs]
    least_lens = [min(entry.min_new_tokens, history_len + 1) for entry in configs]
    return protocol.SamplingParams(
        temperature_B=_floats("temperature", [entry.temperature for entry in configs]),
        top_k_B=_integers("top_k", top_k),
        top_p_B=_floats("top_p", [entry.top_p for entry in random_only]),
        min_p_B=_floats("min_p", [entry.min_p for entry in random_only]),
        typical_p_B=_floats("typical_p", [entry.typical_p for entry in random_only]),
        repetition_penalty_B=_floats("repetition_penalty", [c.repetition_penalty for c in configs], _SMALLEST_FLOAT),
        presence_penalty_B=_floats("presence_penalty", [entry.presence_penalty for entry in configs]),
        frequency_penalty_B=_floats("frequency_penalty", [entry.frequency_penalty for entry in configs]),
        no_repeat_ngram_size_B=_integers("no_repeat_ngram_size", sizes),
        min_new_tokens_B=_integers("min_new_tokens", least_lens),
        bias_ids_BX=jnp.asarray(_padded(bias_ids, protocol.PADDING_ID, np.int32)),
        bias_values_BX=_bias_values(biases),
        allowed_ids_BX=jnp.asarray(_padded(allowed, protocol.PADDING_ID, np.int32)),
        banned_ids_BX=jnp.asarray(_padded(banned, protocol.PADDING_ID, np.int32)),
        stop_ids_BX=jnp.asarray(_padded(stops, protocol.PADDING_ID, np.int32)),
        prompt_ids_BT=jnp.asarray(_padded(prompts, protocol.PADDING_ID, np.int32, least=_LEAST_PROMPT_WIDTH)),
        prompt_len_B=_integers("prompts", [len(prompt) for prompt in prompts]),
        history_len=history_len,
    )


def _check_not_empty(
    row: int, entry: config.SamplingConfig, allowed: list[int], banned: list[int], stops: list[int], vocab_size: int
) -> None:
    """Raises unless the row can draw some token, before ``min_new_tokens`` too."""

    def is_empty(excluded: set[int]) -> bool:
        return not set(allowed) - excluded if allowed else len(excluded) == vocab_size

    if is_empty(set(banned)):
        raise ValueError(
            f"banned_token_ids of row {row}: expected to leave a token that can be drawn, got all of "
            f"{len(set(allowed)) or vocab_size} banned; shorten the list"
        )
    if entry.min_new_tokens and is_empty(set(banned) | set(stops)):
        raise ValueError(
            f"min_new_tokens of row {row}: expected a token that can be drawn and is not a stop token, got none; "
            "allow another token or set min_new_tokens to 0"
        )


def _ids(name: str, rows: Sequence[Iterable[int]], vocab_size: int) -> list[list[int]]:
    """Returns the ids as plain integers, once they are known to be in the vocabulary."""
    checked = []
    for row, ids in enumerate(rows):
        try:
            plain = [operator.index(token_id) for token_id in ids]
        except TypeError:
            raise TypeError(f"{name} of row {row}: expected token ids, whole numbers, got {ids!r}") from None
        for token_id in plain:
            if not 0 <= token_id < vocab_size:
                raise ValueError(f"{name} of row {row}: expected ids from 0 to {vocab_size - 1}, got {token_id}")
        checked.append(plain)
    return checked


def _padded(rows: Sequence[Sequence[float]], filler: float, dtype: type, *, least: int = _LEAST_WIDTH) -> np.ndarray:
    """Returns the rows as one array [B, X], X a power of two."""
    width = shapes.power_of_two_at_least(max([least, *(len(row) for row in rows)]))
    array = np.full((len(rows), width), filler, dtype)
    for row, values in enumerate(rows):
        array[row, : len(values)] = values
    return array


def _check_floats(name: str, values: Iterable[float], least: float = -np.inf) -> None:
    greatest = float(np.finfo(np.float32).max)
    for value in values:
        if not max(least, -greatest) <= value <= greatest:
            raise ValueError(f"{name}: expected a number that float32 can hold, got {value}")


def _floats(name: str, values: Sequence[float], least: float = -np.inf):
    """Returns float32 [B], once every value is known to be finite there and not under ``least``."""
    _check_floats(name, values, least)
    return jnp.asarray(np.asarray(values, np.float32))


def _bias_values(biases: Sequence[Sequence[tuple[int, float]]]):
    """Returns float32 [B, X]: the numbers of the (id, number) pairs, padded with 0."""
    for bias in biases:
        _check_floats("logit_bias", [value for _, value in bias])
    return jnp.asarray(_padded([[value for _, value in bias] for bias in biases], 0, np.float32))


def _integers(name: str, values: Sequence[int]):
    """Returns int32 [B], once every value is known to be a whole number that fits."""
    for value in values:
        try:
            fits = 0 <= operator.index(value) <= _GREATEST_INT
        except TypeError:
            raise TypeError(f"{name}: expected a whole number, got {value!r}") from None
        if not fits:
            raise ValueError(f"{name}: expected a whole number up to {_GREATEST_INT}, got {value}")
    return jnp.asarray(np.asarray(values, np.int32))
