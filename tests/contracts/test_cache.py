"""The contract of caches, over layouts and codecs: what can be read is what a plain list of tokens would hold."""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jdecode import config as config_lib
from jdecode.attention import segment, visibility
from jdecode.cache import allocate, cache_rows, kv_cache, layer_view, page_pool
from jdecode.cache import block as block_lib
from tests import plain_codecs

EMPTY = int(visibility.EMPTY)
B, K, H = 2, 3, 4
DTYPES = [*plain_codecs.FLOATS, *plain_codecs.BY_TOKEN]
GROUP_LEN = 4
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


def _append(cache, k_BTKH, v_BTKH, num_tokens_B, *, window, num_sinks):
    """Passes one block through a cache of one layer; returns the cache after it, and all that its queries see."""
    block = block_lib.open_block(cache, k_BTKH.shape[1], num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=window, num_sinks=num_sinks)
    store, segments = view.append(k_BTKH, v_BTKH)
    seen = []
    for part in segments:
        mask_BTS = part.mask(block.position_BT, part.position_BS, window=window, num_sinks=num_sinks)
        bounds = (part.first_slot, part.end_slot)
        seen.append((part.position_BS, _every_row(part.keys), _every_row(part.values), mask_BTS, *bounds))
    return block_lib.close_block(cache, block, [store]), seen, block.slots[0]


def _every_row(rows: segment.Rows) -> jax.Array:
    return rows.block(0, rows.num_slots)


append = jax.jit(_append, static_argnames=("window", "num_sinks"))


@dataclasses.dataclass
class Texts:
    """The oracle: each row is a list of the tokens that were appended and not taken back, by position.

    A token is what is held of its keys and values as they were given (``plain_codecs.held``). A query at q sees the
    token at p if p <= q, and the layer has no window, or q - p is under it, or p is a sink. Where tokens are stored by
    group, it sees those of a group as the group is stored if ``lag`` tokens follow on it up to the query: a quarter of
    a group, or one more than the slack. The others it sees as they were given.
    """

    window: int | None
    num_sinks: int
    slack: int
    dtype: str
    rows: list[list[tuple[np.ndarray, ...]]] = dataclasses.field(default_factory=lambda: [[] for _ in range(B)])

    def append(self, row: int, k_TKH: np.ndarray, v_TKH: np.ndarray) -> None:
        given = "float32" if self.dtype in plain_codecs.BY_GROUP else self.dtype
        sides = [plain_codecs.held(x, given, side) for x, side in zip((k_TKH, v_TKH), SIDES, strict=True)]
        self.rows[row] += [tuple(held[:, t] for held in sides) for t in range(len(k_TKH))]

    def visible(self, query: int) -> list[int]:
        """The positions that a query sees."""
        return [
            position
            for position in range(query + 1)
            if self.window is None or query - position < self.window or position < self.num_sinks
        ]

    def held(self, row: int, query: int, position: int) -> tuple[np.ndarray, ...]:
        """What a query sees of a token: keys and values."""
        first, lag = position // GROUP_LEN * GROUP_LEN, max(GROUP_LEN // 4, self.slack + 1)
        if self.dtype not in plain_codecs.BY_GROUP or first + GROUP_LEN + lag > query + 1:
            return self.rows[row][position]
        groups = (np.stack(own)[:, 0] for own in zip(*self.rows[row][first : first + GROUP_LEN], strict=True))
        sides = zip(groups, SIDES, strict=True)
        return tuple(plain_codecs.held(x, self.dtype, side)[:, position - first] for x, side in sides)


def _readable(seen, row: int, t: int) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """What query t of the block sees: keys and values by position, each in one slot alone."""
    found = {}
    for position_BS, k_BSKH, v_BSKH, mask_BTS, first, end in seen:
        for slot in np.flatnonzero(mask_BTS[row, t]):
            position = int(position_BS[row, slot])
            assert first <= slot < end and position not in found
            found[position] = (k_BSKH[row, slot], v_BSKH[row, slot])
    return found


