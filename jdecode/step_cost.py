"""What a step takes on this machine: seconds of a model's block, of a look-up of ``ngram``, and the memory's bandwidth.

Steps are timed in a loop on the device, in the shapes of a request. Only times are read from it: what is fed is
whatever came out before.
"""

import dataclasses
import functools
import math
import statistics
import time
from typing import Any, cast

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import sampling
from jdecode.cache import kv_cache
from jdecode.decode import prefill, stopping
from jdecode.decode import state as state_lib
from jdecode.models import parameter_shapes, transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import draft_ngram

BANDWIDTH_BYTES = 2**30
"""Read to measure the bandwidth: far more than any cache of a processor holds."""


@functools.partial(jax.jit, static_argnames=("model", "block_len"), donate_argnames="cache")
def feed_blocks(
    model: transformer.Transformer, params: Any, cache: kv_cache.KVCache, num_steps: jax.Array, block_len: int
) -> tuple[jax.Array, kv_cache.KVCache]:
    """Feeds blocks one after another, each of which leaves one token in the cache, as a round that accepts nothing.

    Args:
      model: static.
      cache: donated. It must be able to take back ``block_len`` - 1 tokens.
      num_steps: int32 scalar.
      block_len: T, places of a block. Static.

    Returns:
      int32 (B, T), the most likely tokens after the last block; and the cache.
    """

    def step(_: jax.Array, carry: tuple[jax.Array, kv_cache.KVCache]):
        tokens_BT, before = carry
        logits_BTV, after = model.apply(params, tokens_BT, before)
        after = kv_cache.truncate(cast(kv_cache.KVCache, after), before.length_B + 1)
        return jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32), after

    first_BT = jnp.zeros((cache.batch_size, block_len), jnp.int32)
    return jax.lax.fori_loop(0, num_steps, step, (first_BT, cache))


@functools.partial(jax.jit, static_argnames=("draft", "task"))
def look_up(
    draft: draft_ngram.NgramDraft,
    task: draft_lib.Task,
    memory: draft_ngram.PromptText,
    state: state_lib.DecodeState,
    num_steps: jax.Array,
) -> jax.Array:
    """Proposes ``num_steps`` times, each time after one token more; returns the output, int32 (B, M).

    Args:
      draft, task: static.
      memory: of the prompt.
      state: rows without output.
      num_steps: int32 scalar, under M.
    """
    params = draft_lib.Params(target=(), draft=())
    want_B = jnp.full_like(state.num_new_B, task.most)

    def step(idx: jax.Array, tokens_BM: jax.Array) -> jax.Array:
        now = dataclasses.replace(state, tokens_BM=tokens_BM, num_new_B=jnp.full_like(state.num_new_B, idx + 1))
        proposals, _, _ = draft.propose(task, params, memory, now, want_B)
        next_B1 = jnp.where(proposals.num_B > 0, proposals.token_BG[:, 0], idx)[:, None]
        return jax.lax.dynamic_update_slice_in_dim(tokens_BM, next_B1, idx + 1, axis=1)

    return jax.lax.fori_loop(0, num_steps, step, state.tokens_BM)


def block_seconds(
    model: transformer.Transformer,
    params: Any,
    cache: kv_cache.KVCache,
    held: list[int],
    *,
    block_len: int,
    num_steps: int,
) -> float:
    """Times blocks of a model with one row; the first call of a shape compiles.

    Args:
      cache: empty, one row; donated. With slack for ``block_len`` - 1 tokens.
      held: tokens that stand in it when the clock starts; there must be room for ``num_steps`` more.
      block_len: T.

    Returns:
      Seconds a block.
    """
    cache, logits_BV = prefill.prefill(model, params, [held], cache)
    logits_BV.block_until_ready()
    start = time.perf_counter()
    tokens_BT, _ = feed_blocks(model, params, cache, jnp.int32(num_steps), block_len)
    tokens_BT.block_until_ready()
    return (time.perf_counter() - start) / num_steps


def look_up_seconds(
    draft: draft_ngram.NgramDraft,
    cache: kv_cache.KVCache,
    prompt: list[int],
    *,
    vocab_size: int,
    num_draft_tokens: int,
    max_len: int,
    num_steps: int,
) -> float:
    """Times the proposals of ``ngram`` for one row; the first call of a shape compiles.

    Args:
      cache: one row of the target; it is handed through, not read.
      vocab_size: V.
      num_draft_tokens: G.
      max_len: the most tokens, prompt and output, of the row.

    Returns:
      Seconds a round, whatever it proposes.
    """
    task = draft_lib.Task(
        chain=sampling.standard_chain(),
        vocab_size=vocab_size,
        most=num_draft_tokens,
        purpose=sampling.PURPOSE_DRAFT,
        needs_law=False,
    )
    state = state_lib.init_state(
        cache,
        sampler=(),
        key_B=sampling.request_keys([0], [0]),
        temperature_B=jnp.zeros(1, jnp.float32),
        stop_ids_BX=stopping.padded([[]]),
        max_new_B=jnp.full(1, num_steps, jnp.int32),
        output_len=num_steps + 1,
        num_top_logprobs=None,
    )
    nothing = draft_lib.Params(target=(), draft=())
    memory = jax.block_until_ready(draft.begin(nothing, [prompt], num_samples=1, max_len=max_len))
    start = time.perf_counter()
    look_up(draft, task, memory, state, jnp.int32(num_steps)).block_until_ready()
    return (time.perf_counter() - start) / num_steps


def operations_a_token(config: config_lib.ModelConfig) -> int:
    """Counts the multiplications and additions of a token's products with weights; attention's own are left out."""
    shapes = parameter_shapes.parameter_shapes(config)
    looked_up = "embedding/weight" if not config.tie_embeddings else None  # a row of it is read, not multiplied
    return 2 * sum(math.prod(shape) for path, shape in shapes.items() if len(shape) > 1 and path != looked_up)


def memory_bandwidth() -> float:
    """Returns bytes a second at which a float32 sum on the default device reads ``BANDWIDTH_BYTES``."""
    total = jax.jit(jnp.sum)
    array = jnp.ones(BANDWIDTH_BYTES // 4, jnp.float32)
    total(array).block_until_ready()
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        total(array).block_until_ready()
        seconds.append(time.perf_counter() - start)
    return array.nbytes / statistics.median(seconds)
