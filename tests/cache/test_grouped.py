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
from jdecode.cache import allocate, cache_rows, kv_cache, layer_view
from jdecode.cache import block as block_lib
from tests import plain_codecs, tiny_models

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
take_rows = jax.jit(cache_rows.take_rows)


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

    def fork(self, row_idx: list[int]) -> None:
        self.cache = take_rows(self.cache, jnp.asarray(row_idx, jnp.int32))
        self.rows = [list(self.rows[row]) for row in row_idx]
        self.longest = [self.longest[row] for row in row_idx]


def _session(window, num_sinks, slack, layout, dtype, capacity=256, page_len=2 * Z) -> Session:
    pages = page_len if layout == "paged" else None
    cache_config = config_lib.CacheConfig(layout=layout, slack=slack, dtype=dtype, group_len=Z, page_len=pages)
    cache = allocate.init_cache(
        _model(window, num_sinks), cache_config, batch_size=B, capacity=capacity, compute_dtype="float32"
    )
    return Session(cache=cache, window=window, num_sinks=num_sinks, slack=slack, dtype=dtype)


CASES = [
    (None, 0, 2, "full", "int4"),
    (5, 1, 0, "full", "int8_channel"),
    (None, 0, 2, "paged", "int4"),
    (None, 0, 0, "paged", "int8_channel"),
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
        if data.draw(st.booleans(), "fork"):
            session.fork(data.draw(st.lists(st.integers(0, B - 1), min_size=B, max_size=B), "rows"))
        if data.draw(st.booleans(), "roll back"):
            session.truncate(data.draw(st.lists(st.integers(0, slack + 1), min_size=B, max_size=B), "back"))
        block_len = data.draw(st.sampled_from(block_lens), "block_len")
        session.append(data.draw(st.lists(st.integers(0, block_len), min_size=B, max_size=B), "counts"), block_len)


# The same without chance: as many tokens as can be, taken back at every place of a group, and then every block.
@pytest.mark.parametrize(
    ("window", "num_sinks", "slack", "layout", "dtype"),
    [(None, 0, 2, "full", "int4"), (None, 0, 2, "paged", "int4"), (4, 0, 1, "auto", "int4")],
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
    paged = _session(None, 0, 2, "paged", "int4", capacity=9).cache
    assert [own.capacity for own in paged.layouts] == [16, 9]  # whole pages of two groups
    assert paged.stores[0].keys.data_BSX.shape[:2] == (2 * B, 8) and paged.stores[0].keys.scale_BUX.shape[:2] == (4, 2)
    for cache in (full, paged):
        assert all(leaf.shape[:2] == (B, 9) for leaf in jax.tree.leaves(cache.stores[0].recent))


# Past the end nothing is overwritten, neither groups nor the latest tokens (jax-ml/jax#9083, #34257). The last group
# settles there: it has all of its tokens, and slots of its own. The one after it has no slots.
@pytest.mark.parametrize("block_len", [1, 6])  # written before it attends, and after
@pytest.mark.parametrize(
    ("layout", "dtype"), [("full", "int8_channel"), ("full", "int4"), ("paged", "int8_channel"), ("paged", "int4")]
)
def test_past_capacity_nothing_is_overwritten(layout, dtype, block_len):
    session = _session(None, 0, 0, layout, dtype, capacity=9, page_len=Z)
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
    for idx, side in enumerate(SIDES):
        old, new = (np.asarray(cache.rows(0, getattr(cache.stores[0], side)).block(0, 12)) for cache in (before, after))
        np.testing.assert_array_equal(new[1], old[1])
        np.testing.assert_array_equal(new[0, : 2 * Z], old[0, : 2 * Z])
        group_ZKH = np.stack([token[idx] for token in session.rows[0][2 * Z :]])
        plain_codecs.assert_held(new[0, 2 * Z :], plain_codecs.held(group_ZKH, dtype, side), dtype, side)


def _poisoned(store: kv_cache.LayerStore, is_unused_BS: np.ndarray, value: float):
    """Fills unused slots of one store: scales of groups, scales of slots (before or after the heads), and numbers."""

    def leaf(array):
        S = is_unused_BS.shape[1]
        step = S // array.shape[1] if array.shape[2] != S else 1
        mask = is_unused_BS[:, None, :] if array.shape[2] == S else is_unused_BS[:, ::step, None]
        return jnp.where(mask, tiny_models.poison(array, value), array)

    return jax.tree.map(leaf, store)


# Memory that was never written, or whose group is not settled yet, is not read (pegainfer-project/pegainfer#291).
@pytest.mark.parametrize("poison", [np.nan, 1e4])
@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
@pytest.mark.parametrize("layout", ["full", "paged"])
def test_what_is_not_settled_is_not_read(layout, dtype, poison):
    session = _session(None, 0, 1, layout, dtype, capacity=24)
    session.append([14, 6], 14)
    cache = session.cache
    store, grouping = cache.stores[0], cache.codec.grouping
    assert grouping is not None and store.recent is not None
    recent_idx = cache.layouts.index(grouping.layout)
    # 14 tokens have settled 3 groups, less the one that has fewer than 1 + 1 after it: 12 + 2 <= 14, so all three.
    settled_B1 = np.asarray([[12], [4]])
    recent = _poisoned(store.recent, np.asarray(cache.positions[recent_idx]) == EMPTY, poison)
    groups = dataclasses.replace(store, recent=None)
    is_open = np.arange(24)[None, :] >= settled_B1
    groups = _poisoned(groups, is_open if layout == "full" else is_open.reshape(-1, 2 * Z), poison)
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


# Two tokens after a group settle it, and pages hold two groups. A group that settles after the fork is each row's own.
def test_forks_share_pages_of_settled_groups():
    session = _session(None, 0, 1, "paged", "int4", capacity=32)
    session.append([22, 13], 22)
    np.testing.assert_array_equal(session.cache.pages_BC, [[0, 1, 2, 3], [4, 5, 6, 7]])
    session.fork([0, 0])
    # 20 of 22 tokens are settled: two pages, and one that begins as a copy of half a page.
    np.testing.assert_array_equal(session.cache.pages_BC, [[0, 1, 2, 3], [0, 1, 4, 5]])
    np.testing.assert_array_equal(session.cache.shared_B, [16, 16])
    session.append([1, 2], 2)
    session.fork([1, 0])
    session.truncate([1, 2])
    session.append([7, 4], 9)
    # 28 and 20 tokens are settled: two pages of both rows and one of the first, and of each fork one column and two.
    repeated = cache_rows.repeat_rows(session.cache, 2)
    np.testing.assert_array_equal(repeated.shared_B, [24, 24, 16, 16])
    assert repeated.stores[0].keys.data_BSX.shape[0] == 3 + 2 * (1 + 2)


# A row that is taken back after a fork settles a group again that others read, where others read it.
def test_shared_pages_are_never_written():
    session = _session(None, 0, 1, "paged", "int4", capacity=32)
    session.append([18, 1], 22)
    session.fork([0, 0])
    session.truncate([2, 1])
    np.testing.assert_array_equal(session.cache.shared_B, [16, 16])  # but of 16 and 17 tokens 12 are settled
    (store,) = session.cache.stores
    is_shared_PZ = np.broadcast_to(np.isin(np.arange(8), [0, 1])[:, None], (8, 2 * Z))
    marked = _poisoned(dataclasses.replace(store, recent=None), is_shared_PZ, 7.0)
    cache = dataclasses.replace(session.cache, stores=(dataclasses.replace(marked, recent=store.recent),))
    k_BTKH = jnp.asarray(session.rng.normal(size=(B, 9, K, H)), jnp.float32)
    after, _ = append(cache, k_BTKH, k_BTKH, jnp.full(B, 9), None, 0)
    after = dataclasses.replace(after.stores[0], recent=None)
    for old, new in zip(jax.tree.leaves(marked), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(new[:2], old[:2])
        assert not np.array_equal(new[2:], old[2:])
    session.append([9, 3], 9)
    session.truncate([1, 2])
    with pytest.raises(ValueError, match="row 1: expected a length of at least the 16 tokens whose pages other rows"):
        kv_cache.truncate(session.cache, jnp.asarray([16, 15]))


# Groups of 128, as they are unless said; donated buffers that cannot be used, or are used twice, are errors here.
@pytest.mark.parametrize("dtype", ["int8_channel", "int4"])
@pytest.mark.parametrize("layout", ["auto", "paged"])
def test_donated_step_writes_in_place_and_compiles_once(layout, dtype):
    own = config_lib.CacheConfig(layout=layout, dtype=dtype)
    cache = allocate.init_cache(_model(None, 0), own, batch_size=B, capacity=256, compute_dtype="float32")
    traces = []

    def first_group(cache) -> np.ndarray:
        return cache.rows(cache.layout_idx[0], cache.stores[0].keys).block(0, 128)

    def run(cache, k_BTKH):
        traces.append(k_BTKH.shape)
        return _append(cache, k_BTKH, -k_BTKH, None, None, 0)[0]

    step = jax.jit(run, donate_argnums=0)
    cache, _ = append(cache, jnp.ones((B, 159, K, H)), jnp.ones((B, 159, K, H)), None, None, 0)
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)}
    assert len(pointers) == len(jax.tree.leaves(cache.stores))
    assert not np.asarray(first_group(cache)).any()  # the latest 32 tokens are exact
    for count in range(3):
        given = cache
        cache = step(cache, jnp.ones((B, 1, K, H)))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given)), count
    assert len(traces) == 1
    np.testing.assert_array_equal(cache.length_B, [162, 162])
    np.testing.assert_allclose(first_group(cache), 1, rtol=1e-6)
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)} == pointers
