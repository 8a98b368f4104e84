"""The contract of caches, over layouts and codecs: what can be read is what a plain list of tokens would hold."""

import dataclasses
import functools

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

EMPTY = int(visibility.EMPTY)
B, K, H = 2, 3, 4
DTYPES = ["float32", "bfloat16", "float16", "int8", "fp8"]


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
    """Passes one block through a cache of one layer; returns the cache after it, and all that could be read."""
    block = block_lib.open_block(cache, k_BTKH.shape[1], num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=window, num_sinks=num_sinks)
    store, segments = view.append(k_BTKH, v_BTKH)
    seen = [
        (part.position_BS, _every_row(part.keys), _every_row(part.values), part.first_slot, part.end_slot)
        for part in segments
    ]
    return block_lib.close_block(cache, block, [store]), seen, block.slots[0]


def _every_row(rows: segment.Rows) -> jax.Array:
    return rows.block(0, rows.num_slots)


append = jax.jit(_append, static_argnames=("window", "num_sinks"))


class Texts:
    """The oracle: each row is a list of the keys that were appended and not taken back."""

    def __init__(self) -> None:
        self.rows: list[list[tuple]] = [[] for _ in range(B)]
        self.longest = [0] * B

    def visible(self, row: int, query: int, window: int | None, num_sinks: int) -> list[tuple]:
        """What a query sees, in the order of positions: (position, key, value)."""
        return [
            (position, *pair)
            for position, pair in enumerate(self.rows[row][: query + 1])
            if window is None or query - position < window or position < num_sinks
        ]


def _readable(seen, row: int, query: int, window: int | None, num_sinks: int) -> list[tuple]:
    """What a query at ``query`` gets to see of segments, slots outside their bounds left out."""
    found = []
    for position_BS, k_BSKH, v_BSKH, first, end in seen:
        for slot in range(int(first), int(end)):
            position = int(position_BS[row, slot])
            is_near = window is None or query - position < window or position < num_sinks
            if position != EMPTY and position <= query and is_near:
                found.append((position, k_BSKH[row, slot], v_BSKH[row, slot]))
    return sorted(found, key=lambda entry: entry[0])


def _assert_same(got: list[tuple], expected: list[tuple]) -> None:
    assert [entry[0] for entry in got] == [entry[0] for entry in expected]
    for idx in (1, 2):
        numbers = [np.asarray([entry[idx] for entry in entries], np.float64) for entries in (got, expected)]
        # Rotations and quotients may round otherwise in a block of another length; the steps of 8 bits are far larger.
        np.testing.assert_allclose(*numbers, rtol=1e-6, atol=1e-4)


@dataclasses.dataclass
class Session:
    """A cache and its oracle, driven side by side."""

    cache: kv_cache.KVCache
    window: int | None
    num_sinks: int
    rng: np.random.Generator
    texts: Texts = dataclasses.field(default_factory=Texts)

    def append(self, counts: list[int], block_len: int) -> None:
        # Whole numbers from 1 to 255 are exact in 16 bits. Padding holds numbers too.
        k, v = (self.rng.integers(1, 256, size=(B, block_len, K, H)).astype(np.float32) for _ in range(2))
        self.cache, seen, slots = append(
            self.cache,
            jnp.asarray(k),
            jnp.asarray(v),
            jnp.asarray(counts, jnp.int32),
            window=self.window,
            num_sinks=self.num_sinks,
        )
        seen = jax.tree.map(np.asarray, seen)
        codec = self.cache.codec
        stored_k, stored_v = (
            _every_row(codec.keys.encode(jnp.asarray(k))),
            _every_row(codec.values.encode(jnp.asarray(v))),
        )
        assert np.abs(stored_k - k).max() < 12  # what is compared is the text: steps of 8 bits at the most
        assert (np.asarray(slots) >= 0).all()  # -1 would be the last slot
        assert all(len(set(row)) == block_len for row in np.asarray(slots).tolist())  # which write wins is undefined
        for row, count in enumerate(counts):
            start = len(self.texts.rows[row])
            self.texts.rows[row] += [(stored_k[row, t], stored_v[row, t]) for t in range(count)]
            self.texts.longest[row] = max(self.texts.longest[row], start + count)
            for query in range(start, start + count):
                expected = self.texts.visible(row, query, self.window, self.num_sinks)
                _assert_same(_readable(seen, row, query, self.window, self.num_sinks), expected)
        self.check_lengths()

    def truncate(self, back: list[int]) -> None:
        """Takes tokens back, as many as the cache allows at most."""
        lengths = []
        for row, count in enumerate(back):
            least = max(self.texts.longest[row] - self.cache.max_rollback, 0)
            lengths.append(max(len(self.texts.rows[row]) - count, least))
            del self.texts.rows[row][lengths[-1] :]
        self.cache = kv_cache.truncate(self.cache, jnp.asarray(lengths, jnp.int32))
        self.check_lengths()

    def check_lengths(self) -> None:
        np.testing.assert_array_equal(self.cache.length_B, [len(row) for row in self.texts.rows])


def _session(window, num_sinks, slack, layout, dtype, *, capacity=256, seed=8) -> Session:
    is_paged = layout == "paged"
    cache_config = config_lib.CacheConfig(layout=layout, slack=slack, dtype=dtype, page_len=3 if is_paged else None)
    # A window in pages is a mask; the layout of a model with windows would be a ring.
    model = _model(None, 0) if is_paged else _model(window, num_sinks)
    cache = allocate.init_cache(model, cache_config, batch_size=B, capacity=capacity, compute_dtype="float32")
    return Session(cache=cache, window=window, num_sinks=num_sinks, rng=np.random.default_rng(seed))


# Reading out of order when not exactly full (huggingface/transformers#47708), rolling one step early (#37574), a
# single token into a full ring (awslabs/keys_values#140), blocks after a wrap (ollama/ollama#15591), zero slots
# readable while filling (huggingface/transformers#45940): all are one of these sequences.
@pytest.mark.parametrize("window", range(1, 10))
@hypothesis.settings(max_examples=6, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_reads_what_a_list_holds(window, data):
    num_sinks, slack = data.draw(st.integers(0, 3), "num_sinks"), data.draw(st.integers(0, 3), "slack")
    layout, dtype = (
        data.draw(st.sampled_from(["auto", "auto", "full", "paged"]), "layout"),
        data.draw(st.sampled_from(DTYPES)),
    )
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
