"""The device loop, and the two functions around it.

``begin`` draws the first token from the logits after the prompt; ``run`` repeats the step in one ``while_loop`` on
the device until every row has ended or some row has written ``max_tokens`` more. Running to the end and streaming in
chunks are the same compiled program: the number is traced. Which step it repeats, the plain one or a speculative
round, is a value like any other.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.cache import kv_cache
from jdecode.decode import chosen_layout, emission
from jdecode.decode import state as state_lib
from jdecode.decode import step as step_lib

ALL_TOKENS = 2**31 - 1
"""As ``max_tokens``: until every row has ended."""


@functools.partial(jax.jit, static_argnames=("chain", "output_len", "num_top_logprobs"), donate_argnames="cache")
def begin(
    chain: sampling.Transform,
    params: sampling.SamplingParams,
    cache: kv_cache.KVCache,
    logits_BV: jax.Array,
    *,
    key_B: jax.Array,
    stop_ids_BX: jax.Array,
    max_new_B: jax.Array,
    output_len: int,
    num_top_logprobs: int | None = None,
) -> state_lib.DecodeState:
    """Draws the first token of every row.

    Args:
      chain: static.
      params: the numbers of each row's sampling, with its prompt.
      cache: after the prompts; donated.
      logits_BV: float32, after each prompt's last token.
      key_B: of ``sampling.request_keys``.
      stop_ids_BX: int32, padded with ``state.NO_STOP_ID``.
      max_new_B: int32, at most ``output_len``.
      output_len, num_top_logprobs: M and J of ``state.DecodeState``. Static.
    """
    state = state_lib.init_state(
        cache,
        sampler=chain.init(params, *logits_BV.shape),
        key_B=key_B,
        temperature_B=params.temperature_B,
        stop_ids_BX=stop_ids_BX,
        max_new_B=max_new_B,
        output_len=output_len,
        num_top_logprobs=num_top_logprobs,
    )
    return emission.emit(chain, state, logits_BV)


def decode_steps(
    step: step_lib.Step[step_lib.State], params: Any, state: step_lib.State, max_tokens: jax.Array
) -> step_lib.State:
    """Repeats the step until no row is running, or some row has ``max_tokens`` (int32 scalar) more. See ``run``."""
    # No sum that could overflow: tokens still to come, not the number at which to stop.
    num_before_B = state.num_new_B

    def is_unfinished(state: step_lib.State) -> jax.Array:
        return jnp.any(state.status_B == state_lib.RUNNING) & (jnp.max(state.num_new_B - num_before_B) < max_tokens)

    return jax.lax.while_loop(is_unfinished, lambda state: step(params, state), state)


_run = jax.jit(decode_steps, static_argnames="step", donate_argnames="state")


def run(
    step: step_lib.Step[step_lib.State], params: Any, state: step_lib.State, max_tokens: int = ALL_TOKENS
) -> step_lib.State:
    """Runs the loop on the device.

    Args:
      step: static.
      params: of the step.
      state: donated.
      max_tokens: a look at the rows is wanted once one of them has written so many more; the last step may write past
        it. Traced, so that every number shares one compilation.
    """
    state, num_tokens = unaliased(state), jnp.int32(max_tokens)
    if next(iter(state.status_B.devices())).platform == "tpu":
        return chosen_layout.run(decode_steps, step, params, state, num_tokens)
    return _run(step, params, state, num_tokens)


def unaliased(tree: Any) -> Any:
    """Copies leaves that stand in a tree twice: a buffer can be donated only once."""
    seen: set[int] = set()

    def own(leaf: jax.Array) -> jax.Array:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)