@dataclasses.dataclass
class Session:
    """A cache and its oracle, driven side by side."""

    cache: kv_cache.KVCache
    texts: Texts
    rng: np.random.Generator
    longest: list[int] = dataclasses.field(default_factory=lambda: [0] * B)

    def append(self, counts: list[int], block_len: int) -> None:
        # Whole numbers from 1 to 255 are exact in 16 bits. Padding holds numbers too.
        k, v = (self.rng.integers(1, 256, size=(B, block_len, K, H)).astype(np.float32) for _ in range(2))
        self.cache, seen, slots = append(
            self.cache,
            jnp.asarray(k),
            jnp.asarray(v),
            jnp.asarray(counts, jnp.int32),
            window=self.texts.window,
            num_sinks=self.texts.num_sinks,
        )
        seen = jax.tree.map(np.asarray, seen)
        assert (np.asarray(slots) >= 0).all()  # -1 would be the last slot
        assert all(len(set(row)) == block_len for row in np.asarray(slots).tolist())  # which write wins is undefined
        got, held = ([], []), ([], [])
        for row, count in enumerate(counts):
            start = len(self.texts.rows[row])
            self.texts.append(row, k[row, :count], v[row, :count])
            self.longest[row] = max(self.longest[row], start + count)
            for t in range(count):
                found = _readable(seen, row, t)
                assert sorted(found) == self.texts.visible(start + t)
                for position, pair in found.items():
                    for own, x in zip((*got, *held), (*pair, *self.texts.held(row, start + t, position)), strict=True):
                        own.append(x)
        for idx, side in enumerate(SIDES if got[0] else ()):
            plain_codecs.assert_held(np.stack(got[idx]), np.stack(held[idx], axis=1), self.texts.dtype, side)
        self.check_lengths()

    def truncate(self, back: list[int]) -> None:
        """Takes tokens back, as many as the cache allows at most."""
        lengths = []
        for row, count in enumerate(back):
            least = max(self.longest[row] - self.cache.max_rollback, 0)
            lengths.append(max(len(self.texts.rows[row]) - count, least))
            del self.texts.rows[row][lengths[-1] :]
        self.cache = kv_cache.truncate(self.cache, jnp.asarray(lengths, jnp.int32))
        self.check_lengths()

    def check_lengths(self) -> None:
        np.testing.assert_array_equal(self.cache.length_B, [len(row) for row in self.texts.rows])


def _session(window, num_sinks, slack, layout, dtype, *, capacity=256, seed=8) -> Session:
    is_paged = layout == "paged"
    groups: dict[str, Any] = {"group_len": GROUP_LEN} if dtype in plain_codecs.BY_GROUP else {}
    cache_config = config_lib.CacheConfig(
        layout=layout, slack=slack, dtype=dtype, page_len=3 if is_paged else None, **groups
    )
    # A window in pages is a mask; the layout of a model with windows would be a ring.
    model = _model(None, 0) if is_paged else _model(window, num_sinks)
    cache = allocate.init_cache(model, cache_config, batch_size=B, capacity=capacity, compute_dtype="float32")
    texts = Texts(window=window, num_sinks=num_sinks, slack=slack, dtype=dtype)
    return Session(cache=cache, texts=texts, rng=np.random.default_rng(seed))


# Reading out of order when not exactly full (huggingface/transformers#47708), rolling one step early (#37574), a
# single token into a full ring (awslabs/keys_values#140), blocks after a wrap (ollama/ollama#15591), zero slots
# readable while filling (huggingface/transformers#45940): all are one of these sequences.
@pytest.mark.parametrize("window", range(1, 10))
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_reads_what_a_list_holds(window, data):
    num_sinks, slack = data.draw(st.integers(0, 3), "num_sinks"), data.draw(st.integers(0, 3), "slack")
    layout = data.draw(st.sampled_from(["auto", "auto", "full", "paged"]), "layout")
    by_group = [] if layout == "paged" else plain_codecs.BY_GROUP
    dtype = data.draw(st.sampled_from([*DTYPES, *by_group]), "dtype")
    session = _session(window, num_sinks, slack, layout, dtype)
    # One token, the longest block that a ring takes before it attends, one more, and far more.
    block_lens = sorted({1, slack + 1, slack + 2, 2 * window + 2})
    for _ in range(data.draw(st.integers(3, 12), "steps")):
        if data.draw(st.booleans(), "roll back"):
            session.truncate(data.draw(st.lists(st.integers(0, 6), min_size=B, max_size=B), "back"))
        block_len = data.draw(st.sampled_from(block_lens), "block_len")
        session.append(data.draw(st.lists(st.integers(0, block_len), min_size=B, max_size=B), "counts"), block_len)


