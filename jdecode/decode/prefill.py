"""Reading prompts: in chunks, each padded to a power of two, so that few programs serve every length."""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import shapes
from jdecode.cache import kv_cache
from jdecode.models import transformer

CHUNK_LEN = 512
"""Tokens a chunk. Longer ones read the weights less often and hold more activations."""

LEAST_CHUNK_LEN = 16
"""The shortest padded chunk."""

SCORES_IN_MEMORY = 2**25
"""How many float32 scores of the vocabulary ``score_chunk`` may form at once."""

PADDING_TOKEN = 0
"""Fills up chunks. Any id of the vocabulary will do: padding is neither seen nor stored."""


@functools.partial(jax.jit, static_argnames="model", donate_argnames=("cache", "logits_BV"))
def prefill_chunk(
    model: transformer.Transformer,
    params: Any,
    cache: kv_cache.KVCache,
    logits_BV: jax.Array,
    tokens_BT: jax.Array,
    num_tokens_B: jax.Array,
) -> tuple[kv_cache.KVCache, jax.Array]:
    """Feeds one chunk, and keeps the logits after each row's last token so far.

    Args:
      model: static.
      cache, logits_BV: donated; ``logits_BV`` of the chunk before.
      tokens_BT: int32, padded at the end of rows.
      num_tokens_B: int32, real tokens; a row with none keeps its logits.
    """
    new_B1V, after = model.apply(params, tokens_BT, cache, num_tokens_B=num_tokens_B, last_only=True)
    return cast(kv_cache.KVCache, after), jnp.where(num_tokens_B[:, None] > 0, new_B1V[:, 0], logits_BV)


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def score_chunk(
    model: transformer.Transformer,
    params: Any,
    cache: kv_cache.KVCache,
    tokens_BT: jax.Array,
    num_tokens_B: jax.Array,
    targets_BT: jax.Array,
) -> tuple[kv_cache.KVCache, jax.Array]:
    """Feeds one chunk; returns the cache and float32 (B, T), the log-probability (nats) of ``targets_BT``."""
    logits_BTV, after = model.apply(params, tokens_BT, cache, num_tokens_B=num_tokens_B)
    chosen_BT = jnp.take_along_axis(logits_BTV, targets_BT[:, :, None], axis=2)[:, :, 0]
    return cast(kv_cache.KVCache, after), chosen_BT - jax.nn.logsumexp(logits_BTV, axis=-1)


def chunks(rows: Sequence[Sequence[int]], chunk_len: int):
    """Cuts ragged rows into padded chunks.

    Yields:
      (tokens_BT, num_tokens_B), numpy int32: T is ``chunk_len``, or for the last chunk the least power of two, at
      least ``LEAST_CHUNK_LEN``, that holds what is left.
    """
    longest = max(len(row) for row in rows)
    for start in range(0, longest, chunk_len):
        parts = [list(row[start : start + chunk_len]) for row in rows]
        width = shapes.power_of_two_at_least(max(len(part) for part in parts))
        width = min(chunk_len, max(width, LEAST_CHUNK_LEN))
        tokens_BT = np.full((len(rows), width), PADDING_TOKEN, np.int32)
        for row, part in enumerate(parts):
            tokens_BT[row, : len(part)] = part
        yield tokens_BT, np.asarray([len(part) for part in parts], np.int32)


def check_room(cache: kv_cache.KVCache, num_tokens: Sequence[int]) -> None:
    """Refuses what would run past the cache's last slot.

    Raises:
      ValueError: some row would be longer than ``cache.max_len`` tokens.
    """
    if cache.max_len is None:
        return
    for row, (held, more) in enumerate(zip(np.asarray(cache.length_B), num_tokens, strict=True)):
        if held + more > cache.max_len:
            raise ValueError(
                f"capacity: expected room for {held + more} tokens in row {row} ({held} held, {more} more), got "
                f"{cache.max_len} slots; raise the capacity, or shorten the prompt or the output"
            )


def prefill(
    model: transformer.Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    cache: kv_cache.KVCache,
    *,
    chunk_len: int = CHUNK_LEN,
) -> tuple[kv_cache.KVCache, jax.Array]:
    """Feeds prompts to a model.

    Args:
      prompts: ids of each row, at least one a row; rows continue where the cache ends.
      cache: donated.
      chunk_len: tokens a chunk, at least 1.

    Returns:
      The cache after the prompts, and float32 (B, V), the logits after each prompt's last token.

    Raises:
      ValueError: a prompt is empty or does not fit, or the number of rows is not the cache's.
    """
    check_prompts(prompts, cache)
    logits_BV = jnp.zeros((len(prompts), model.config.vocab_size), jnp.float32)
    for tokens_BT, num_tokens_B in chunks(prompts, chunk_len):
        cache, logits_BV = prefill_chunk(
            model, params, cache, logits_BV, jnp.asarray(tokens_BT), jnp.asarray(num_tokens_B)
        )
    return cache, logits_BV


def score(
    model: transformer.Transformer,
    params: Any,
    rows: Sequence[Sequence[int]],
    cache: kv_cache.KVCache,
) -> list[np.ndarray]:
    """Computes the log-probability of every token but the first of each row, given those before it.

    Args:
      rows: ids, at least one a row.
      cache: empty and donated.

    Returns:
      For each row float32, one entry fewer than it has tokens, in nats.

    Raises:
      ValueError: as ``prefill``.
    """
    check_prompts(rows, cache)
    most = max(SCORES_IN_MEMORY // (len(rows) * model.config.vocab_size), LEAST_CHUNK_LEN)
    chunk_len = min(CHUNK_LEN, shapes.power_of_two_at_least(most + 1) // 2)
    # A row's last token has no target; any id stands in, and its score is cut off below.
    targets = [[*row[1:], PADDING_TOKEN] for row in rows]
    scores = []
    for (tokens_BT, num_tokens_B), (targets_BT, _) in zip(
        chunks(rows, chunk_len), chunks(targets, chunk_len), strict=True
    ):
        arrays = (jnp.asarray(tokens_BT), jnp.asarray(num_tokens_B), jnp.asarray(targets_BT))
        cache, score_BT = score_chunk(model, params, cache, *arrays)
        scores.append(np.asarray(score_BT))
    whole = np.concatenate(scores, axis=1)
    return [whole[row, : len(ids) - 1] for row, ids in enumerate(rows)]


def check_prompts(prompts: Sequence[Sequence[int]], cache: kv_cache.KVCache) -> None:
    if len(prompts) != cache.batch_size:
        raise ValueError(f"prompts: expected {cache.batch_size}, one for each row of the cache, got {len(prompts)}")
    for row, prompt in enumerate(prompts):
        if len(prompt) == 0:
            raise ValueError(f"prompt of row {row}: expected at least one token, got none; give it a start token")
    check_room(cache, [len(prompt) for prompt in prompts])
