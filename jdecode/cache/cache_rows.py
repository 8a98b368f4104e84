"""Rows of a cache taken, repeated or given other pages: between the runs of the device loop, never in it."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.attention import visibility
from jdecode.cache import page_forks, page_pool
from jdecode.cache.kv_cache import KVCache, LayerStore


def take_rows(cache: KVCache, row_idx: jax.Array, *, num_pages: int | None = None) -> KVCache:
    """Returns a cache whose row i is row ``row_idx[i]`` (int32) of this one; rows may repeat.

    Where a layer has pages, rows share those that are full (``page_forks``), and every other column of every row gets a
    page of its own in a new pool. The latest tokens beside groups lie in no page, and every row has its own.

    Args:
      num_pages: of the new pool; ``None`` for as many as rows need that share nothing. Fewer are enough where rows
        share, see ``repeat_rows``; columns that get none drop what is written to them. Static.
    """
    take = functools.partial(jnp.take, indices=row_idx, axis=0)
    paged = cache.paged_layout
    if paged is None:
        return jax.tree.map(take, cache)
    assert cache.pages_BC is not None
    pools = [store for idx, store in enumerate(cache.stores) if cache.has_pages(idx)]
    fork = page_forks.fork(
        cache.pages_BC,
        cache.codec.stored_len(cache.length_B),
        row_idx,
        page_len=paged.page_len,
        num_old=page_pool.num_pages(pools[0].keys),
        num_new=row_idx.shape[0] * paged.num_columns if num_pages is None else num_pages,
    )

    def take_pages(leaf: jax.Array) -> jax.Array:
        return leaf.at[fork.source_P].get(mode="fill", fill_value=0)

    stores = _map_stores(cache, lambda pool: jax.tree.map(take_pages, pool), lambda rows: jax.tree.map(take, rows))
    taken = dataclasses.replace(cache, stores=stores, positions=tuple(map(take, cache.positions)))
    return with_pages(taken, fork.pages_RC, fork.shared_R, take(cache.length_B))


def repeat_rows(cache: KVCache, times: int) -> KVCache:
    """Returns a cache with every row ``times`` times, one beside the other; pages are shared. On the host."""
    row_idx, num_pages = np.repeat(np.arange(cache.batch_size, dtype=np.int32), times), None
    if cache.paged_layout is not None:
        tables = np.asarray(cache.pages_BC), np.asarray(cache.codec.stored_len(cache.length_B))
        least = page_forks.least_pages(*tables, row_idx, cache.paged_layout.page_len)
        num_pages = min(page_forks.padded_pages(least), len(row_idx) * cache.paged_layout.num_columns)
    return take_rows(cache, jnp.asarray(row_idx), num_pages=num_pages)


def with_pages(cache: KVCache, pages_BC: jax.Array, shared_B: jax.Array, length_B: jax.Array) -> KVCache:
    """Returns a cache whose rows are other texts in the same pools, as a table of the host says.

    Args:
      pages_BC, shared_B, length_B: int32, as in ``KVCache``. No two rows may have one page in columns that ``shared_B``
        leaves open. Layers that have rows of their own keep them, and so do the latest tokens beside groups; there a
        length must be one that they hold.

    Raises:
      ValueError: no layer has pages.
    """
    paged = cache.paged_layout
    if paged is None:
        raise ValueError("with_pages: expected a cache with pages, got none; use the layout paged")
    slot_1S = jnp.arange(paged.capacity, dtype=jnp.int32)[None, :]
    # Made anew: a page that is given to a column may hold anything, NaN too, and no old position may vouch for it.
    position_BS = jnp.where(slot_1S < length_B[:, None], slot_1S, visibility.EMPTY)
    positions = tuple(
        position_BS if layout is paged else own for layout, own in zip(cache.layouts, cache.positions, strict=True)
    )
    return dataclasses.replace(cache, positions=positions, pages_BC=pages_BC, shared_B=shared_B, length_B=length_B)


def copy_pages(cache: KVCache, from_N: jax.Array, to_N: jax.Array) -> KVCache:
    """Copies pages of every layer that has some, pair by pair; see ``page_pool.copy_pages``."""
    copy = functools.partial(page_pool.copy_pages, from_N=from_N, to_N=to_N)
    return dataclasses.replace(cache, stores=_map_stores(cache, copy, lambda rows: rows))


def _map_stores(
    cache: KVCache, change_pool: Callable[[Any], Any], change_rows: Callable[[Any], Any]
) -> tuple[LayerStore, ...]:
    """Returns the stores with every pool and all rows changed; the latest tokens beside groups are rows."""

    def change(idx: int, own: LayerStore) -> LayerStore:
        if not cache.has_pages(idx):
            return change_rows(own)
        return LayerStore(keys=change_pool(own.keys), values=change_pool(own.values), recent=change_rows(own.recent))

    return tuple(change(idx, own) for idx, own in enumerate(cache.stores))
