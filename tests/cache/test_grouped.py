"""Caches by groups of tokens, beside a plain list of the tokens and the codecs' formulas in numpy."""

import dataclasses

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import allocate, kv_cache, layer_view
from jdecode.cache import block as block_lib
from tests import plain_codecs

EMPTY = int(visibility.EMPTY)
B, K, H, Z = 2, 3, 4, 4
SIDES = ("keys", "values")


def _model(window: int | None, num_sinks: int) -> config_lib.ModelConfig:
    return config_lib.ModelConfig(
        vocab_size=11,
        hidden_size=12,
        intermediate_size=20,
        num_heads=K,
        num_kv_heads=K,
        head_dim=H,
        layers=(config_lib.LayerConfig(window=window, num_sinks=num_sinks),),
    )


def _append(cache, k_BTKH, v_BTKH, num_tokens_B, window, num_sinks):
    """Passes one block through a cache of one layer; returns the cache after it, and all that could be read."""
    block = block_lib.open_block(cache, k_BTKH.shape[1], num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=window, num_sinks=num_sinks)
    store, segments = view.append(k_BTKH, v_BTKH)
    seen = []
    for part in segments:
        k_BSKH, v_BSKH = part.keys.block(0, part.keys.num_slots), part.values.block(0, part.values.num_slots)
        mask_BTS = part.mask(block.position_BT, part.position_BS, window=window, num_sinks=num_sinks)
        seen.append((part.position_BS, mask_BTS, k_BSKH, v_BSKH, part.first_slot, part.end_slot))
    return block_lib.close_block(cache, block, [store]), seen


append = jax.jit(_append, static_argnums=(4, 5))


@dataclasses.dataclass
class Session:
    """A cache, and beside it each row as a list of the tokens that were appended and not taken back."""

    cache: kv_cache.KVCache
    window: int | None
    num_sinks: int
    slack: int
    dtype: str
    rng: np.random.Generator = dataclasses.field(default_factory=lambda: np.random.default_rng(8))
    rows: list[list] = dataclasses.field(default_factory=lambda: [[] for _ in range(B)])
    longest: list[int] = dataclasses.field(default_factory=lambda: [0] * B)

    def expected(self, row: int, query: int) -> dict[int, tuple[np.ndarray, ...]]:
        """What a query sees: for each position what is held of its keys and values (``plain_codecs.held``)."""
        found = {}
        for position in range(query + 1):
            if not (self.window is None or query - position < self.window or position < self.num_sinks):
                continue
            first, num, dtype = position // Z * Z, Z, self.dtype
            # Settled: the group is there, and more tokens after it than can be taken back (a quarter of it is one).
            if first + Z + self.slack + 1 > query + 1:
                first, num, dtype = position, 1, "float32"
            sides = zip(*self.rows[row][first : first + num], strict=True)
            found[position] = tuple(
                plain_codecs.held(np.stack(own), dtype, side)[:, position - first]
                for own, side in zip(sides, SIDES, strict=True)
            )
        return found

    def append(self, counts: list[int], block_len: int) -> None:
        # A channel of the keys is far larger than the others. Padding holds numbers too.
        k, v = (self.rng.uniform(1, 256, size=(B, block_len, K, H)).astype(np.float32) for _ in range(2))
        k[..., 1] *= 50
        num_tokens_B = jnp.asarray(counts, jnp.int32)
        self.cache, seen = append(self.cache, jnp.asarray(k), jnp.asarray(v), num_tokens_B, self.window, self.num_sinks)
        seen = jax.tree.map(np.asarray, seen)
        for row, count in enumerate(counts):
            start = len(self.rows[row])
            self.rows[row] += [(k[row, t], v[row, t]) for t in range(count)]
            self.longest[row] = max(self.longest[row], start + count)
            for t in range(count):
                self.check(seen, row, t, self.expected(row, start + t))
        np.testing.assert_array_equal(self.cache.length_B, [len(own) for own in self.rows])

    def check(self, seen, row: int, t: int, expected: dict[int, tuple[np.ndarray, ...]]) -> None:
        found = {}
        for position_BS, mask_BTS, k_BSKH, v_BSKH, first, end in seen:
            for slot in np.flatnonzero(mask_BTS[row, t]):
                position = int(position_BS[row, slot])
                assert first <= slot < end and position not in found
                found[position] = (k_BSKH[row, slot], v_BSKH[row, slot])
        assert sorted(found) == sorted(expected)
        for idx, side in enumerate(SIDES):
            got = np.stack([found[position][idx] for position in expected])
            held = np.stack([own[idx] for own in expected.values()], axis=1)
            plain_codecs.assert_held(got, held, self.dtype, side)

    def truncate(self, back: list[int]) -> None:
        for row, count in enumerate(back):
            least = max(self.longest[row] - self.cache.max_rollback, 0)
            del self.rows[row][max(len(self.rows[row]) - count, least) :]
        self.cache = kv_cache.truncate(self.cache, jnp.asarray([len(own) for own in self.rows], jnp.int32))


