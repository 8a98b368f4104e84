"""Compression inside the cache: after its prompt, a layer without a window keeps M tokens of it, chosen by attention.

::

    observing(cache, layers)     the layers begin to count the attention that slots get (``LayerStore.received_BS``)
    a block: the prompt's end    its queries are the observation
    compress(cache, how)         each layer gathers the slots that it keeps into a smaller cache

Kept (Li et al. 2024, "SnapKV", section 4): the last tokens of the prompt, those that observed; and of the others those
with the most attention from them, summed over heads and queries, then a maximum over some neighbouring positions, so
that a token is kept with what stands around it. A layer chooses for all of its heads; layers choose on their own.

What comes after the prompt depends on the layout of the compressed cache (``layout_kept``: everything new is kept;
``layout_evicting``: M slots in all, whatever comes). Positions are kept: a gathered slot holds the same bits and the
same position, so scores with it are what they were, and the mask goes by positions as ever.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import kv_cache, layout, layout_evicting, layout_full, layout_kept, page_pool
from jdecode.cache import slots as slots_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Compression:
    """How a cache is compressed. Static.

    Attributes:
      budget: M, slots that are kept of a prompt.
      num_recent: of them, the last tokens of the prompt, which observe and stay.
      smoothing: positions over which the attention is pooled, an odd number.
      num_new: R, slots for what comes after the prompt; ``None`` for none beside the M: each new token evicts one.
    """

    budget: int
    num_recent: int
    smoothing: int
    num_new: int | None

    @property
    def is_lasting(self) -> bool:
        """Whether attention is counted, and tokens evicted, after the prompt too."""
        return self.num_new is None

    def acts(self, longest_prompt: int, num_new: int) -> bool:
        """Says whether the budget is too small for a text of so many tokens; else nothing is done."""
        return longest_prompt + (num_new if self.is_lasting else 0) > self.budget

    def layout(self, layer: int) -> layout.PlacingLayout:
        """Returns the layout of a layer of the compressed cache."""
        if self.num_new is None:
            return layout_evicting.EvictingLayout(budget=self.budget, num_recent=self.num_recent, layer=layer)
        return layout_kept.KeptLayout(num_kept=self.budget, num_new=self.num_new, layer=layer)


def compression(cache_config: config_lib.CacheConfig, num_new: int) -> Compression | None:
    """Reads a config; ``None`` where it keeps every token.

    Args:
      num_new: the most tokens that come after a prompt.
    """
    if cache_config.eviction is None:
        return None
    budget, num_recent = cache_config.budget, cache_config.num_recent
    assert budget is not None  # the config has seen to it
    return Compression(
        budget=budget,
        num_recent=min(config_lib.MOST_RECENT, budget // 2) if num_recent is None else num_recent,
        smoothing=config_lib.SMOOTHING if cache_config.smoothing is None else cache_config.smoothing,
        num_new=None if cache_config.eviction == "h2o" else num_new,
    )


def full_layers(model_config: config_lib.ModelConfig) -> tuple[int, ...]:
    """Returns the layers that are compressed: those without a window."""
    return tuple(idx for idx, layer in enumerate(model_config.layers) if layer.window is None)


def observing(cache: kv_cache.KVCache, layers: Sequence[int]) -> kv_cache.KVCache:
    """Returns the cache with the given layers counting attention from here on.

    Args:
      layers: each with a slot for every position (``layout_full``).
    """
    stores = list(cache.stores)
    for idx in layers:
        own = cache.layout_idx[idx]
        assert isinstance(cache.layouts[own], layout_full.FullLayout)
        # Computed from the table, so that it lies on the same devices.
        zeros_BS = (cache.positions[own] * 0).astype(jnp.float32)
        stores[idx] = dataclasses.replace(stores[idx], received_BS=zeros_BS)
    return dataclasses.replace(cache, stores=tuple(stores))


@functools.partial(jax.jit, static_argnames="how")
def compress(cache: kv_cache.KVCache, how: Compression) -> kv_cache.KVCache:
    """Keeps, in each layer that counts attention, the slots that are worth most.

    Args:
      cache: as ``observing`` and the prompt's last block left it. Not donated: no buffer has the size of another.
      how: static.

    Returns:
      A cache of the same texts, whose layouts are those of ``how``; layers that do not count are as they were.
    """
    layouts, tables, stores = [], [], []
    for idx, store in enumerate(cache.stores):
        own = cache.layout_idx[idx]
        if store.received_BS is None:
            layouts.append(cache.layouts[own])
            tables.append(cache.positions[own])
            stores.append(store)
            continue
        layouts.append(how.layout(idx))
        slot_BX = kept_slots(store.received_BS, cache.positions[own], cache.length_B, how)
        tables.append(slots_lib.gather(cache.positions[own], slot_BX, filler=int(visibility.EMPTY)))
        stores.append(
            kv_cache.LayerStore(
                keys=page_pool.take_slots(store.keys, slot_BX),
                values=page_pool.take_slots(store.values, slot_BX),
                received_BS=slots_lib.gather(store.received_BS, slot_BX) if how.is_lasting else None,
            )
        )
    distinct = tuple(dict.fromkeys(layouts))
    return kv_cache.KVCache(
        stores=tuple(stores),
        positions=tuple(tables[layouts.index(own)] for own in distinct),
        length_B=cache.length_B,
        layouts=distinct,
        layout_idx=tuple(distinct.index(own) for own in layouts),
        codec=cache.codec,
    )


def kept_slots(received_BS: jax.Array, position_BS: jax.Array, length_B: jax.Array, how: Compression) -> jax.Array:
    """Chooses what is kept, and where it goes.

    Args:
      received_BS: float32, the attention that each slot got. Slots are in the order of positions.
      position_BS, length_B: int32, of the cache.
      how: static.

    Returns:
      int32 (B, M + R): for each slot of the compressed cache the slot that goes there, S for none. The M are in the
      order of positions; a row with fewer tokens keeps all, behind empty slots.
    """
    M, S = how.budget, received_BS.shape[1]
    is_held_BS = position_BS < length_B[:, None]
    is_recent_BS = is_held_BS & (position_BS >= length_B[:, None] - how.num_recent)
    votes_BS = jnp.where(is_held_BS & ~is_recent_BS, received_BS, -jnp.inf)
    pooled_BS = jax.lax.reduce_window(votes_BS, -jnp.inf, jax.lax.max, (1, how.smoothing), (1, 1), "SAME")
    worth_BS = jnp.where(is_recent_BS, jnp.inf, jnp.where(is_held_BS, pooled_BS, -jnp.inf))
    if S < M:
        worth_BS = jnp.pad(worth_BS, ((0, 0), (0, M - S)), constant_values=-jnp.inf)
    best_BM = jax.lax.top_k(worth_BS, M)[1]
    is_none_BM = ~slots_lib.gather(is_held_BS, best_BM, filler=False)
    sorted_BM = jnp.sort(jnp.where(is_none_BM, -1, best_BM), axis=1)
    slot_BM = jnp.where(sorted_BM < 0, S, sorted_BM)
    return jnp.pad(slot_BM, ((0, 0), (0, how.num_new or 0)), constant_values=S)
