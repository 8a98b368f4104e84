"""The state of a decode: everything that changes from token to token, as one immutable pytree.

The latest token of a row is not in the cache yet: it is fed by the next step. So ``cache.length_B`` is the absolute
position of ``token_B``, and it is the length of prompt and output less one.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import sampling
from jdecode.cache import kv_cache

# How a row stands.
RUNNING = 0
STOPPED = 1  # a stop token, or a stop string that the host saw
FULL = 2  # as many tokens as were asked for
INVALID = 3  # the model's logits were not finite

FINISH_REASONS = {RUNNING: None, STOPPED: "stop", FULL: "length", INVALID: "error"}

NO_STOP_ID = -1
"""Fills up a row's list of stop ids; no drawn token equals it."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenScores:
    """Log-probabilities (nats) of the emitted tokens, under the model's own distribution: no transform is applied.

    Attributes:
      logprob_BM: float32.
      top_ids_BMJ, top_logprobs_BMJ: int32 and float32, the J most likely tokens at each place, best first.
    """

    logprob_BM: jax.Array
    top_ids_BMJ: jax.Array
    top_logprobs_BMJ: jax.Array


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """B rows in the middle of a decode.

    Attributes:
      cache: holds prompt and output, but for the latest token.
      token_B: int32, the latest token.
      tokens_BM: int32, the output; places from ``num_new_B`` on hold 0.
      num_new_B: int32, tokens in the output.
      max_new_B: int32, when to stop.
      status_B: int32, one of ``RUNNING``, ``STOPPED``, ``FULL``, ``INVALID``.
      stop_ids_BX: int32, tokens that end a row, padded with ``NO_STOP_ID``.
      sampler: state of the chain of transforms.
      key_B: key of each row's request; draws are addressed by position and never consume it.
      is_random_B: bool, whether a row draws or takes the argmax.
      scores: log-probabilities, ``None`` where nobody asked.
    """

    cache: kv_cache.KVCache
    token_B: jax.Array
    tokens_BM: jax.Array
    num_new_B: jax.Array
    max_new_B: jax.Array
    status_B: jax.Array
    stop_ids_BX: jax.Array
    sampler: Any
    key_B: jax.Array
    is_random_B: jax.Array
    scores: TokenScores | None


def init_state(
    cache: kv_cache.KVCache,
    *,
    sampler: Any,
    key_B: jax.Array,
    temperature_B: jax.Array,
    stop_ids_BX: jax.Array,
    max_new_B: jax.Array,
    output_len: int,
    num_top_logprobs: int | None,
) -> DecodeState:
    """Makes the state before the first token is drawn.

    Args:
      cache: after the prompts.
      sampler: of ``chain.init``.
      output_len: M. Static.
      num_top_logprobs: J, ``None`` for no log-probabilities at all. Static.
    """
    B, M = cache.batch_size, output_len
    scores = None
    if num_top_logprobs is not None:
        scores = TokenScores(
            logprob_BM=jnp.zeros((B, M), jnp.float32),
            top_ids_BMJ=jnp.zeros((B, M, num_top_logprobs), jnp.int32),
            top_logprobs_BMJ=jnp.zeros((B, M, num_top_logprobs), jnp.float32),
        )
    return DecodeState(
        cache=cache,
        token_B=jnp.zeros(B, jnp.int32),
        tokens_BM=jnp.zeros((B, M), jnp.int32),
        num_new_B=jnp.zeros(B, jnp.int32),
        max_new_B=max_new_B,
        status_B=jnp.where(max_new_B > 0, RUNNING, FULL).astype(jnp.int32),
        stop_ids_BX=stop_ids_BX,
        sampler=sampler,
        key_B=key_B,
        is_random_B=sampling.is_random(temperature_B),
        scores=scores,
    )


def finish(state: DecodeState, is_finished_B: np.ndarray) -> DecodeState:
    """Ends rows from the host, for instance at a stop string. They count as ``STOPPED``."""
    is_ended_B = jnp.asarray(is_finished_B) & (state.status_B == RUNNING)
    return dataclasses.replace(state, status_B=jnp.where(is_ended_B, STOPPED, state.status_B))