def _session(window, num_sinks, slack, layout, dtype, capacity=256) -> Session:
    cache_config = config_lib.CacheConfig(layout=layout, slack=slack, dtype=dtype, group_len=Z)
    cache = allocate.init_cache(
        _model(window, num_sinks), cache_config, batch_size=B, capacity=capacity, compute_dtype="float32"
    )
    return Session(cache=cache, window=window, num_sinks=num_sinks, slack=slack, dtype=dtype)


CASES = [
    (None, 0, 2, "full", "int4"),
    (5, 1, 0, "full", "int8_channel"),
    (4, 0, 0, "auto", "int4"),  # a ring of one group
    (7, 2, 3, "auto", "int4"),  # sinks, of which the first group holds more than there are
    (9, 0, 1, "auto", "int8_channel"),
]


# Blocks of one token, the longest that is written before it attends, one more, and far more than a window and a group.
@pytest.mark.parametrize(("window", "num_sinks", "slack", "layout", "dtype"), CASES)
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_reads_what_a_list_holds(window, num_sinks, slack, layout, dtype, data):
    session = _session(window, num_sinks, slack, layout, dtype)
    block_lens = sorted({1, slack + 1, slack + 2, 2 * (window or 4) + 6})
    for _ in range(data.draw(st.integers(3, 9), "steps")):
        if data.draw(st.booleans(), "roll back"):
            session.truncate(data.draw(st.lists(st.integers(0, slack + 1), min_size=B, max_size=B), "back"))
        block_len = data.draw(st.sampled_from(block_lens), "block_len")
        session.append(data.draw(st.lists(st.integers(0, block_len), min_size=B, max_size=B), "counts"), block_len)


# The same without chance: as many tokens as can be, taken back at every place of a group, and then every block.
@pytest.mark.parametrize(
    ("window", "num_sinks", "slack", "layout", "dtype"), [(None, 0, 2, "full", "int4"), (4, 0, 1, "auto", "int4")]
)
def test_every_rollback(window, num_sinks, slack, layout, dtype):
    longest = 2 * (window or 4) + 6
    for held in range(9, 18):
        session = _session(window, num_sinks, slack, layout, dtype)
        assert session.cache.max_rollback == slack + 1
        session.append([held, held - 1], longest + 4)
        session.truncate([slack + 1, slack])
        session.append([slack + 1, 1], slack + 1)  # written first, where the ring is fullest
        session.truncate([slack + 1, 1])
        session.append([longest, longest - 1], longest)
        session.append([1, 1], 1)


def test_where_groups_lie():
    full = _session(None, 0, 2, "full", "int4", capacity=9).cache
    assert [own.capacity for own in full.layouts] == [12, 4 + (2 + 1) + 2]  # whole groups; a group, the lag, the slack
    ring = _session(5, 1, 2, "auto", "int4", capacity=99).cache
    assert [own.capacity for own in ring.layouts] == [4 + 8, 9]  # a sink takes a group, 5 + 2 tokens take two
    assert ring.max_len is None and full.max_len == 12
    assert all(leaf.shape[1] == 9 for leaf in jax.tree.leaves(full.stores[0].recent))


