"""Copies between caches and pages, against numbers that say where they come from: no model is asked."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.cache import allocate, kv_cache
from jdecode.cache import block as block_lib
from jdecode.config import CacheConfig
from jdecode.serving import device_pages, page_copies
from tests import tiny_models

CONFIG, CAPACITY, PAGE_LEN, NUM_PAGES = tiny_models.MIXED, 16, 3, 8
K, H = CONFIG.num_kv_heads, CONFIG.head_dim
EMPTY_PAGE = -7.0


def number(layer: int, row: int, position: int, is_value: bool) -> float:
    """The number that every lane of a token's key or value has."""
    return 1000 * layer + 100 * row + position + 0.5 * is_value


def token(layer: int, num_rows: int, position: int, is_value: bool) -> jax.Array:
    number_B = [number(layer, row, position, is_value) for row in range(num_rows)]
    return jnp.asarray(np.broadcast_to(np.asarray(number_B, np.float32)[:, None, None, None], (num_rows, 1, K, H)))


def held_cache(lengths: list[int]) -> kv_cache.KVCache:
    """Writes tokens one by one, as steps do, so that rings wrap."""
    cache = tiny_models.empty_cache(CONFIG, len(lengths), capacity=CAPACITY)
    for position in range(max(lengths)):
        num_tokens_B = jnp.asarray([int(position < length) for length in lengths])
        block = block_lib.open_block(cache, 1, num_tokens_B)
        stores = []
        for layer, store in enumerate(cache.stores):
            slot_BT, codec = block.slots[cache.layout_idx[layer]], cache.codec.keys
            keys, values = (codec.encode(token(layer, len(lengths), position, is_value)) for is_value in (False, True))
            stores.append(
                kv_cache.LayerStore(
                    keys=codec.write(store.keys, slot_BT, keys), values=codec.write(store.values, slot_BT, values)
                )
            )
        cache = block_lib.close_block(cache, block, stores)
    return cache


def make_device() -> device_pages.DevicePages:
    codec = allocate.make_codec(CacheConfig(), "float32")
    device = device_pages.DevicePages(CONFIG, codec, num_pages=NUM_PAGES, page_len=PAGE_LEN, mesh=None)
    device.stores = jax.tree.map(lambda leaf: jnp.full_like(leaf, EMPTY_PAGE), device.stores)
    return device


def lanes(leaf: jax.Array) -> np.ndarray:
    """Returns the number of each slot, the same in all its lanes."""
    array = np.asarray(leaf)
    assert (array == array[..., :1]).all()
    return array[..., 0]


def test_kept_tokens_lie_where_the_table_says_and_nothing_else_changes():
    device, cache = make_device(), held_cache([10, 5])
    spans = [
        device_pages.Span(start=4, num_tokens=6, pages=(7, 2, 5, 0)),  # positions 4 .. 9: in pages 2, 5 and 0
        device_pages.Span(start=3, num_tokens=4, pages=(1, 6, 3)),  # 5 and 6 are past the row's length
    ]
    device.keep(cache, spans, 8)
    for layer, store in enumerate(device.stores):
        for rows, is_value in ((store.keys, False), (store.values, True)):
            expected = np.full((NUM_PAGES, PAGE_LEN), EMPTY_PAGE)
            # A ring of four has 6 .. 9 of the first row; the sinks of the second layer are 0 and 1, and its ring four.
            first_kept = 4 if CONFIG.layers[layer].window is None else 6
            for position in range(first_kept, 10):
                expected[(7, 2, 5, 0)[position // 3], position % 3] = number(layer, 0, position, is_value)
            for position in (3, 4):
                expected[6, position - 3] = number(layer, 1, position, is_value)
            np.testing.assert_array_equal(lanes(rows.data_BSX), expected)  # pyright: ignore


def test_restored_cache_is_the_one_that_was_kept():
    device, cache = make_device(), held_cache([10, 5])
    pages = [(7, 2, 5, 0), (1, 6)]
    for start, end in ((0, 4), (4, 8), (8, 10)):  # as chunks no longer than the ring bring them
        short = held_cache([end, min(end, 5)])
        spans = [
            device_pages.Span(start=start, num_tokens=end - start, pages=pages[0]),
            device_pages.Span(start=min(start, 5), num_tokens=min(end, 5) - min(start, 5), pages=pages[1]),
        ]
        device.keep(short, spans, 4)
    empty = tiny_models.empty_cache(CONFIG, 2, capacity=CAPACITY)
    restored = device.restore(empty, pages, [10, 5])
    jax.tree.map(np.testing.assert_array_equal, restored, dataclasses.replace(cache))
    device.copy([(0, 4), (7, 3)], 3)
    again = device.restore(tiny_models.empty_cache(CONFIG, 2, capacity=CAPACITY), [(3, 2, 5, 4), ()], [8, 0])
    assert again.length_B.tolist() == [8, 0]
    for old, new, layout_idx in zip(held_cache([8, 0]).stores, again.stores, again.layout_idx, strict=True):
        is_held_BS = np.asarray(again.positions[layout_idx]) < 8
        assert is_held_BS[0].any() and not is_held_BS[1].any()
        for old_leaf, new_leaf in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            np.testing.assert_array_equal(lanes(old_leaf)[is_held_BS], lanes(new_leaf)[is_held_BS])


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_pages_are_written_in_place(dtype):
    codec = allocate.make_codec(CacheConfig(dtype=dtype), "float32")
    pages = jax.eval_shape(lambda: page_copies.init(CONFIG, codec, num_pages=4096, page_len=PAGE_LEN))
    pool_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pages))
    cache = jax.eval_shape(lambda: tiny_models.empty_cache(CONFIG, 1, capacity=CAPACITY, dtype=dtype))
    ids_BT = jax.ShapeDtypeStruct((1, 4), jnp.int32)
    pairs_N = jax.ShapeDtypeStruct((2,), jnp.int32)
    for lowered in (
        page_copies.keep.lower(pages, cache, ids_BT, ids_BT, ids_BT),
        page_copies.copy_pages.lower(pages, pairs_N, pairs_N),
    ):
        memory = lowered.compile().memory_analysis()
        assert memory is not None and memory.temp_size_in_bytes < pool_bytes / 100
