"""Random work of tables and a prefix tree on a pool of the device, beside plain lists of what each text must hold."""

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

B, C, P, Z, T = 3, 4, 9, 2, 3
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
    """What a token of a text stores: whole numbers from 1 to 199, another row for every id."""
    return ((ids_BT[..., None] * 37 + np.arange(K * H) * 11) % 199 + 1.0).reshape(*ids_BT.shape, K, H)


@jax.jit
def step(cache, is_poisoned_P, copies_N2, table_BC, length_B, k_BTKH, num_tokens_B):
    """Poisons pages, makes copies, sends the table and appends a block."""

    def fill(leaf):
        filler = jnp.nan if jnp.issubdtype(leaf.dtype, jnp.floating) else 99
        return jnp.where(is_poisoned_P[:, None, None], jnp.asarray(filler, leaf.dtype), leaf)

    cache = dataclasses.replace(cache, stores=jax.tree.map(fill, cache.stores))
    cache = cache_rows.copy_pages(cache, copies_N2[:, 0], copies_N2[:, 1])
    cache = cache_rows.with_pages(cache, table_BC, jnp.zeros(B, jnp.int32), length_B)
    block = block_lib.open_block(cache, T, num_tokens_B)
    view = layer_view.CachedLayer(cache=cache, block=block, layer_idx=0, window=None, num_sinks=0)
    store, _ = view.append(k_BTKH, -k_BTKH)
    return block_lib.close_block(cache, block, [store])


@jax.jit
def read(store, table_BC):
    """Returns keys and values of every slot of every row."""
    both = [paged_rows.PagedRows(pool=pool, page_BC=table_BC) for pool in (store.keys, store.values)]
    return [rows.block(0, rows.num_slots) for rows in both]


@functools.cache
def as_stored(dtype: str) -> list[np.ndarray]:
    """Returns the keys and the values of tokens 0, 1, 2 ... as a cache without pages gives them back."""
    codec, most = allocate.make_codec(config.CacheConfig(dtype=dtype), "float32"), 30 * B * T
    k = jnp.asarray(contents(np.arange(most)[None]), jnp.float32)
    return [np.asarray(own.encode(x).block(0, most))[0] for own, x in ((codec.keys, k), (codec.values, -k))]


@hypothesis.settings(
    max_examples=20,
    stateful_step_count=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which a busy machine would fail
)
class DeviceMachine(stateful.RuleBasedStateMachine):
    """Texts that begin (anew, or with what the tree holds), grow, fork, roll back, are kept, end and are evicted."""

    dtype = "float32"

    def __init__(self) -> None:
        super().__init__()
        own = config.CacheConfig(layout="paged", page_len=Z, dtype=self.dtype)
        sizes: dict[str, Any] = {"batch_size": B, "capacity": C * Z, "compute_dtype": "float32", "num_pages": P}
        self.cache = allocate.init_cache(MODEL, own, **sizes)
        self.pool = pages.PagePool(num_pages=P, page_len=Z)
        self.tree = prefix_tree.PrefixTree(self.pool)
        self.space = Namespace(model="digest", cache=own)
        self.tables: dict[int, page_table.PageTable] = {}  # of the rows in use
        self.texts: list[list[int]] = [[] for _ in range(B)]
        self.kept: list[list[int]] = []  # texts that the tree was given, perhaps evicted since
        self.num_written = 0

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
        text = data.draw(st.sampled_from([[], *self.kept]))
        match = self.tree.match(self.space, text, keep_last=0)
        self.tables[row] = page_table.PageTable(self.pool, max_pages=C, pages=match.pages, length=match.num_tokens)
        self.tree.unlock(match)
        self.texts[row] = text[: match.num_tokens]

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(counts=st.lists(st.integers(0, T), min_size=B, max_size=B))
    def append(self, counts: list[int]) -> None:
        is_free_P = np.asarray([not self.pool.references(page) and not self.pool.is_kept(page) for page in range(P)])
        length_B, copies = np.asarray([len(text) for text in self.texts], np.int32), []
        ids_BT, num_tokens_B = np.zeros((B, T), np.int64), np.zeros(B, np.int32)
        for row, table in self.tables.items():
            count = min(counts[row], C * Z - table.length)
            if count == 0 or table.pages_needed(count) > self.pool.num_free:
                continue
            copies += table.append(count).copies
            ids_BT[row, :count] = np.arange(self.num_written, self.num_written + count)
            self.num_written += count
            num_tokens_B[row] = count
            self.texts[row] = self.texts[row] + ids_BT[row, :count].tolist()
        padded_N2 = np.asarray([*copies, *[(P, P)] * (B - len(copies))], np.int32)
        k_BTKH = contents(ids_BT).astype(np.float32)
        self.cache = step(self.cache, is_free_P, padded_N2, self._table_BC(), length_B, k_BTKH, num_tokens_B)

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self._rows(True)))
        self.texts[row] = self.texts[row][: data.draw(st.integers(0, len(self.texts[row])))]
        self.tables[row].truncate(len(self.texts[row]))

    @stateful.precondition(lambda self: self._rows(True) and self._rows(False))
    @stateful.rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        row, new = data.draw(st.sampled_from(self._rows(True))), self._rows(False)[0]
        self.tables[new], self.texts[new] = self.tables[row].fork(), self.texts[row]

    @stateful.precondition(lambda self: self._rows(True))
    @stateful.rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from(self._rows(True)))
        self.tables.pop(row).free()
        self.texts[row] = []

    @stateful.precondition(lambda self: any(self.texts))
    @stateful.rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        row = data.draw(st.sampled_from([row for row in range(B) if self.texts[row]]))
        self.tree.insert(self.space, self.texts[row], self.tables[row])
        self.kept.append(self.texts[row])

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
        self._check(self._table_BC(), self.texts)

    @stateful.invariant()
    def device_holds_what_the_tree_keeps(self) -> None:
        for text in self.kept[-2:]:
            match = self.tree.match(self.space, text, keep_last=0, record=False)
            table_BC = np.full((B, C), P, np.int32)
            table_BC[0, : len(match.pages)] = match.pages
            self._check(table_BC, [text[: match.num_tokens]])
            self.tree.unlock(match)

    def _check(self, table_BC: np.ndarray, texts: list[list[int]]) -> None:
        got = [np.asarray(array) for array in read(self.cache.stores[0], table_BC)]
        for row, text in enumerate(texts):
            for side in range(2):
                expected = as_stored(self.dtype)[side][np.asarray(text, int)]
                np.testing.assert_allclose(got[side][row, : len(text)], expected, rtol=1e-6)

    def teardown(self) -> None:
        for table in self.tables.values():
            table.free()
        self.tree.evict(P)
        assert self.pool.num_free == P


class Int8Machine(DeviceMachine):
    """The same with scales beside the numbers."""

    dtype = "int8"


TestDeviceMachine = DeviceMachine.TestCase
TestInt8Machine = Int8Machine.TestCase