# The same without chance: every count of tokens to take back, before and after the ring is full, then every block.
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("layout", "num_sinks", "slack"), [("full", 0, 2), ("paged", 0, 2), ("auto", 0, 2), ("auto", 2, 0), ("auto", 2, 3)]
)
def test_every_rollback(layout, num_sinks, slack, dtype):
    window = 4
    for held in (2, window + slack + num_sinks, 17):
        for back in range(min(slack + 1, held) + 1):
            for block_len in (1, slack + 1, slack + 2, 2 * window + 2):
                session = _session(window, num_sinks, slack, layout, dtype)
                while len(session.texts.rows[0]) < held:
                    count = min(2 * window + 2, held - len(session.texts.rows[0]))
                    session.append([count, max(count - 1, 0)], 2 * window + 2)
                session.truncate([back, back])
                session.append([block_len, block_len], block_len)
                session.append([1, 0], 1)


# The roll came one step early: keys 0 .. 7 fill a window of 8, and only key 8 pushes key 0 out
# (huggingface/transformers#37574).
def test_window_of_eight_by_hand():
    session = _session(8, 0, 0, "auto", "float32", capacity=64)
    session.append([6, 6], 18)
    for expected in ([0, 1, 2, 3, 4, 5, 6, EMPTY], [0, 1, 2, 3, 4, 5, 6, 7], [8, 1, 2, 3, 4, 5, 6, 7]):
        session.append([1, 1], 1)
        np.testing.assert_array_equal(session.cache.positions[0], [expected, expected])


def _contents(cache: kv_cache.KVCache) -> list[np.ndarray]:
    """All that a layer stores, with the slots on the second axis."""
    store, num_slots = cache.stores[0], cache.layouts[0].capacity
    if cache.pages_BC is not None:
        keys, values = (page_pool.gather(pool, cache.pages_BC) for pool in (store.keys, store.values))
        store = kv_cache.LayerStore(keys=keys, values=values)
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(store)]
    leaves = [leaf if leaf.shape[1] == num_slots else np.swapaxes(leaf, 1, 2) for leaf in leaves]
    return [*leaves, np.asarray(cache.positions[0])]


# Past the last slot dynamic_update_slice overwrites it, and differently under vmap (jax-ml/jax#9083, #34257).
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("batched", ["solo", "vmap"])
@pytest.mark.parametrize("layout", ["full", "paged"])
def test_past_capacity_nothing_is_overwritten(layout, batched, dtype):
    capacity = 9
    session = _session(None, 0, 0, layout, dtype, capacity=capacity)
    session.append([capacity - 1, capacity], capacity)
    run = functools.partial(_append, window=None, num_sinks=0)
    block = jnp.full((B, 4, K, H), 99.0)
    arguments = (session.cache, block, block, jnp.asarray([3, 4], jnp.int32))
    if batched == "vmap":
        stacked = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), arguments)
        after = jax.tree.map(lambda leaf: leaf[1], jax.jit(jax.vmap(run))(*stacked)[0])
    else:
        after = jax.jit(run)(*arguments)[0]
    for old, new in zip(_contents(session.cache), _contents(after), strict=True):
        # Row 0 had one free slot, the last; row 1 had none.
        np.testing.assert_array_equal(new[0, : capacity - 1], old[0, : capacity - 1])
        assert not np.array_equal(new[0, capacity - 1], old[0, capacity - 1])
        np.testing.assert_array_equal(new[1], old[1])


