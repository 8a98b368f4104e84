"""The one step that every driver runs: feed the latest tokens, draw the next ones."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.decode import state as state_lib
from jdecode.models import transformer
from jdecode.sampling import draw


def step(
    model: transformer.Transformer, chain: sampling.Transform, params: Any, state: state_lib.DecodeState
) -> state_lib.DecodeState:
    """Advances every running row by one token. Rows that have ended change nothing.

    Args:
      model, chain: static.
      params: of ``model``, as ``model.apply`` takes them.
      state: at least one row should be running.
    """
    is_live_B = state.status_B == state_lib.RUNNING
    logits_B1V, cache = model.apply(
        params, state.token_B[:, None], state.cache, num_tokens_B=is_live_B.astype(jnp.int32)
    )
    return emit(chain, dataclasses.replace(state, cache=cache), logits_B1V[:, 0])


def emit(chain: sampling.Transform, state: state_lib.DecodeState, logits_BV: jax.Array) -> state_lib.DecodeState:
    """Draws the next token of every running row, from the logits after its latest token.

    Args:
      chain: static.
      state: its cache holds everything that the logits have seen.
      logits_BV: float32, the model's own.
    """
    is_live_B = state.status_B == state_lib.RUNNING
    # Where the drawn token will stand: the key of a draw is addressed by it.
    position_B = state.cache.length_B
    processed_BV = chain.apply(logits_BV, state.sampler)
    drawn_B = draw.draw(processed_BV, state.key_B, position_B, state.is_random_B)
    is_valid_B = drawn_B != sampling.INVALID_TOKEN
    token_B = jnp.where(is_valid_B, drawn_B, 0)
    is_emitted_B = is_live_B & is_valid_B
    # A place past the end: the write of a row that emits nothing is dropped.
    place_B = jnp.where(is_emitted_B, state.num_new_B, state.tokens_BM.shape[1])
    num_new_B = state.num_new_B + is_emitted_B
    status_B = jnp.where(is_live_B, _status(token_B, num_new_B, state, is_valid_B), state.status_B)
    return dataclasses.replace(
        state,
        token_B=jnp.where(is_emitted_B, token_B, state.token_B),
        tokens_BM=_put(state.tokens_BM, place_B, token_B),
        num_new_B=num_new_B,
        status_B=status_B,
        sampler=chain.accept(state.sampler, token_B, is_emitted_B),
        scores=_record_scores(state.scores, place_B, token_B, logits_BV),
    )


def _status(token_B: jax.Array, num_new_B: jax.Array, state: state_lib.DecodeState, is_valid_B: jax.Array) -> jax.Array:
    is_stop_B = jnp.any(token_B[:, None] == state.stop_ids_BX, axis=1)
    status_B = jnp.where(num_new_B >= state.max_new_B, state_lib.FULL, state_lib.RUNNING)
    status_B = jnp.where(is_stop_B, state_lib.STOPPED, status_B)
    return jnp.where(is_valid_B, status_B, state_lib.INVALID)


def _put(buffer: jax.Array, place_B: jax.Array, value: jax.Array) -> jax.Array:
    """Writes ``value[b]`` to ``buffer[b, place_B[b]]``; places past the end are dropped."""
    return jax.vmap(lambda row, place, entry: row.at[place].set(entry, mode="drop"))(buffer, place_B, value)


def _record_scores(
    scores: state_lib.TokenScores | None, place_B: jax.Array, token_B: jax.Array, logits_BV: jax.Array
) -> state_lib.TokenScores | None:
    if scores is None:
        return None
    logprob_BV = jax.nn.log_softmax(logits_BV, axis=-1)
    top_logprobs_BJ, top_ids_BJ = jax.lax.top_k(logprob_BV, scores.top_ids_BMJ.shape[2])
    logprob_B = jnp.take_along_axis(logprob_BV, token_B[:, None], axis=1)[:, 0]
    return state_lib.TokenScores(
        logprob_BM=_put(scores.logprob_BM, place_B, logprob_B),
        top_ids_BMJ=_put(scores.top_ids_BMJ, place_B, top_ids_BJ),
        top_logprobs_BMJ=_put(scores.top_logprobs_BMJ, place_B, top_logprobs_BJ),
    )
