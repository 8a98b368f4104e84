"""The target's own first layers and its head as the draft (self-speculation; Zhang et al., Elhoushi et al. 2024).

For its layers the draft reads and writes the target's own cache: what those layers hold of the text is the same in
both. What it writes for its proposals stands past the length of the rows, where nobody sees it, and the target's block
writes the same places again, in every layer.
"""

import dataclasses
from collections.abc import Sequence
from typing import cast

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.cache import kv_cache
from jdecode.decode import state as state_lib
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import drawing
from jdecode.speculative import proposals as proposals_lib


@dataclasses.dataclass(frozen=True)
class LayerSkipDraft:
    """Proposes what the target's first layers and its head draw. See ``draft.Draft``; it has no memory.

    Attributes:
      model: the target, but with its first layers alone. It runs on the target's parameters.
    """

    model: transformer.Transformer

    @classmethod
    def of(cls, target: transformer.Transformer, num_layers: int | None = None) -> "LayerSkipDraft":
        """Makes the draft of a target.

        Args:
          num_layers: of the target's, from the first; ``None`` for a third of them.

        Raises:
          ValueError: the target has only one layer, or ``num_layers`` is not from 1 to one less than it has.
        """
        most = target.config.num_layers - 1
        if most < 1:
            raise ValueError("draft layer_skip: expected a model of at least 2 layers, got 1; use another draft")
        if num_layers is None:
            num_layers = max(1, target.config.num_layers // 3)
        config_lib.check_count("draft layer_skip", num_layers, 1)
        config_lib.check(num_layers <= most, f"draft layer_skip: expected 1 to {most} layers, got {num_layers}")
        config = dataclasses.replace(target.config, layers=target.config.layers[:num_layers])
        return cls(transformer.Transformer(config, backend=target.backend, dtype=target.dtype))

    def begin(
        self, params: draft_lib.Params, prompts: Sequence[Sequence[int]], *, num_samples: int, max_len: int
    ) -> tuple[()]:
        """Reads nothing: the target's cache holds the prompts."""
        del params, prompts, num_samples, max_len
        return ()

    def propose(
        self,
        task: draft_lib.Task,
        params: draft_lib.Params,
        memory: tuple[()],
        state: state_lib.DecodeState,
        want_B: jax.Array,
    ) -> tuple[proposals_lib.Proposals, tuple[()], kv_cache.KVCache]:
        """Draws token by token, on the target's cache."""
        own, whole = self.model.config.num_layers, state.cache

        def feed(cache: kv_cache.KVCache, token_B: jax.Array, is_asked_B: jax.Array):
            num_tokens_B = is_asked_B.astype(jnp.int32)
            logits_B1V, after = self.model.apply(params.target, token_B[:, None], cache, num_tokens_B=num_tokens_B)
            return logits_B1V[:, 0], cast(kv_cache.KVCache, after)

        with jax.named_scope("draft"):
            part = dataclasses.replace(whole, stores=whole.stores[:own], layout_idx=whole.layout_idx[:own])
            proposals, part = drawing.propose(task, feed, part, state, want_B)
        # The draft's slots go back into the target's cache: were they thrown away, both caches would have to be kept
        # side by side, and a part of it be copied every round.
        cache = dataclasses.replace(
            whole, stores=(*part.stores, *whole.stores[own:]), positions=part.positions, length_B=whole.length_B
        )
        return proposals, memory, cache

    def settle(self, memory: tuple[()], before: state_lib.DecodeState, after: state_lib.DecodeState) -> tuple[()]:
        """Has nothing to cut back."""
        del before, after
        return memory
