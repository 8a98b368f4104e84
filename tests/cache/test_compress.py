"""What is kept of a prompt, and where: beside plain Python lists, bit for bit, with poison in what nobody may read."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.attention import reference, segment, visibility
from jdecode.cache import allocate, compress, kv_cache, layer_view
from jdecode.cache import block as block_lib
from tests import tiny_models

EMPTY = int(visibility.EMPTY)
K, H = 2, 8
MODEL = config_lib.ModelConfig(
    vocab_size=11,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=K,
    head_dim=H,
    layers=(config_lib.LayerConfig(),),
)


def how_of(budget: int, *, num_recent: int = 1, smoothing: int = 1, num_new: int | None = 5) -> compress.Compression:
    return compress.Compression(budget=budget, num_recent=num_recent, smoothing=smoothing, num_new=num_new)


def chosen(received: list[float], how: compress.Compression) -> list[int]:
    """The positions that a prompt's row should keep, by sorting."""
    n = len(received)
    recent = list(range(max(n - how.num_recent, 0), n))
    others = range(len(recent) and recent[0])
    reach = how.smoothing // 2
    worth = {p: max(received[o] for o in others if abs(o - p) <= reach) for p in others}
    best = sorted(others, key=lambda p: (-worth[p], p))[: how.budget - len(recent)]
    return sorted([*best, *recent])


@pytest.mark.parametrize(
    "how",
    [
        how_of(6, num_recent=3, smoothing=3),
        how_of(4, num_recent=1),
        how_of(15, num_recent=2, smoothing=5, num_new=None),
        how_of(2, num_recent=1, smoothing=7),
    ],
    ids=str,
)
def test_choice_beside_lists(how):
    rng, S, lengths = np.random.default_rng(8), 12, [12, 9, 5, 1]
    received = rng.integers(0, 6, size=(4, S)).astype(np.float32)  # with ties: the first of them stays
    position = np.where(np.arange(S) < np.asarray(lengths)[:, None], np.arange(S), EMPTY).astype(np.int32)
    # A token that was taken back stands in its slot still.
    position[1, 9] = 9
    slots = compress.kept_slots(jnp.asarray(received), jnp.asarray(position), jnp.asarray(lengths), how)
    assert slots.shape == (4, how.budget + (how.num_new or 0))
    for row, n in enumerate(lengths):
        want = chosen(received[row, :n].tolist(), how)
        holes = how.budget - len(want)
        assert slots[row].tolist() == [S] * holes + want + [S] * (how.num_new or 0)


def filled(dtype: str, lengths: list[int], *, layers: int = 1, capacity: int = 14) -> kv_cache.KVCache:
    """A cache of random rows, whose slots past the lengths hold what is no number."""
    model = dataclasses.replace(MODEL, layers=MODEL.layers * layers)
    cache = tiny_models.empty_cache(model, len(lengths), capacity=capacity, dtype=dtype)
    T = max(lengths)
    block = block_lib.open_block(cache, T, jnp.asarray(lengths, jnp.int32))
    stores = []
    for idx in range(layers):
        k, v = jax.random.normal(jax.random.key(idx), (2, len(lengths), T, K, H))
        view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=idx, window=None, num_sinks=0)
        stores.append(view.append(k, v)[0])
    cache = block_lib.close_block(cache, block, stores)
    return tiny_models.fill_unused(cache, np.nan, is_unused=lambda position, length: position >= length)


