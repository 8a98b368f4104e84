"""Random work of tables and a prefix tree on a pool of the device, beside plain lists of what each text must hold.

Where a codec stores groups of tokens, a table counts those that are settled; the host brings a fork its latest tokens.
"""

import dataclasses
import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import stateful
from hypothesis import strategies as st

from jdecode import config
from jdecode.cache import allocate, cache_rows, layer_view, paged_rows
from jdecode.cache import block as block_lib
from jdecode.serving import page_table, pages, prefix_tree
from jdecode.serving.prefix_namespace import Namespace
from tests import plain_codecs, tiny_models

B, C, P = 3, 4, 9
K, H = 2, 4
MODEL = config.ModelConfig(
    vocab_size=11,
    hidden_size=8,
    intermediate_size=8,
    num_heads=K,
    num_kv_heads=K,
    head_dim=H,
    layers=(config.LayerConfig(),),
)


def contents(ids_BT: np.ndarray) -> np.ndarray:
    """What a token of a text stores: numbers from 1 to 199, another row for every id, none midway between two steps."""
    numbers = 100 + 99 * np.sin(ids_BT[..., None] * 1.7 + np.arange(K * H) * 2.3)
    return numbers.reshape(*ids_BT.shape, K, H).astype(np.float32)


@jax.jit
def step(cache, is_poisoned_P, copies_N2, table_BC, length_B, k_BTKH, num_tokens_B):
    """Poisons pages, makes copies, sends the table and appends a block."""

    def fill(leaf):
        return jnp.where(is_poisoned_P[:, None, None], tiny_models.poison(leaf, jnp.nan), leaf)

    (store,) = cache.stores
    keys, values = (jax.tree.map(fill, pool) for pool in (store.keys, store.values))
    cache = dataclasses.replace(cache, stores=(dataclasses.replace(store, keys=keys, values=values),))
    cache = cache_rows.copy_pages(cache, copies_N2[:, 0], copies_N2[:, 1])
    cache = cache_rows.with_pages(cache, table_BC, jnp.zeros(B, jnp.int32), length_B)
    block = block_lib.open_block(cache, k_BTKH.shape[1], num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=None, num_sinks=0)
    store, _ = view.append(k_BTKH, -k_BTKH)
    return block_lib.close_block(cache, block, [store])


@jax.jit
def take_latest(cache, row_B):
    """Returns the cache with the latest tokens of other rows, where they lie in rows beside the pages."""

    def take(rows):
        return jax.tree.map(lambda leaf: leaf[row_B], rows)

    stores = tuple(dataclasses.replace(own, recent=take(own.recent)) for own in cache.stores)
    of = zip(cache.layouts, cache.positions, strict=True)
    positions = tuple(own if layout is cache.paged_layout else take(own) for layout, own in of)
    return dataclasses.replace(cache, stores=stores, positions=positions)


@jax.jit
def read(store, table_BC):
    """Returns keys and values of every slot of every row."""
    both = [paged_rows.PagedRows(pool=pool, page_BC=table_BC) for pool in (store.keys, store.values)]
    return [rows.block(0, rows.num_slots) for rows in both]


@functools.cache
def tokens_as_stored(dtype: str) -> list[np.ndarray]:
    """Returns the keys and the values of tokens 0, 1, 2 ... as a cache without pages gives them back."""
    codec, most = allocate.make_codec(config.CacheConfig(dtype=dtype), "float32"), 1000
    k = jnp.asarray(contents(np.arange(most)[None]))
    return [np.asarray(own.encode(x).block(0, most))[0] for own, x in ((codec.keys, k), (codec.values, -k))]


@functools.cache
def group_as_stored(dtype: str, group: tuple[int, ...]) -> list[np.ndarray]:
    """Returns the keys and the values of a group of tokens."""
    k = contents(np.asarray(group))
    return [plain_codecs.held(x, dtype, side)[1] for x, side in ((k, "keys"), (-k, "values"))]


