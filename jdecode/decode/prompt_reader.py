"""How the prompts of a request get into its cache. A reader is a value: the plain one computes every token."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax

from jdecode.cache import kv_cache
from jdecode.decode import prefill
from jdecode.models import transformer


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptReading:
    """What reading prompts gave.

    Attributes:
      cache: after the prompts.
      logits_BV: float32, after each prompt's last token.
      stats: counts to stand among those of the request.
    """

    cache: kv_cache.KVCache
    logits_BV: jax.Array
    stats: Mapping[str, int]


class PromptReader(Protocol):
    """Reads prompts into a cache."""

    def read(
        self, model: transformer.Transformer, params: Any, prompts: Sequence[Sequence[int]], cache: kv_cache.KVCache
    ) -> PromptReading:
        """Brings the cache to where it stands after the prompts.

        Args:
          prompts: ids, at least one a row.
          cache: a row a prompt; donated.

        Raises:
          ValueError: a prompt is empty or does not fit, or the number of rows is not the cache's.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainReader:
    """Computes every token; rows continue where the cache ends. See ``PromptReader``."""

    def read(
        self, model: transformer.Transformer, params: Any, prompts: Sequence[Sequence[int]], cache: kv_cache.KVCache
    ) -> PromptReading:
        """Feeds the prompts to the model."""
        cache, logits_BV = prefill.prefill(model, params, prompts, cache)
        return PromptReading(cache=cache, logits_BV=logits_BV, stats={})
