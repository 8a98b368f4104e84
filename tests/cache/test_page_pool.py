"""Pages of stored rows beside numpy arrays of what was encoded, for every codec."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.cache import allocate, page_pool

P, Z, K, H = 5, 2, 3, 4
DTYPES = [name for name in config_lib.CACHE_DTYPES if name not in ("auto", *config_lib.GROUPED_DTYPES)]


@pytest.fixture(params=DTYPES)
def codec(request):
    return allocate.make_codec(config_lib.CacheConfig(dtype=request.param), "float32").keys


def numbers(rows) -> np.ndarray:
    return np.asarray(rows.block(0, rows.num_slots), np.float64)


def filled(codec, batch: int, slots: int, seed: int):
    """Rows of known numbers (whatever they are rounded to), and those numbers."""
    x = np.random.default_rng(seed).integers(1, 99, size=(batch, slots, K, H)).astype(np.float32)
    rows = codec.encode(jnp.asarray(x))
    assert np.abs(numbers(rows) - x).max() < 6
    return rows, numbers(rows)


def test_gather(codec):
    pool, known = filled(codec, P, Z, seed=1)
    pages = np.asarray([[4, 0, P], [P + 7, 2, -1]], np.int32)  # two rows of three pages; -1 is no page either
    got = jax.jit(page_pool.gather)(pool, jnp.asarray(pages))
    nothing = np.zeros((Z, K, H))
    expected = [[known[4], known[0], nothing], [nothing, known[2], nothing]]
    assert got.num_slots == 3 * Z
    np.testing.assert_allclose(numbers(got), np.reshape(expected, (2, 3 * Z, K, H)), rtol=1e-6)
    assert page_pool.num_pages(pool) == P


# A write through an unmapped entry must leave the whole pool as it is (NVIDIA/TensorRT-LLM#16714).
def test_write(codec):
    pool, known = filled(codec, P, Z, seed=1)
    new, fresh = filled(codec, 2, 3, seed=2)
    pages = np.asarray([[4, 4, P], [-1, 0, P]], np.int32)
    offsets = np.asarray([[1, 0, 1], [1, 1, 1]], np.int32)
    got = jax.jit(page_pool.write)(pool, jnp.asarray(pages), jnp.asarray(offsets), new)
    known[4, 1], known[4, 0], known[0, 1] = fresh[0, 0], fresh[0, 1], fresh[1, 1]
    np.testing.assert_allclose(numbers(got), known, rtol=1e-6)


def test_copies_are_made_in_order(codec):
    pool, known = filled(codec, P, Z, seed=1)
    pairs = [(0, 1), (1, 2), (3, 0), (P, 4), (4, P), (-1, 4), (4, -1)]  # 2 gets what 1 got; 0 is overwritten after that
    sources, targets = np.asarray(pairs, np.int32).T
    got = jax.jit(page_pool.copy_pages)(pool, jnp.asarray(sources), jnp.asarray(targets))
    np.testing.assert_allclose(numbers(got), known[[3, 0, 0, 3, 4]], rtol=1e-6)


def test_from_rows_to_pages_and_back_bit_for_bit(codec):
    rows, _ = filled(codec, 2, 5, seed=3)
    empty = codec.init(P, Z, K, H, None)
    slots = jnp.asarray([[0, 1, 2, 3], [1, 2, 3, 4]], jnp.int32)
    place = jnp.asarray([[6, 7, 0, 1], [9, 8, 5, 4]], jnp.int32)
    pool = page_pool.write(empty, place // Z, place % Z, page_pool.take_slots(rows, slots))
    back = page_pool.take_slots(page_pool.gather(pool, jnp.asarray([[3, 0], [4, 2]])), jnp.asarray([[0, 1, 2, 3]] * 2))
    expected = page_pool.take_slots(rows, jnp.asarray([[0, 1, 2, 3], [2, 1, 4, 3]]))
    jax.tree.map(np.testing.assert_array_equal, back, expected)
    np.testing.assert_array_equal(numbers(page_pool.take_slots(rows, jnp.asarray([[5], [9]]))), 0)
