"""A smaller model as the draft, with a cache of its own."""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.cache import allocate, cache_rows, kv_cache
from jdecode.decode import prefill
from jdecode.decode import state as state_lib
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import drawing
from jdecode.speculative import proposals as proposals_lib

CATCH_UP_LENS = (16, 1)
"""Tokens a block when a draft reads what it missed: many after a pause, one after a round that accepted everything."""


@dataclasses.dataclass(frozen=True)
class ModelDraft:
    """Proposes what a smaller model draws. See ``draft.Draft``; its memory is the model's own cache.

    The cache always holds a prefix of the row: prompt and output up to some token. After a round it is cut back to
    the accepted tokens; what the row has beyond it is read before the next proposal.

    Attributes:
      model: its vocabulary holds the same strings as the target's, but either may be padded.
      cache: layout and dtype of its cache.
      mesh: the devices of its cache, ``None`` for the default one.
    """

    model: transformer.Transformer
    cache: config_lib.CacheConfig
    mesh: jax.sharding.Mesh | None = None

    def init_cache(self, batch_size: int, capacity: int) -> kv_cache.KVCache:
        """Allocates an empty cache."""
        return allocate.init_cache(
            self.model.config,
            self.cache,
            batch_size=batch_size,
            capacity=capacity,
            compute_dtype=self.model.dtype,
            mesh=self.mesh,
        )

    def begin(
        self, params: draft_lib.Params, prompts: Sequence[Sequence[int]], *, num_samples: int, max_len: int
    ) -> kv_cache.KVCache:
        """Reads the prompts into an empty cache."""
        cache = self.init_cache(len(prompts), max_len)
        cache, _ = prefill.prefill(self.model, params.draft, self._readable(prompts), cache)
        if num_samples > 1:
            cache = cache_rows.repeat_rows(cache, num_samples)
        return cache

    def _readable(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Replaces ids past the draft's vocabulary, which stand for nothing, by its last one."""
        last = self.model.config.vocab_size - 1
        return [[min(token_id, last) for token_id in prompt] for prompt in prompts]

    def propose(
        self,
        task: draft_lib.Task,
        params: draft_lib.Params,
        memory: kv_cache.KVCache,
        state: state_lib.DecodeState,
        want_B: jax.Array,
    ) -> tuple[proposals_lib.Proposals, kv_cache.KVCache, kv_cache.KVCache]:
        """Reads what the row has beyond the cache, and draws token by token."""
        with jax.named_scope("draft"):
            cache = self._catch_up(params.draft, memory, state, want_B > 0)

            def feed(cache: kv_cache.KVCache, token_B: jax.Array, is_asked_B: jax.Array):
                return self._feed(params.draft, cache, token_B[:, None], is_asked_B.astype(jnp.int32))

            proposals, cache = drawing.propose(task, feed, cache, state, want_B)
        return proposals, cache, state.cache

    def settle(
        self, memory: kv_cache.KVCache, before: state_lib.DecodeState, after: state_lib.DecodeState
    ) -> kv_cache.KVCache:
        """Cuts the cache back to tokens that the row kept."""
        del before
        return kv_cache.truncate(memory, after.cache.length_B)

    def _feed(self, params: Any, cache: kv_cache.KVCache, tokens_BT: jax.Array, num_tokens_B: jax.Array):
        """Feeds a block; returns the logits after each row's last token, and the cache."""
        tokens_BT = jnp.minimum(tokens_BT, self.model.config.vocab_size - 1)
        logits_B1V, after = self.model.apply(params, tokens_BT, cache, num_tokens_B=num_tokens_B, last_only=True)
        return logits_B1V[:, 0], cast(kv_cache.KVCache, after)

    def _catch_up(
        self, params: Any, cache: kv_cache.KVCache, state: state_lib.DecodeState, is_asked_B: jax.Array
    ) -> kv_cache.KVCache:
        """Reads, in the rows that are asked, all tokens before the latest one."""
        prompt_len_B = state.cache.length_B + 1 - state.num_new_B

        def num_missing_B(cache: kv_cache.KVCache) -> jax.Array:
            return jnp.where(is_asked_B, state.cache.length_B - cache.length_B, 0)

        def read(block_len: int, cache: kv_cache.KVCache) -> kv_cache.KVCache:
            place_BT = (cache.length_B - prompt_len_B)[:, None] + jnp.arange(block_len)[None, :]
            tokens_BT = jnp.take_along_axis(state.tokens_BM, place_BT, axis=1, mode="clip")
            return self._feed(params, cache, tokens_BT, jnp.minimum(num_missing_B(cache), block_len))[1]

        for block_len, fewest in zip(CATCH_UP_LENS, (CATCH_UP_LENS[-1] + 1, 1), strict=True):
            cache = jax.lax.while_loop(
                lambda cache, fewest=fewest: jnp.max(num_missing_B(cache)) >= fewest,
                lambda cache, block_len=block_len: read(block_len, cache),
                cache,
            )
        return cache
