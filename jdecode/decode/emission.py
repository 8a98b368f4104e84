"""From logits to emitted tokens: one place a row in plain decoding, several after a verified draft.

A block of P places belongs to each row: place i is the i-th token that the step may emit. What is drawn for a place
holds only if every place before it was emitted and left the row running. So a chain of transforms is asked, at each
place, with the state that it has after the places before: ``process`` applies it to all places at once, and ``commit``
writes what is really emitted.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.decode import state as state_lib
from jdecode.sampling import draw


def emit(chain: sampling.Transform, state: state_lib.DecodeState, logits_BV: jax.Array) -> state_lib.DecodeState:
    """Draws the next token of every running row, from the logits after its latest token.

    Args:
      chain: static.
      state: its cache holds everything that the logits have seen.
      logits_BV: float32, the model's own.
    """
    processed_BV = chain.apply(logits_BV, state.sampler)
    # Where the drawn token will stand: the key of a draw is addressed by it.
    token_B = draw.draw(processed_BV, state.key_B, state.cache.length_B, state.is_random_B)
    num_open_B = jnp.ones_like(state.num_new_B)
    return commit(chain, state, token_B[:, None], num_open_B, logits_BV[:, None])[0]


def process(chain: sampling.Transform, sampler: Any, proposal_BG: jax.Array, logits_BPV: jax.Array) -> jax.Array:
    """Applies the chain at each of the P = G + 1 places of a block, as it stands after the proposals before the place.

    Args:
      chain: static.
      sampler: its state before the first place.
      proposal_BG: int32, the tokens that stand at the first G places if all of them are accepted.
      logits_BPV: float32, the model's own; those of place i have seen the i proposals before it.

    Returns:
      float32 (B, P, V).
    """
    B, P, V = logits_BPV.shape
    is_live_B = jnp.ones(B, bool)
    places = [sampler]
    for place in range(P - 1):
        places.append(chain.accept(places[-1], proposal_BG[:, place], is_live_B))
    # A transform treats rows alone, so the places of a block may be rows of a larger batch.
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves, axis=1).reshape(B * P, *leaves[0].shape[1:]), *places)
    return chain.apply(logits_BPV.reshape(B * P, V), rows).reshape(B, P, V)


def commit(
    chain: sampling.Transform,
    state: state_lib.DecodeState,
    token_BP: jax.Array,
    num_open_B: jax.Array,
    logits_BPV: jax.Array,
) -> tuple[state_lib.DecodeState, jax.Array]:
    """Writes the tokens of a block that are emitted, up to the place where the row ends.

    Args:
      chain: static.
      state: the rows before the block. Its cache is left as it is.
      token_BP: int32, what stands at each place, or ``INVALID_TOKEN``, which ends the row with an error.
      num_open_B: int32, how many places of a row hold a token that follows from those before, at least 1.
      logits_BPV: float32, the model's own, for the log-probabilities.

    Returns:
      The state after the block, and int32 (B,), how many tokens each row emitted.
    """
    P = token_BP.shape[1]
    place_1P = jnp.arange(P)[None, :]
    is_valid_BP = token_BP != sampling.INVALID_TOKEN
    token_BP = jnp.where(is_valid_BP, token_BP, 0)
    status_BP = _status(token_BP, state.num_new_B[:, None] + place_1P + 1, state, is_valid_BP)
    is_before_end_BP = jnp.cumsum(status_BP != state_lib.RUNNING, axis=1) - (status_BP != state_lib.RUNNING) == 0
    is_live_B = state.status_B == state_lib.RUNNING
    is_reached_BP = is_live_B[:, None] & is_before_end_BP & (place_1P < num_open_B[:, None])
    is_emitted_BP = is_reached_BP & is_valid_BP
    last_B1 = jnp.maximum(jnp.sum(is_reached_BP, axis=1, keepdims=True) - 1, 0)  # the last place that was reached
    num_emitted_B = jnp.sum(is_emitted_BP, axis=1)
    sampler = state.sampler
    for place in range(P):
        sampler = chain.accept(sampler, token_BP[:, place], is_emitted_BP[:, place])
    # Past the end of the buffer, and distinct: what is not emitted is dropped.
    slot_BP = jnp.where(is_emitted_BP, state.num_new_B[:, None] + place_1P, state.tokens_BM.shape[1] + place_1P)
    after = dataclasses.replace(
        state,
        token_B=jnp.where(num_emitted_B > 0, _at(token_BP, jnp.maximum(num_emitted_B[:, None] - 1, 0)), state.token_B),
        tokens_BM=_put(state.tokens_BM, slot_BP, token_BP),
        num_new_B=state.num_new_B + num_emitted_B,
        status_B=jnp.where(is_live_B, _at(status_BP, last_B1), state.status_B),
        sampler=sampler,
        scores=_record_scores(state.scores, slot_BP, token_BP, logits_BPV),
    )
    return after, num_emitted_B


def _status(
    token_BP: jax.Array, num_new_BP: jax.Array, state: state_lib.DecodeState, is_valid_BP: jax.Array
) -> jax.Array:
    """Says how a row stands after each place."""
    is_stop_BP = jnp.any(token_BP[:, :, None] == state.stop_ids_BX[:, None, :], axis=2)
    status_BP = jnp.where(num_new_BP >= state.max_new_B[:, None], state_lib.FULL, state_lib.RUNNING)
    status_BP = jnp.where(is_stop_BP, state_lib.STOPPED, status_BP)
    return jnp.where(is_valid_BP, status_BP, state_lib.INVALID)


def _at(values_BP: jax.Array, place_B1: jax.Array) -> jax.Array:
    return jnp.take_along_axis(values_BP, place_B1, axis=1)[:, 0]


def _put(buffer: jax.Array, slot_BP: jax.Array, values: jax.Array) -> jax.Array:
    """Writes ``values[b, i]`` to ``buffer[b, slot_BP[b, i]]``; slots past the end are dropped."""
    write = jax.vmap(lambda row, slots, entries: row.at[slots].set(entries, mode="drop", unique_indices=True))
    return write(buffer, slot_BP, values)


def _record_scores(
    scores: state_lib.TokenScores | None, slot_BP: jax.Array, token_BP: jax.Array, logits_BPV: jax.Array
) -> state_lib.TokenScores | None:
    if scores is None:
        return None
    logprob_BPV = jax.nn.log_softmax(logits_BPV, axis=-1)
    top_logprobs_BPJ, top_ids_BPJ = jax.lax.top_k(logprob_BPV, scores.top_ids_BMJ.shape[2])
    logprob_BP = jnp.take_along_axis(logprob_BPV, token_BP[:, :, None], axis=2)[:, :, 0]
    return state_lib.TokenScores(
        logprob_BM=_put(scores.logprob_BM, slot_BP, logprob_BP),
        top_ids_BMJ=_put(scores.top_ids_BMJ, slot_BP, top_ids_BPJ),
        top_logprobs_BMJ=_put(scores.top_logprobs_BMJ, slot_BP, top_logprobs_BPJ),
    )
