"""The device loop, and the two functions around it.

``begin`` draws the first token from the logits after the prompt; ``run`` repeats the step in one ``while_loop`` on
the device until every row has ended or ``max_steps`` steps are done. Running to the end and streaming in chunks are
the same compiled program: the number of steps is traced.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.cache import kv_cache
from jdecode.decode import chosen_layout
from jdecode.decode import state as state_lib
from jdecode.decode import step as step_lib
from jdecode.models import transformer

ALL_STEPS = 2**31 - 1
"""As ``max_steps``: until every row has ended."""


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
    return step_lib.emit(chain, state, logits_BV)


def decode_steps(
    model: transformer.Transformer,
    chain: sampling.Transform,
    params: Any,
    state: state_lib.DecodeState,
    max_steps: jax.Array,
) -> state_lib.DecodeState:
    """Repeats the step while a row is running, at most ``max_steps`` (int32 scalar) times. Pure; see ``run``."""

    def is_unfinished(carry):
        done, state = carry
        return (done < max_steps) & jnp.any(state.status_B == state_lib.RUNNING)

    def advance(carry):
        done, state = carry
        return done + 1, step_lib.step(model, chain, params, state)

    _, state = jax.lax.while_loop(is_unfinished, advance, (jnp.int32(0), state))
    return state


_run = jax.jit(decode_steps, static_argnames=("model", "chain"), donate_argnames="state")


def run(
    model: transformer.Transformer,
    chain: sampling.Transform,
    params: Any,
    state: state_lib.DecodeState,
    max_steps: int = ALL_STEPS,
) -> state_lib.DecodeState:
    """Runs the loop on the device.

    Args:
      model, chain: static.
      params: of the model.
      state: donated.
      max_steps: tokens a row at most; traced, so that every number shares one compilation.
    """
    state, num_steps = unaliased(state), jnp.int32(max_steps)
    if next(iter(state.token_B.devices())).platform == "tpu":
        return chosen_layout.run(decode_steps, model, chain, params, state, num_steps)
    return _run(model, chain, params, state, num_steps)


def unaliased(tree: Any) -> Any:
    """Copies leaves that stand in a tree twice: a buffer can be donated only once."""
    seen: set[int] = set()

    def own(leaf: jax.Array) -> jax.Array:
        if id(leaf) in seen:
            return jnp.copy(leaf)
        seen.add(id(leaf))
        return leaf

    return jax.tree.map(own, tree)