# Past the end nothing is overwritten, neither groups nor the latest tokens (jax-ml/jax#9083, #34257). The last group
# settles there: it has all of its tokens, and slots of its own. The one after it has no slots.
@pytest.mark.parametrize("block_len", [1, 6])  # written before it attends, and after
@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
def test_past_capacity_nothing_is_overwritten(dtype, block_len):
    session = _session(None, 0, 0, "full", dtype, capacity=9)
    session.append([12, 11], 12)
    before = after = session.cache
    for _ in range(6 // block_len):
        block = jnp.full((B, block_len, K, H), 99.0)
        after, _ = append(after, block, block, jnp.asarray([block_len, 0]), None, 0)
    np.testing.assert_array_equal(after.length_B, [18, 11])
    for old, new in zip(before.positions, after.positions, strict=True):
        np.testing.assert_array_equal(new, old)
    for old, new in zip(jax.tree.leaves(before.stores[0].recent), jax.tree.leaves(after.stores[0].recent), strict=True):
        np.testing.assert_array_equal(new, old)
    for old, new in zip(jax.tree.leaves(before.stores), jax.tree.leaves(after.stores), strict=True):
        np.testing.assert_array_equal(new[1], old[1])
    for idx, side in enumerate(SIDES):
        old, new = (np.asarray(getattr(cache.stores[0], side).block(0, 12))[0] for cache in (before, after))
        np.testing.assert_array_equal(new[: 2 * Z], old[: 2 * Z])
        group_ZKH = np.stack([token[idx] for token in session.rows[0][2 * Z :]])
        plain_codecs.assert_held(new[2 * Z :], plain_codecs.held(group_ZKH, dtype, side), dtype, side)


def _poisoned(store: kv_cache.LayerStore, is_unused_BS: np.ndarray, value: float):
    """Fills unused slots of one store: scales of groups, scales of slots (before or after the heads), and numbers."""

    def leaf(array):
        if jnp.issubdtype(array.dtype, jnp.floating):
            filler = jnp.asarray(value, array.dtype)
        elif array.dtype == jnp.int16:
            filler = jax.lax.bitcast_convert_type(jnp.float16(value), jnp.int16)
        else:
            filler = jnp.asarray(99, array.dtype)
        S = is_unused_BS.shape[1]
        step = S // array.shape[1] if array.shape[2] != S else 1
        mask = is_unused_BS[:, None, :] if array.shape[2] == S else is_unused_BS[:, ::step, None]
        return jnp.where(mask, filler, array)

    return jax.tree.map(leaf, store)


# Memory that was never written, or whose group is not settled yet, is not read (pegainfer-project/pegainfer#291).
@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
def test_what_is_not_settled_is_not_read(dtype, poison):
    session = _session(None, 0, 1, "full", dtype, capacity=24)
    session.append([14, 6], 14)
    cache = session.cache
    store, grouping = cache.stores[0], cache.codec.grouping
    assert grouping is not None and store.recent is not None
    recent_idx = cache.layouts.index(grouping.layout)
    # 14 tokens have settled 3 groups, less the one that has fewer than 1 + 1 after it: 12 + 2 <= 14, so all three.
    settled_B1 = np.asarray([[12], [4]])
    recent = _poisoned(store.recent, np.asarray(cache.positions[recent_idx]) == EMPTY, poison)
    groups = dataclasses.replace(store, recent=None)
    groups = _poisoned(groups, np.arange(24)[None, :] >= settled_B1, poison)
    session.cache = dataclasses.replace(cache, stores=(dataclasses.replace(groups, recent=recent),))
    session.append([1, 2], 2)
    session.append([8, 12], 12)


def test_what_is_not_finite_stays_in_its_group_and_row():
    session = _session(None, 0, 0, "full", "int4", capacity=24)
    k, v = np.ones((2, B, 14, K, H), np.float32)
    v[0, 5, 1, 2] = 1e6  # no float16, as the scales are
    cache, _ = append(session.cache, jnp.asarray(k), jnp.asarray(v), jnp.full(B, 14), None, 0)
    stored_k, stored_v = (np.array(rows.block(0, 24)) for rows in (cache.stores[0].keys, cache.stores[0].values))
    assert np.isfinite(stored_v).all()
    expected = np.zeros((B, 24), bool)
    expected[0, 4:8] = True  # the group of token 5
    np.testing.assert_array_equal(np.isnan(stored_k[:, :, 1, 2]), expected)
    stored_k[:, :, 1, 2] = 1
    assert np.isfinite(stored_k).all()


# Groups of 128, as they are unless said; donated buffers that cannot be used, or are used twice, are errors here.
@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
def test_donated_step_writes_in_place_and_compiles_once(dtype):
    cache = allocate.init_cache(
        _model(None, 0), config_lib.CacheConfig(dtype=dtype), batch_size=B, capacity=256, compute_dtype="float32"
    )
    traces = []

    def run(cache, k_BTKH):
        traces.append(k_BTKH.shape)
        return _append(cache, k_BTKH, -k_BTKH, None, None, 0)[0]

    step = jax.jit(run, donate_argnums=0)
    cache, _ = append(cache, jnp.ones((B, 159, K, H)), jnp.ones((B, 159, K, H)), None, None, 0)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)}
    assert len(pointers) == len(jax.tree.leaves(cache.stores))
    assert not np.asarray(cache.stores[0].keys.block(0, 128)).any()  # the latest 32 tokens are exact
    for count in range(3):
        given = cache
        cache = step(cache, jnp.ones((B, 1, K, H)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), count
    assert len(traces) == 1
    np.testing.assert_array_equal(cache.length_B, [162, 162])
    np.testing.assert_allclose(cache.stores[0].keys.block(0, 128), 1, rtol=1e-6)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)} == pointers
