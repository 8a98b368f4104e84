"""Pages of stored rows beside numpy arrays of what was encoded, for every codec.

Slots are counted in runs here: what a codec stores together, a token or a group of four.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.cache import allocate, page_pool
from tests import tiny_models

P, Z, K, H = 5, 2, 3, 4
CODECS = [(name, "keys") for name in config_lib.CACHE_DTYPES if name != "auto"]


@pytest.fixture(params=[*CODECS, ("int4", "values")], ids="-".join)
def codec(request):
    dtype, side = request.param
    own = config_lib.CacheConfig(dtype=dtype, **tiny_models.group_options(dtype))
    return getattr(allocate.make_codec(own, "float32"), side)


def run_len(codec) -> int:
    return codec.init(1, 8, K, H, None).unit


def by_run(rows, codec) -> np.ndarray:
    """What rows stand for: their slots, run by run."""
    x_BTKH = np.asarray(rows.block(0, rows.num_slots), np.float64)
    return x_BTKH.reshape(len(x_BTKH), -1, run_len(codec), K, H)


def slots(run_BR: np.ndarray, codec) -> jax.Array:
    """The slots of runs."""
    size = run_len(codec)
    return jnp.asarray((run_BR[..., None] * size + np.arange(size)).reshape(len(run_BR), -1), jnp.int32)


def filled(codec, batch: int, runs: int, seed: int):
    """Rows of known numbers (whatever they are rounded to), and those numbers."""
    size = (batch, runs * run_len(codec), K, H)
    x = np.random.default_rng(seed).integers(1, 99, size=size).astype(np.float32)
    rows = codec.encode(jnp.asarray(x))
    known = by_run(rows, codec)
    assert np.abs(known.reshape(size) - x).max() < 6
    return rows, known


def test_gather(codec):
    pool, known = filled(codec, P, Z, seed=1)
    pages = np.asarray([[4, 0, P], [P + 7, 2, -1]], np.int32)  # two rows of three pages; -1 is no page either
    got = jax.jit(page_pool.gather)(pool, jnp.asarray(pages))
    nothing = np.zeros_like(known[0])
    expected = [[*known[4], *known[0], *nothing], [*nothing, *known[2], *nothing]]
    assert got.num_slots == 3 * Z * run_len(codec)
    np.testing.assert_allclose(by_run(got, codec), expected, rtol=1e-6)
    assert page_pool.num_pages(pool) == P


def test_gather_slots(codec):
    pool, known = filled(codec, P, Z, seed=1)
    pages, runs = np.asarray([[4, 0, P], [-1, 2, 2]]), np.asarray([[1, 0, 0], [1, 1, 0]])
    pages = np.repeat(pages, run_len(codec), axis=1)
    got = jax.jit(page_pool.gather_slots)(pool, jnp.asarray(pages, jnp.int32), slots(runs, codec))
    nothing = np.zeros_like(known[0, 0])
    expected = [[known[4, 1], known[0, 0], nothing], [nothing, known[2, 1], known[2, 0]]]
    np.testing.assert_allclose(by_run(got, codec), expected, rtol=1e-6)


# A write through an unmapped entry must leave the whole pool as it is (NVIDIA/TensorRT-LLM#16714).
def test_write(codec):
    pool, known = filled(codec, P, Z, seed=1)
    new, fresh = filled(codec, 2, 3, seed=2)
    pages, runs = np.asarray([[4, 4, P], [-1, 0, P]]), np.asarray([[1, 0, 1], [1, 1, 1]])
    pages = np.repeat(pages, run_len(codec), axis=1)
    got = jax.jit(page_pool.write)(pool, jnp.asarray(pages, jnp.int32), slots(runs, codec), new)
    known[4, 1], known[4, 0], known[0, 1] = fresh[0, 0], fresh[0, 1], fresh[1, 1]
    np.testing.assert_allclose(by_run(got, codec), known, rtol=1e-6)


def test_copies_are_made_in_order(codec):
    pool, known = filled(codec, P, Z, seed=1)
    pairs = [(0, 1), (1, 2), (3, 0), (P, 4), (4, P), (-1, 4), (4, -1)]  # 2 gets what 1 got; 0 is overwritten after that
    sources, targets = np.asarray(pairs, np.int32).T
    got = jax.jit(page_pool.copy_pages)(pool, jnp.asarray(sources), jnp.asarray(targets))
    np.testing.assert_allclose(by_run(got, codec), known[[3, 0, 0, 3, 4]], rtol=1e-6)


def test_from_rows_to_pages_and_back_bit_for_bit(codec):
    rows, _ = filled(codec, 2, 5, seed=3)
    empty = codec.init(P, Z * run_len(codec), K, H, None)
    taken = slots(np.asarray([[0, 1, 2, 3], [1, 2, 3, 4]]), codec)
    place, page_len = slots(np.asarray([[6, 7, 0, 1], [9, 8, 5, 4]]), codec), empty.num_slots
    pool = page_pool.write(empty, place // page_len, place % page_len, page_pool.take_slots(rows, taken))
    gathered, every = page_pool.gather(pool, jnp.asarray([[3, 0], [4, 2]])), np.asarray([[0, 1, 2, 3]] * 2)
    back = page_pool.take_slots(gathered, slots(every, codec))
    expected = page_pool.take_slots(rows, slots(np.asarray([[0, 1, 2, 3], [2, 1, 4, 3]]), codec))
    jax.tree.map(np.testing.assert_array_equal, back, expected)
    outside = page_pool.take_slots(rows, slots(np.asarray([[5], [9]]), codec))
    np.testing.assert_array_equal(by_run(outside, codec), 0)
