"""Refuses a request whose caches and output the devices could not hold together, before anything is allocated."""

import jax
import numpy as np

from jdecode import cache_plan, generation
from jdecode.parallel import device_memory
from jdecode.speculative import speculation as speculation_lib


def check(
    num_rows: int,
    plan: cache_plan.CachePlan,
    mesh: jax.sharding.Mesh | None,
    *,
    num_tokens: int,
    max_new_tokens: int,
    logprobs: int | None = None,
    speculation: speculation_lib.Speculation | None = None,
) -> None:
    """Counts the caches of model and draft, and the buffers of output.

    Args:
      num_rows: B.
      plan: of the model's caches.
      mesh: the devices, ``None`` for the default one.
      num_tokens: of the longest row, prompt and output.
      max_new_tokens, logprobs: see ``LanguageModel.stream``.
      speculation: ``None`` for no draft.

    Raises:
      ValueError: they are larger than the memory of the devices.
    """
    row = plan.row_shapes()
    max_len = generation.max_len_for(row[0] if plan.how is None else None, num_tokens)
    draft_row = () if speculation is None else speculation.cache_shapes(max_len)
    numbers_a_token = 1 if logprobs is None else 2 + 2 * logprobs
    buffers = jax.ShapeDtypeStruct((generation.output_len_for(max_new_tokens), numbers_a_token), np.float32)
    names = "cache, draft's cache and output" if jax.tree.leaves(draft_row) else "cache and output"
    what = f"{names} of {num_rows} rows x {plan.prompt_capacity or plan.capacity} slots"
    device_memory.check((row, draft_row, buffers), mesh, what, times=num_rows)
