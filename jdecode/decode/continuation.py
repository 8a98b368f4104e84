"""How likely a model finds given continuations, with whatever its cache has kept of the prompts."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.cache import compress, kv_cache
from jdecode.decode import compressed_prefill, prefill
from jdecode.models import transformer


def score(
    model: transformer.Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    cache: kv_cache.KVCache,
    how: compress.Compression | None,
) -> list[np.ndarray]:
    """Computes the log-probability of each token of a continuation, given the prompt and the tokens before it.

    Args:
      prompts, continuations: ids of each row, at least one a row.
      cache: empty and donated.
      how: the cache is compressed, after the prompts; ``None`` where it keeps every token. Where tokens are evicted
        after the prompt too, they are fed one by one, as they are when they are written.

    Returns:
      For each row float32, one entry for each token of its continuation, in nats.

    Raises:
      ValueError: as ``prefill.prefill``, or a continuation is empty.
    """
    for row, ids in enumerate(continuations):
        if len(ids) == 0:
            raise ValueError(f"continuation of row {row}: expected at least one token, got none")
    if how is None:
        cache, logits_BV = prefill.prefill(model, params, prompts, cache)
    else:
        cache, logits_BV = compressed_prefill.prefill(model, params, prompts, cache, how)
    prefill.check_room(cache, [len(ids) - 1 for ids in continuations])
    first_B1 = jnp.asarray([[ids[0]] for ids in continuations])
    first_B = jnp.take_along_axis(logits_BV, first_B1, axis=1)[:, 0] - jax.nn.logsumexp(logits_BV, axis=1)
    scores = [np.asarray(first_B)[:, None]]
    fed, targets = [ids[:-1] for ids in continuations], [ids[1:] for ids in continuations]
    block_len = 1 if how is not None and how.is_lasting else prefill.score_chunk_len(len(prompts), model)
    for part, (targets_BT, _) in zip(prefill.chunks(fed, block_len), prefill.chunks(targets, block_len), strict=True):
        arrays = (*map(jnp.asarray, part), jnp.asarray(targets_BT))
        cache, score_BT = prefill.score_chunk(model, params, cache, *arrays)
        scores.append(np.asarray(score_BT))
    whole = np.concatenate(scores, axis=1)
    return [whole[row, : len(ids)] for row, ids in enumerate(continuations)]
