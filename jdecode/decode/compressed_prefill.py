"""Reading prompts into a cache that then keeps a part of them (``cache.compress``).

All but the last ``num_recent`` tokens of each prompt are read as ever. The last ones are a block of their own, in which
the layers to be compressed count the attention that slots get; so nothing is computed twice, and nothing is taken back.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jdecode.cache import compress, kv_cache
from jdecode.decode import prefill as prefill_lib
from jdecode.decode import prompt_reader
from jdecode.models import transformer


def prefill(
    model: transformer.Transformer,
    params: Any,
    prompts: Sequence[Sequence[int]],
    cache: kv_cache.KVCache,
    how: compress.Compression,
    *,
    chunk_len: int = prefill_lib.CHUNK_LEN,
) -> tuple[kv_cache.KVCache, jax.Array]:
    """Feeds prompts to a model, and compresses the cache.

    Args:
      prompts: ids of each row, at least one a row.
      cache: empty and donated; with a slot for every position in the layers without a window.
      how: static.
      chunk_len: tokens a chunk, at least 1.

    Returns:
      The compressed cache, and float32 (B, V), the logits after each prompt's last token.

    Raises:
      ValueError: as ``prefill.prefill``.
    """
    prefill_lib.check_prompts(prompts, cache)
    heads = [prompt[: -how.num_recent] for prompt in prompts]
    tails = [prompt[-how.num_recent :] for prompt in prompts]
    logits_BV = jnp.zeros((len(prompts), model.config.vocab_size), jnp.float32)
    for part in prefill_lib.chunks(heads, chunk_len):
        tokens_BT, num_tokens_B = map(jnp.asarray, part)
        cache, logits_BV = prefill_lib.prefill_chunk(model, params, cache, logits_BV, tokens_BT, num_tokens_B)
    cache = compress.observing(cache, compress.full_layers(model.config))
    ((tokens_BT, num_tokens_B),) = prefill_lib.chunks(tails, how.num_recent)
    cache, logits_BV = prefill_lib.prefill_chunk(
        model, params, cache, logits_BV, jnp.asarray(tokens_BT), jnp.asarray(num_tokens_B)
    )
    return compress.compress(cache, how), logits_BV


@dataclasses.dataclass(frozen=True)
class CompressingReader:
    """Reads prompts into an empty cache and keeps a part of them. See ``prompt_reader.PromptReader``."""

    how: compress.Compression

    def read(
        self, model: transformer.Transformer, params: Any, prompts: Sequence[Sequence[int]], cache: kv_cache.KVCache
    ) -> prompt_reader.PromptReading:
        """Feeds the prompts to the model, and compresses the cache."""
        cache, logits_BV = prefill(model, params, prompts, cache, self.how)
        return prompt_reader.PromptReading(cache=cache, logits_BV=logits_BV, stats={})
