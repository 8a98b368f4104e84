"""How a draft with logits draws its proposals, one after another."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.decode import state as state_lib
from jdecode.sampling import draw
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import proposals as proposals_lib

Feed = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]
"""(cache, token_B, is_asked_B) to (logits_BV, cache): reads one token in the rows that are asked."""


def propose(
    task: draft_lib.Task, feed: Feed, cache: Any, logits_BV: jax.Array, state: state_lib.DecodeState, want_B: jax.Array
) -> tuple[proposals_lib.Proposals, Any]:
    """Draws ``want_B`` tokens a row, each from the logits after those before it.

    The logits pass the target's chain, in the state that it has after the tokens before: draft and target compare
    laws of the same kind, and penalties see the draft's own tokens.

    Args:
      task: static.
      feed: of the draft's model.
      cache: what ``feed`` takes; it has read every row's latest token.
      logits_BV: after the latest token, of any width: a vocabulary that is padded otherwise is brought to V.
      state: the target's rows.
      want_B: int32, 0 to ``task.most``.

    Returns:
      The proposals, and the cache, which has read all of them but the last. A row whose logits are not finite
      proposes no more.
    """
    B, G, V = want_B.shape[0], task.most, task.vocab_size
    num_rounds = jnp.max(want_B)

    def draw_next(idx: jax.Array, logits_BV: jax.Array, sampler: Any, num_B: jax.Array, record):
        token_BG, law_BGV = record
        processed_BV = task.chain.apply(_to_width(logits_BV, V), sampler)
        position_B = state.cache.length_B + 1 + idx
        drawn_B = draw.draw(processed_BV, state.key_B, position_B, state.is_random_B, purpose=task.purpose)
        is_drawn_B = (idx < want_B) & (num_B == idx) & (drawn_B != sampling.INVALID_TOKEN)
        token_B = jnp.maximum(drawn_B, 0)
        token_BG = jax.lax.dynamic_update_slice_in_dim(token_BG, token_B[:, None], idx, axis=1)
        if law_BGV is not None:
            law_BGV = jax.lax.dynamic_update_slice_in_dim(law_BGV, processed_BV[:, None], idx, axis=1)
        return token_B, task.chain.accept(sampler, token_B, is_drawn_B), num_B + is_drawn_B, (token_BG, law_BGV)

    def advance(carry):
        idx, token_B, cache, sampler, num_B, record = carry
        logits_BV, cache = feed(cache, token_B, (idx < want_B) & (num_B == idx))
        token_B, sampler, num_B, record = draw_next(idx, logits_BV, sampler, num_B, record)
        return idx + 1, token_B, cache, sampler, num_B, record

    law_BGV = jnp.zeros((B, G, V), jnp.float32) if task.needs_law else None
    record = (jnp.zeros((B, G), jnp.int32), law_BGV)
    first = draw_next(jnp.int32(0), logits_BV, state.sampler, jnp.zeros_like(want_B), record)
    token_B, sampler, num_B, record = first
    carry = (jnp.int32(1), token_B, cache, sampler, num_B, record)
    *_, cache, _, num_B, record = jax.lax.while_loop(lambda carry: carry[0] < num_rounds, advance, carry)
    token_BG, law_BGV = record
    return proposals_lib.Proposals(token_BG=token_BG, num_B=num_B, logits_BGV=law_BGV), cache


def _to_width(logits_BV: jax.Array, width: int) -> jax.Array:
    """Cuts logits to a vocabulary's width, or fills them up with tokens that cannot be drawn."""
    missing = width - logits_BV.shape[1]
    if missing <= 0:
        return logits_BV[:, :width]
    return jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
