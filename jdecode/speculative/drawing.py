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

# Turn, latest token, proposals so far, cache, state of the chain; proposals and their laws.
_Carry = tuple[jax.Array, jax.Array, jax.Array, Any, Any, jax.Array, jax.Array | None]


def propose(
    task: draft_lib.Task, feed: Feed, cache: Any, state: state_lib.DecodeState, want_B: jax.Array
) -> tuple[proposals_lib.Proposals, Any]:
    """Draws ``want_B`` tokens a row, each after the row's text and those before it.

    The logits pass the target's chain, in the state that it has after the tokens before: draft and target compare
    laws of the same kind, and penalties see the draft's own tokens.

    Args:
      task: static.
      feed: of the draft's model. Its logits may have any width: a vocabulary that is padded otherwise is brought to V.
      cache: what ``feed`` takes. In rows that are asked it holds the text up to, but without, the latest token.
      state: the target's rows.
      want_B: int32, 0 to ``task.most``.

    Returns:
      The proposals, and the cache, which has read all of them but the last. A row whose logits are not finite
      proposes no more.
    """
    B, G, V = want_B.shape[0], task.most, task.vocab_size
    num_turns = jnp.max(want_B)

    def advance(carry: _Carry) -> _Carry:
        idx, token_B, num_B, cache, sampler, token_BG, law_BGV = carry
        is_asked_B = (idx < want_B) & (num_B == idx)
        logits_BV, cache = feed(cache, token_B, is_asked_B)
        processed_BV = task.chain.apply(_to_width(logits_BV, V), sampler)
        position_B = state.cache.length_B + 1 + idx
        drawn_B = draw.draw(processed_BV, state.key_B, position_B, state.is_random_B, purpose=task.purpose)
        is_drawn_B = is_asked_B & (drawn_B != sampling.INVALID_TOKEN)
        token_B = jnp.maximum(drawn_B, 0)
        token_BG = jax.lax.dynamic_update_slice_in_dim(token_BG, token_B[:, None], idx, axis=1)
        if law_BGV is not None:
            law_BGV = jax.lax.dynamic_update_slice_in_dim(law_BGV, processed_BV[:, None], idx, axis=1)
        sampler = task.chain.accept(sampler, token_B, is_drawn_B)
        return idx + 1, token_B, num_B + is_drawn_B, cache, sampler, token_BG, law_BGV

    law_BGV = jnp.zeros((B, G, V), jnp.float32) if task.needs_law else None
    start = (jnp.int32(0), state.token_B, jnp.zeros_like(want_B), cache, state.sampler)
    carry = (*start, jnp.zeros((B, G), jnp.int32), law_BGV)
    carry = jax.lax.while_loop(lambda carry: carry[0] < num_turns, advance, carry)
    _, _, num_B, cache, _, token_BG, law_BGV = carry
    return proposals_lib.Proposals(token_BG=token_BG, num_B=num_B, logits_BGV=law_BGV), cache


def _to_width(logits_BV: jax.Array, width: int) -> jax.Array:
    """Cuts logits to a vocabulary's width, or fills them up with tokens that cannot be drawn."""
    missing = width - logits_BV.shape[1]
    if missing <= 0:
        return logits_BV[:, :width]
    return jnp.pad(logits_BV, ((0, 0), (0, missing)), constant_values=-jnp.inf)
