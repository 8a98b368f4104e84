"""Which layout a layer gets, and how many bytes a cache takes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import allocate, cache_rows, kv_cache, layout_full, layout_ring
from tests import tiny_models

MIXED = tiny_models.MIXED


def _layouts(cache: kv_cache.KVCache) -> list[object]:
    return [cache.layouts[idx] for idx in cache.layout_idx]


# Per-layer windows were lost, and "no window" fell back to the model's (vllm-project/vllm#21863, #14896).
def test_each_layer_has_its_own_layout():
    cache = tiny_models.empty_cache(MIXED, 3, slack=1)
    assert _layouts(cache) == [
        layout_ring.RingLayout(window=4, slack=1),
        layout_ring.RingLayout(window=4, slack=1, num_sinks=2),
        layout_full.FullLayout(capacity=32),
    ]
    assert (cache.max_len, cache.max_rollback, cache.batch_size) == (32, 2, 3)


def test_like_layers_share_a_table():
    local, _, full = MIXED.layers
    model = dataclasses.replace(MIXED, layers=(local, local, full, local, full))
    cache = tiny_models.empty_cache(model, 2)
    assert cache.layout_idx == (0, 0, 1, 0, 1)
    assert len(cache.positions) == len(cache.layouts) == 2
    assert len(cache.stores) == 5


def test_full_where_asked_and_where_a_ring_saves_nothing():
    full = layout_full.FullLayout
    assert _layouts(tiny_models.empty_cache(MIXED, 1, layout="full")) == [full(capacity=32)] * 3
    # A window of 4 with slack 2 and two sinks needs 6 and 8 slots.
    at_most = tiny_models.empty_cache(MIXED, 1, slack=2, capacity=6)
    assert _layouts(at_most) == [full(capacity=6)] * 3
    one_more = tiny_models.empty_cache(MIXED, 1, slack=2, capacity=7)
    assert _layouts(one_more)[0] == layout_ring.RingLayout(window=4, slack=2)
    assert _layouts(one_more)[1] == full(capacity=7)


def test_rings_alone_have_no_longest_text():
    model = dataclasses.replace(MIXED, layers=MIXED.layers[:2])
    assert tiny_models.empty_cache(model, 1).max_len is None


def test_starts_empty():
    cache = tiny_models.empty_cache(MIXED, 3)
    np.testing.assert_array_equal(cache.length_B, [0, 0, 0])
    for position_BS in cache.positions:
        assert (np.asarray(position_BS) == int(visibility.EMPTY)).all()


@pytest.mark.parametrize(("dtype", "width"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
@pytest.mark.parametrize("layout", ["auto", "full"])
def test_bytes_by_formula(dtype, width, layout):
    batch, slack, capacity = 5, 1, 19
    cache = tiny_models.empty_cache(MIXED, batch, slack=slack, capacity=capacity, layout=layout, dtype=dtype)
    slots = [5, 7, 19] if layout == "auto" else [19, 19, 19]
    tables = [5, 7, 19] if layout == "auto" else [19]
    # Keys and values, two heads of width 6; an int32 position a slot of each layout; an int32 length a row.
    expected = sum(2 * batch * S * 2 * 6 * width for S in slots) + sum(4 * batch * S for S in tables) + 4 * batch
    assert cache.num_bytes == expected
    assert sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache)) == expected
    assert {rows.block(0, 1).dtype for store in cache.stores for rows in (store.keys, store.values)} == {
        jnp.dtype(dtype)
    }


def test_auto_dtype_is_the_compute_dtype():
    cache = allocate.init_cache(MIXED, config_lib.CacheConfig(), batch_size=1, capacity=9, compute_dtype="bfloat16")
    assert cache.stores[0].keys.block(0, 1).dtype == jnp.bfloat16


# K and V, or two layers, that are one buffer cannot both be donated (liesel-devs/liesel#272, jax-ml/jax#9675).
def test_no_two_leaves_alias():
    leaves = jax.tree.leaves(tiny_models.empty_cache(MIXED, 3))
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves) == 2 * 3 + 3 + 1


@pytest.mark.parametrize("name", ["batch_size", "capacity"])
def test_counts_under_one_are_refused(name):
    sizes: dict[str, Any] = {"batch_size": 2, "capacity": 9} | {name: 0}
    with pytest.raises(ValueError, match=f"{name}: expected a count of at least 1, got 0"):
        allocate.init_cache(MIXED, config_lib.CacheConfig(), compute_dtype="float32", **sizes)


def test_pages_by_hand():
    paged = config_lib.CacheConfig(layout="paged", page_len=4)
    sizes: dict[str, Any] = {"batch_size": 2, "compute_dtype": "float32"}
    cache = allocate.init_cache(tiny_models.MIXED, paged, capacity=9, **sizes)
    # Rings of 4 and of 2 + 4 slots, and three pages a row, each column with its own.
    assert [store.keys.num_slots for store in cache.stores] == [4, 6, 4]
    np.testing.assert_array_equal(cache.pages_BC, [[0, 1, 2], [3, 4, 5]])
    assert (cache.max_len, cache.max_rollback) == (12, 1)
    host = allocate.init_cache(tiny_models.MIXED, paged, capacity=9, num_pages=5, **sizes)
    np.testing.assert_array_equal(host.pages_BC, np.full((2, 3), 5))  # the first id that is no page
    assert host.stores[2].keys.block(0, 4).shape == (5, 4, 2, 6)


@pytest.mark.parametrize(
    ("layout", "num_pages", "message"),
    [
        ("paged", 0, "num_pages: expected a count of at least 1, got 0"),
        ("auto", 3, r"num_pages: expected none \(no layer has pages\), got 3; use the layout paged"),
    ],
)
def test_pages_that_are_refused(layout, num_pages, message):
    sizes: dict[str, Any] = {"batch_size": 2, "capacity": 9, "compute_dtype": "float32", "num_pages": num_pages}
    with pytest.raises(ValueError, match=message):
        allocate.init_cache(tiny_models.MIXED, config_lib.CacheConfig(layout=layout), **sizes)
    plain = tiny_models.empty_cache(tiny_models.MIXED, 1)
    with pytest.raises(ValueError, match="with_pages: expected a cache with pages, got none"):
        cache_rows.with_pages(plain, jnp.zeros((1, 1), jnp.int32), jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32))