@pytest.mark.parametrize("slack", [0, 3])
@pytest.mark.parametrize("block_len", [4, 10])
def test_padding_is_not_stored(slack, block_len):
    session = _session(4, 2, slack, "auto", "float32")
    session.append([10, 3], 10)
    before = _contents(session.cache)
    session.append([0, 0], block_len)
    for old, new in zip(before, _contents(session.cache), strict=True):
        np.testing.assert_array_equal(new, old)
    session.append([1, 0], block_len)
    changed = [
        np.argwhere((old != new).reshape(B, old.shape[1], -1).any(axis=-1))
        for old, new in zip(before, _contents(session.cache), strict=True)
    ]
    # Position 10 of row 0, in slot 2 + (10 - 2) mod (4 + slack): of keys, values and positions.
    slot = 2 + 8 % (4 + slack)
    for where in changed:
        np.testing.assert_array_equal(where, [[0, slot]])


@pytest.mark.parametrize("slack", [0, 3])  # the block attends to itself; the block is written first
def test_what_is_not_finite_is_written_into_keys_alone(slack):
    session = _session(4, 0, slack, "auto", "float16")
    k, v = np.ones((2, B, 4, K, H), np.float32)
    v[1, 2, 0, 3] = 1e6  # infinite in float16
    v[0, 1, 2, 1], k[0, 3, 1, 2] = np.nan, -np.inf
    expected_k, expected_v = k.copy(), v.copy()
    for place in [(1, 2, 0, 3), (0, 1, 2, 1)]:
        expected_k[place], expected_v[place] = np.nan, 0
    expected_k[0, 3, 1, 2] = np.nan
    arguments = (jnp.asarray(k), jnp.asarray(v), jnp.full(B, 4, jnp.int32))
    session.cache, seen, _ = append(session.cache, *arguments, window=4, num_sinks=0)
    store = session.cache.stores[0]
    for keys, values in (seen[-1][1:3], (_every_row(store.keys), _every_row(store.values))):
        np.testing.assert_array_equal(keys[:, :4], expected_k)
        np.testing.assert_array_equal(values[:, :4], expected_v)


# Both K and V are donated, and a donated buffer that cannot be used, or is used twice, is a warning or an error here
# (liesel-devs/liesel#272, jax-ml/jax#9675, #12514).
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["auto", "full", "paged"])
def test_donated_step_writes_in_place_and_compiles_once(layout, dtype):
    session, traces = _session(4, 2, 1, layout, dtype, capacity=16), []

    def run(cache, k_BTKH, num_tokens_B):
        traces.append(k_BTKH.shape)
        return _append(cache, k_BTKH, -k_BTKH, num_tokens_B, window=4, num_sinks=2)[0]

    step = jax.jit(run, donate_argnums=0)
    cache, k = session.cache, jnp.ones((B, 2, K, H))
    pointers = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)}
    assert len(pointers) == len(jax.tree.leaves(cache.stores))
    for count in (1, 2, 0, 1, 2, 2, 2, 1):
        given = cache
        cache = step(cache, k, jnp.asarray([count, 2 - count], jnp.int32))
        assert all(leaf.is_deleted() for leaf in jax.tree.leaves(given))
        leaves = jax.tree.leaves(cache)
        assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    assert len(traces) == 1
    np.testing.assert_array_equal(cache.length_B, [11, 5])
    # The rows of keys and values never moved.
    assert {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(cache.stores)} == pointers


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["auto", "full", "paged"])
def test_take_rows_keeps_rows_whole(layout, dtype):
    session = _session(4, 2, 1, layout, dtype, capacity=16)
    session.append([9, 3], 10)
    taken = cache_rows.take_rows(session.cache, jnp.asarray([1, 0, 1], jnp.int32))
    assert taken.batch_size == 3
    np.testing.assert_array_equal(taken.length_B, [3, 9, 3])
    for old, new in zip(_contents(session.cache), _contents(taken), strict=True):
        np.testing.assert_array_equal(new, old[[1, 0, 1]])