@hypothesis.settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which a busy machine would fail
)
class DeviceMachine(stateful.RuleBasedStateMachine):
    """Texts that begin (anew, or with what the tree holds), grow, fork, roll back, are kept, end and are evicted."""

    dtype, page_len, block_len = "float32", 2, 3
    group_len, lag, most_back = 1, 0, 99

    def __init__(self) -> None:
        super().__init__()
        own = config.CacheConfig(layout="paged", page_len=self.page_len, dtype=self.dtype, **self.groups())
        self.capacity = C * self.page_len
        sizes: dict[str, Any] = {"batch_size": B, "capacity": self.capacity, "compute_dtype": "float32", "num_pages": P}
        self.cache = allocate.init_cache(MODEL, own, **sizes)
        self.pool = pages.PagePool(num_pages=P, page_len=self.page_len)
        self.tree = prefix_tree.PrefixTree(self.pool)
        self.space = Namespace(model="digest", cache=own)
        self.tables: dict[int, page_table.PageTable] = {}  # of the rows in use
        self.texts: list[list[int]] = [[] for _ in range(B)]
        self.longest = [0] * B
        self.kept: list[list[int]] = []  # texts that the tree was given, perhaps evicted since
        self.num_written = 0

    def groups(self) -> dict[str, Any]:
        """What a config says of groups."""
        return {"group_len": self.group_len, "slack": self.most_back - 1} if self.group_len > 1 else {}

    def stored(self, length: int) -> int:
        """How many tokens of a text lie in pages."""
        return max(length - self.lag, 0) // self.group_len * self.group_len

    def _rows(self, is_used: bool) -> list[int]:
        return [row for row in range(B) if (row in self.tables) == is_used]

    def _table_BC(self) -> np.ndarray:
        table_BC = np.full((B, C), P, np.int32)
        for row, table in self.tables.items():
            table_BC[row] = table.padded_ids()
        return table_BC

    @stateful.precondition(lambda self: self._rows(False))
    @stateful.rule(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        row = self._rows(False)[0]
        known = self.kept if self.group_len == 1 else []  # the tree does not hold the latest tokens
        text = data.draw(st.sampled_from([[], *known]))
        match = self.tree.match(self.space, text, keep_last=0)
        self.tables[row] = page_table.PageTable(self.pool, max_pages=C, pages=match.pages, length=match.num_tokens)
        self.tree.unlock(match)
        self.texts[row] = text[: match.num_tokens]
        self.longest[row] = match.num_tokens

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(data=st.data())
    def append(self, data: st.DataObject) -> None:
        counts = data.draw(st.lists(st.integers(0, self.block_len), min_size=B, max_size=B))
        is_free_P = np.asarray([not self.pool.references(page) and not self.pool.is_kept(page) for page in range(P)])
        length_B, copies = np.asarray([len(text) for text in self.texts], np.int32), []
        ids_BT, num_tokens_B = np.zeros((B, self.block_len), np.int64), np.zeros(B, np.int32)
        for row, table in self.tables.items():
            count = min(counts[row], self.capacity - len(self.texts[row]))
            num_stored = self.stored(len(self.texts[row]) + count) - table.length
            if count == 0 or (num_stored and table.pages_needed(num_stored) > self.pool.num_free):
                continue
            copies += table.append(num_stored).copies if num_stored else []
            ids_BT[row, :count] = np.arange(self.num_written, self.num_written + count)
            self.num_written += count
            num_tokens_B[row] = count
            self.texts[row] = self.texts[row] + ids_BT[row, :count].tolist()
            self.longest[row] = max(self.longest[row], len(self.texts[row]))
        padded_N2 = np.asarray([*copies, *[(P, P)] * (B - len(copies))], np.int32)
        self.cache = step(self.cache, is_free_P, padded_N2, self._table_BC(), length_B, contents(ids_BT), num_tokens_B)

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self._rows(True)))
        least = max(self.longest[row] - self.most_back, 0)
        self.texts[row] = self.texts[row][: data.draw(st.integers(least, len(self.texts[row])))]
        self.tables[row].truncate(self.stored(len(self.texts[row])))

    @stateful.precondition(lambda self: self._rows(True) and self._rows(False))
    @stateful.rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row, new = data.draw(st.sampled_from(self._rows(True))), self._rows(False)[0]
        self.tables[new], self.texts[new] = self.tables[row].fork(), self.texts[row]
        self.longest[new] = self.longest[row]
        if self.group_len > 1:
            row_B = np.arange(B)
            row_B[new] = row
            self.cache = take_latest(self.cache, row_B)

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self._rows(True)))
        self.tables.pop(row).free()
        self.texts[row] = []

    @stateful.precondition(lambda self: any(table.length for table in self.tables.values()))
    @stateful.rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row, table in self.tables.items() if table.length]))
        text = self.texts[row][: self.tables[row].length]
        self.tree.insert(self.space, text, self.tables[row])
        self.kept.append(text)

    @stateful.rule(num_pages=st.integers(1, 3))
    def evict(self, num_pages: int) -> None:
        self.tree.evict(num_pages)

    @stateful.invariant()
    def every_page_is_free_used_or_cached(self) -> None:
        self.tree.check()
        assert self.pool.num_free + self.pool.num_used + self.pool.num_cached == P
        held = {page for table in self.tables.values() for page in table.pages}
        assert self.pool.num_used == len(held)

    @stateful.invariant()
    def device_holds_every_text(self) -> None:
        self._check(self._table_BC(), [text[: self.stored(len(text))] for text in self.texts])

    @stateful.invariant()
    def device_holds_what_the_tree_keeps(self) -> None:
        for text in self.kept[-2:]:
            match = self.tree.match(self.space, text, keep_last=0, record=False)
            table_BC = np.full((B, C), P, np.int32)
            table_BC[0, : len(match.pages)] = match.pages
            whole_groups = match.num_tokens // self.group_len * self.group_len
            self._check(table_BC, [text[:whole_groups]])
            self.tree.unlock(match)

    def _check(self, table_BC: np.ndarray, texts: list[list[int]]) -> None:
        got = [np.asarray(array) for array in read(self.cache.stores[0], table_BC)]
        for row, text in enumerate(texts):
            for side in range(2):
                np.testing.assert_allclose(got[side][row, : len(text)], self._as_stored(text)[side], rtol=1e-5)

    def _as_stored(self, text: list[int]) -> list[np.ndarray]:
        """Returns the keys and the values of a text as they should be read."""
        if self.group_len == 1:
            return [rows[np.asarray(text, int)] for rows in tokens_as_stored(self.dtype)]
        starts = range(0, len(text), self.group_len)
        groups = [group_as_stored(self.dtype, tuple(text[start : start + self.group_len])) for start in starts]
        nothing = np.zeros((0, K, H))
        return [np.concatenate([nothing, *(group[side] for group in groups)]) for side in range(2)]

    def teardown(self) -> None:
        for table in self.tables.values():
            table.free()
        self.tree.evict(P)
        assert self.pool.num_free == P


class Int8Machine(DeviceMachine):
    """The same with scales beside the numbers."""

    dtype = "int8"


class Int4Machine(DeviceMachine):
    """The same with pages of two groups, of which a fork may share the first."""

    dtype, page_len, block_len = "int4", 8, 7
    group_len, lag, most_back = 4, 2, 2


TestDeviceMachine = DeviceMachine.TestCase
TestInt8Machine = Int8Machine.TestCase
TestInt4Machine = Int4Machine.TestCase
