"""Copies between a request's cache and a pool of pages on the device.

A copy moves stored bytes: nothing is decoded or encoded, so what comes out of a page is bit for bit what went in, for
every codec. Positions that a cache has lost (a ring was written over) are left out, and so is padding.

Shapes decide what is compiled: rows, the padded number of pages or tokens, the cache. Which pages are meant is traced.
"""

import functools
from typing import cast

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.cache import block as block_lib
from jdecode.cache import codec as codec_lib
from jdecode.cache import kv_cache, page_pool
from jdecode.cache import layout as layout_lib

Pages = tuple[kv_cache.LayerStore, ...]
"""One store of P pages a layer, see ``cache.page_pool``."""


def init(
    config: config_lib.ModelConfig,
    codec: codec_lib.KVCodec,
    *,
    num_pages: int,
    page_len: int,
    mesh: jax.sharding.Mesh | None = None,
) -> Pages:
    """Allocates empty pages for every layer: heads along ``model``, and every page on every device."""
    shape = (num_pages, page_len, config.num_kv_heads, config.head_dim)
    empty = tuple(
        kv_cache.LayerStore(keys=codec.keys.init(*shape, mesh), values=codec.values.init(*shape, mesh))
        for _ in config.layers
    )
    return empty if mesh is None else jax.tree.map(_with_whole_pages, empty)


def _with_whole_pages(leaf: jax.Array) -> jax.Array:
    sharding = leaf.sharding
    assert isinstance(sharding, jax.sharding.NamedSharding)
    spec = jax.sharding.PartitionSpec(None, *sharding.spec[1:])
    return jax.device_put(leaf, jax.sharding.NamedSharding(sharding.mesh, spec))


@functools.partial(jax.jit, donate_argnames="cache")
def restore(cache: kv_cache.KVCache, pages: Pages, page_BC: jax.Array, length_B: jax.Array) -> kv_cache.KVCache:
    """Brings the beginning of each row's text from pages into a cache.

    A ring takes the latest positions only. What its pages have lost is taken as garbage: the tree has seen to it that
    no query to come sees it.

    Args:
      cache: empty; donated.
      page_BC: int32, the pages of each row from position 0 on; past its last one any id past the pool.
      length_B: int32, tokens that each row gets, 0 for none.
    """
    page_len = pages[0].keys.num_slots
    block = block_lib.open_block(cache, page_BC.shape[1] * page_len, length_B)
    stores = []
    for old, held, layout_idx in zip(cache.stores, pages, cache.layout_idx, strict=True):
        slot_BT = block.slots[layout_idx]
        keys = cache.codec.keys.write(old.keys, slot_BT, page_pool.gather(held.keys, page_BC))
        values = cache.codec.values.write(old.values, slot_BT, page_pool.gather(held.values, page_BC))
        stores.append(kv_cache.LayerStore(keys=keys, values=values))
    return block_lib.close_block(cache, block, stores)


@functools.partial(jax.jit, donate_argnames="pages")
def keep(
    pages: Pages, cache: kv_cache.KVCache, position_BT: jax.Array, page_BT: jax.Array, offset_BT: jax.Array
) -> Pages:
    """Copies tokens of a cache into pages.

    Args:
      pages: donated.
      position_BT: int32, which tokens of each row; those past its length are left out.
      page_BT, offset_BT: int32, where they go; no place twice, and an id past the pool for what is not kept.
    """
    num_pages = page_pool.num_pages(pages[0].keys)
    length_B1 = cache.length_B[:, None]
    places = []
    for layout in cast(tuple[layout_lib.Layout, ...], cache.layouts):  # full or rings: see ``prefix_cache``
        is_held_BT = (position_BT < length_B1) & layout.survives(position_BT, length_B1)
        places.append((layout.slot(position_BT), jnp.where(is_held_BT, page_BT, num_pages)))
    stores = []
    for held, store, layout_idx in zip(pages, cache.stores, cache.layout_idx, strict=True):
        slot_BT, own_page_BT = places[layout_idx]
        keys = page_pool.write(held.keys, own_page_BT, offset_BT, page_pool.take_slots(store.keys, slot_BT))
        values = page_pool.write(held.values, own_page_BT, offset_BT, page_pool.take_slots(store.values, slot_BT))
        stores.append(kv_cache.LayerStore(keys=keys, values=values))
    return tuple(stores)


@functools.partial(jax.jit, donate_argnames="pages")
def copy_pages(pages: Pages, from_N: jax.Array, to_N: jax.Array) -> Pages:
    """Copies whole pages, pair by pair.

    Args:
      pages: donated.
      from_N, to_N: int32; a pair with an id past the pool does nothing.
    """
    return tuple(
        kv_cache.LayerStore(
            keys=page_pool.copy_pages(store.keys, from_N, to_N), values=page_pool.copy_pages(store.values, from_N, to_N)
        )
        for store in pages
    )