def scores(rows: segment.Rows, q_BTNH: jax.Array) -> np.ndarray:
    """The products of queries with every slot, as attention forms them: (B, K, G, T, S)."""
    B, T, N, _ = q_BTNH.shape
    q_BTKGH = rows.queries(q_BTNH).reshape(B, T, K, N // K, H)
    return np.asarray(rows.stored(0, rows.num_slots).scores(q_BTKGH.transpose(0, 2, 3, 1, 4)))


@pytest.mark.parametrize(
    "dtype", [name for name in config_lib.CACHE_DTYPES if name not in ("auto", *config_lib.GROUPED_DTYPES)]
)
def test_kept_slots_are_the_same_bits_at_the_same_positions(dtype):
    lengths, how = [13, 7, 3], how_of(5, num_recent=2, num_new=4)
    cache = compress.observing(filled(dtype, lengths, layers=2), [0, 1])
    rng = np.random.default_rng(3)
    received = [jnp.asarray(rng.uniform(size=(3, 14)), jnp.float32) for _ in range(2)]
    stores = [dataclasses.replace(own, received_BS=new) for own, new in zip(cache.stores, received, strict=True)]
    cache = dataclasses.replace(cache, stores=tuple(stores))
    small = compress.compress(cache, how)
    assert small.layout_idx == (0, 1) and small.length_B.tolist() == lengths
    q_BTNH = jax.random.normal(jax.random.key(9), (3, 2, 4, H))
    for idx in range(2):
        for row, n in enumerate(lengths):
            want = chosen(received[idx][row, :n].tolist(), how)
            holes = how.budget - len(want)
            position = small.positions[idx][row].tolist()
            assert position == [EMPTY] * holes + want + [EMPTY] * 4
            slots = list(range(holes, how.budget))
            for side in ("keys", "values"):
                old, new = (getattr(of.stores[idx], side) for of in (cache, small))
                for before, after in zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
                    # The slots are the axis of data but the last of scales.
                    axis = 0 if before.shape[1] == 14 else 1
                    np.testing.assert_array_equal(
                        np.take(np.asarray(after[row]), slots, axis), np.take(np.asarray(before[row]), want, axis)
                    )
                assert not np.isnan(np.asarray(new.block(0, new.num_slots), np.float32)).any()
            # q . k of a kept pair is what it was, bit for bit.
            old, new = (scores(of.stores[idx].keys, q_BTNH)[row] for of in (cache, small))
            np.testing.assert_array_equal(new[..., slots], old[..., want])


def test_the_one_token_that_is_attended_to_is_kept_and_noise_is_not():
    # Keys are noise, but the key at position 3 points where every query of the prompt's end points.
    n, how = 40, how_of(12, num_recent=4, smoothing=3, num_new=None)
    k = 0.1 * jax.random.normal(jax.random.key(1), (1, n, K, H))
    k = k.at[:, 3].set(4.0)
    cache = tiny_models.empty_cache(MODEL, 1, capacity=n)
    for first, end in ((0, n - 4), (n - 4, n)):
        if first:
            cache = compress.observing(cache, [0])
        cache, _ = step(cache, jnp.ones((1, end - first, 4, H)), k[:, first:end], k[:, first:end])
    received = counted(cache)[0]
    assert received[3] > 0.9 * received.sum()
    small = compress.compress(cache, how)
    kept = small.positions[0][0].tolist()
    assert {2, 3, 4} <= set(kept) and kept[-4:] == [36, 37, 38, 39]  # with its neighbours, and the end
    np.testing.assert_array_equal(counted(small)[0], received[kept])


def counted(cache: kv_cache.KVCache) -> np.ndarray:
    """The attention that the slots of the first layer got."""
    assert cache.stores[0].received_BS is not None
    return np.asarray(cache.stores[0].received_BS)


def step(cache, q_BTNH, k_BTKH, v_BTKH, num_tokens_B=None):
    """Passes a block through the first layer; returns the cache, and what attention gives."""
    block = block_lib.open_block(cache, k_BTKH.shape[1], num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=None, num_sinks=0)
    store, segments = view.append(k_BTKH, v_BTKH)
    out = reference.attend(q_BTNH, block.position_BT, segments, scale=0.5)
    return block_lib.close_block(cache, block, [view.observe(store, q_BTNH, segments, scale=0.5)]), out


jitted_step = jax.jit(step)


class Row:
    """A list model of one row that evicts: (position, key, value, attention received), in float64."""

    def __init__(self, budget: int, num_recent: int) -> None:
        self.budget, self.num_recent, self.length = budget, num_recent, 0
        self.held: list[list] = []

    def append(self, q, k, v) -> list[np.ndarray]:
        """Evicts for the whole block, appends it, attends: the outputs (N, H) of its tokens."""
        length = self.length + len(k)
        while len(self.held) + len(k) > self.budget:
            old = [entry for entry in self.held if entry[0] < length - self.num_recent]
            self.held.remove(min(old, key=lambda entry: entry[3]))
        self.held += [[self.length + t, k[t], v[t], 0.0] for t in range(len(k))]
        out = []
        for t, heads in enumerate(q):
            seen = [entry for entry in self.held if entry[0] <= self.length + t]
            outputs = []
            for n, query in enumerate(heads):
                weights = [np.exp(0.5 * query @ entry[1][n // 2]) for entry in seen]
                for entry, weight in zip(seen, weights, strict=True):
                    entry[3] += weight / sum(weights)
                outputs.append(sum(w * e[2][n // 2] for w, e in zip(weights, seen, strict=True)) / sum(weights))
            out.append(np.stack(outputs))
        self.length = length
        return out


@pytest.mark.parametrize("block_len", [1, 3])
def test_budget_beside_lists(block_len):
    budget, num_recent, B = 7, 3, 3
    config = config_lib.CacheConfig(budget=budget, eviction="h2o", num_recent=num_recent)
    cache = allocate.init_compressed(MODEL, config, batch_size=B, capacity=1, num_new=0, compute_dtype="float32")
    cache = tiny_models.fill_unused(cache, np.nan, is_unused=lambda position, length: position == EMPTY)
    rows, rng = [Row(budget, num_recent) for _ in range(B)], np.random.default_rng(6)
    for _ in range(3 * budget):
        q, k, v = (rng.normal(size=(B, block_len, heads, H)).astype(np.float32) for heads in (4, K, K))
        counts = rng.integers(0, block_len + 1, size=B)  # rows that rest, and padding
        cache, out = jitted_step(cache, *map(jnp.asarray, (q, k, v, counts.astype(np.int32))))
        for row, count in enumerate(counts.tolist()):
            want = rows[row].append(*(side[row, :count].astype(np.float64) for side in (q, k, v)))
            held = sorted((position, slot) for slot, position in enumerate(cache.positions[0][row].tolist()))
            held = [(position, slot) for position, slot in held if position != EMPTY]
            assert [position for position, _ in held] == [entry[0] for entry in rows[row].held]
            got = counted(cache)[row, [slot for _, slot in held]]
            np.testing.assert_allclose(got, [entry[3] for entry in rows[row].held], rtol=1e-4, atol=1e-5)
            if want:  # as the mask by stored positions says, for every query of the block
                np.testing.assert_allclose(np.asarray(out)[row, :count], np.stack(want), rtol=1e-4, atol=1e-5)
    assert min(row.length for row in rows) > budget
    assert kv_cache.num_evicted(cache).tolist() == [row.length - budget for row in rows]
    assert cache.max_rollback == 0 and kv_cache.longest(cache) is None


def test_a_block_longer_than_the_budget_is_refused():
    config = config_lib.CacheConfig(budget=4, eviction="h2o")
    cache = allocate.init_compressed(MODEL, config, batch_size=1, capacity=9, num_new=0, compute_dtype="float32")
    with pytest.raises(ValueError, match="block: expected at most the 4 tokens of the budget, got 5"):
        block_lib.open_block(cache, 5, None)


def test_new_tokens_follow_the_kept_ones_and_end_at_the_last_slot():
    how = how_of(5, num_recent=2, num_new=4)
    cache = compress.compress(compress.observing(filled("float32", [13, 3]), [0]), how)
    longest_B = kv_cache.longest(cache)
    assert longest_B is not None and longest_B.tolist() == [17, 7]
    assert cache.max_rollback == 4 and cache.max_len is None
    q, k = jnp.ones((2, 3, 4, H)), jnp.ones((2, 3, K, H))
    cache, _ = jitted_step(cache, q, k, k, jnp.asarray([3, 3]))
    # Taken back and written again: nobody else's slot.
    cache = kv_cache.truncate(cache, cache.length_B - jnp.asarray([2, 3]))
    cache, _ = jitted_step(cache, q, k, k, jnp.asarray([3, 2]))
    kept = cache.positions[0][:, :5].tolist()
    assert cache.positions[0][:, 5:].tolist() == [[13, 14, 15, 16], [3, 4, 5, EMPTY]]  # 5 is past the row's length
    assert kept[0][-2:] == [11, 12] and kept[1] == [EMPTY, EMPTY, 0, 1, 2]
    assert kv_cache.num_evicted(cache).tolist() == [8, 0]
    cache, _ = jitted_step(cache, q, k, k, jnp.asarray([1, 0]))  # the row is full: the write is dropped
    assert cache.positions[0][0].tolist() == [*kept[0], 13, 14, 15, 16]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 4}, "budget: acts on eviction, and there is none"),
        ({"num_recent": 4}, "num_recent: acts on eviction"),
        ({"eviction": "snapkv"}, "cache budget: expected a count of at least 2, got None"),
        ({"eviction": "h2o", "budget": 1}, "at least 2, got 1"),
        ({"eviction": "lru", "budget": 9}, "expected one of snapkv, h2o, got 'lru'"),
        ({"eviction": "h2o", "budget": 9, "num_recent": 9}, "num_recent: expected a count from 1 to 8"),
        ({"eviction": "h2o", "budget": 9, "smoothing": 4}, "smoothing: expected an odd count, got 4"),
        ({"eviction": "h2o", "budget": 9, "layout": "full"}, "expected the layout auto beside h2o, got 'full'"),
    ],
)
def test_refused_configs(options, words):
    with pytest.raises(ValueError, match=words):
        config_lib.CacheConfig(**options)
