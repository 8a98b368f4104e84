"""Which caches a request needs: one that keeps every token, or a larger one for its prompts and a smaller one after."""

import dataclasses
import functools
from typing import Any

import jax

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.cache import allocate, compress, kv_cache

LEAST_CAPACITY = 256
"""Slots a row in the smallest cache that is allocated unasked."""

LEAST_NEW_SLOTS = 64
"""Slots for new tokens in the smallest compressed cache."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachePlan:
    """The caches of a request.

    Attributes:
      model: whose they are.
      cache: the config; it evicts where ``how`` says how.
      compute_dtype: of the model.
      capacity: slots a row, in layers that keep every token, for prompt and output.
      prompt_capacity: slots a row, in layers that are compressed, for the prompt; ``None`` where none are.
      how: the cache is compressed after the prompts; ``None`` where it is not.
    """

    model: config_lib.ModelConfig
    cache: config_lib.CacheConfig
    compute_dtype: str
    capacity: int
    prompt_capacity: int | None = None
    how: compress.Compression | None = None

    def init(self, batch_size: int, *, mesh: jax.sharding.Mesh | None = None) -> kv_cache.KVCache:
        """Allocates the cache into which prompts are read."""
        return allocate.init_cache(
            self.model,
            self.cache if self.how is None else self.cache.without_eviction(),
            batch_size=batch_size,
            capacity=self.capacity,
            prompt_capacity=self.prompt_capacity,
            compute_dtype=self.compute_dtype,
            mesh=mesh,
        )

    def row_shapes(self) -> tuple[Any, ...]:
        """Returns the shapes of what a row has in memory at once, at most."""
        prompt = jax.eval_shape(functools.partial(self.init, 1))
        if self.how is None:
            return (prompt,)
        init = functools.partial(
            allocate.init_compressed,
            self.model,
            self.cache,
            batch_size=1,
            capacity=self.capacity,
            num_new=self.how.num_new or 0,
            compute_dtype=self.compute_dtype,
        )
        return prompt, jax.eval_shape(init)


def plan(
    model: config_lib.ModelConfig,
    cache: config_lib.CacheConfig,
    compute_dtype: str,
    *,
    longest_prompt: int,
    max_new_tokens: int,
    capacity: int | None,
) -> CachePlan:
    """Plans the caches of a request.

    Nothing is compressed where the budget holds all that it would keep: the prompts with ``snapkv``, prompts and output
    with ``h2o``. Then every bit is what it is without.

    Args:
      longest_prompt: in tokens.
      max_new_tokens: the most that come after a prompt.
      capacity: slots a row, ``None`` for what is needed.

    Raises:
      ValueError: the capacity is too small, or given beside an eviction; or tokens should be evicted, but every layer
        of the model has a window.
    """
    check_config(cache)
    if capacity is not None and cache.eviction is not None:
        raise ValueError(
            f"capacity: expected none beside the eviction {cache.eviction}, whose budget bounds the cache, got "
            f"{capacity}; leave one of them out"
        )
    slots = _slots(longest_prompt + max_new_tokens, max_new_tokens, capacity)
    whole = CachePlan(model=model, cache=cache.without_eviction(), compute_dtype=compute_dtype, capacity=slots)
    how = compress.compression(cache, new_slots_for(max_new_tokens))
    if how is None:
        return whole
    if not compress.full_layers(model):
        raise ValueError(
            "cache eviction: expected a model with layers that have no window, got one whose every layer has one; "
            f"leave {cache.eviction} out, for rings bound this cache already"
        )
    if not how.acts(longest_prompt, max_new_tokens):
        return whole
    return dataclasses.replace(whole, cache=cache, prompt_capacity=capacity_for(longest_prompt), how=how)


def check_config(cache: Any) -> None:
    """Raises ``TypeError`` for what is no config of a cache."""
    if not isinstance(cache, config_lib.CacheConfig):
        raise TypeError(f"cache: expected a CacheConfig, got {type(cache).__name__}")


def _slots(needed: int, max_new_tokens: int, capacity: int | None) -> int:
    """Returns the slots of a request's cache: ``capacity`` if it is enough, or what is needed."""
    if capacity is None:
        return capacity_for(needed)
    if needed > capacity:
        raise ValueError(
            f"capacity: expected at least {needed} slots (prompt and {max_new_tokens} new tokens), got {capacity}; "
            "raise the capacity, or shorten the prompt or the output"
        )
    return capacity


def capacity_for(num_tokens: int) -> int:
    """Returns how many slots to allocate for ``num_tokens``: few sizes, so that few programs are compiled.

    There are four sizes between a power of two and the next, and at least ``LEAST_CAPACITY`` slots.
    """
    step = max(shapes.power_of_two_at_least(num_tokens) // 8, LEAST_CAPACITY)
    return shapes.round_up(num_tokens, step)


def new_slots_for(num_new: int) -> int:
    """Returns how many slots to allocate for new tokens: few sizes, as ``capacity_for`` does, but finer."""
    step = max(shapes.power_of_two_at_least(num_new) // 8, LEAST_NEW_SLOTS)
    return shapes.round_up(num_new, step)
