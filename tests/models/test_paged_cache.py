"""Pages through whole models, with a table of the host's and poison wherever no token lies: the same as full rows."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.attention import blockwise, select
from jdecode.cache import allocate, cache_rows, kv_cache
from jdecode.models import transformer
from jdecode.serving import page_table, pages
from tests import tiny_model, tiny_models
from tests.speculative import drafts_under_test

NUM_PAGES = 23
# Pages of one layer; and of two beside rings, one of them with sinks and a window that is only a mask.
FULL = dataclasses.replace(tiny_models.MIXED, layers=tiny_models.MIXED.layers[2:])
WIDE = dataclasses.replace(tiny_models.MIXED.layers[1], window=99, num_sinks=6)
MIXED = dataclasses.replace(tiny_models.MIXED, layers=(*tiny_models.MIXED.layers, WIDE))
DTYPES = [name for name in config.CACHE_DTYPES if name != "auto"]
CAPACITY = 16


def page_len(dtype: str) -> int:
    """Z: two tokens, or a group of four."""
    return tiny_models.GROUP_LEN if dtype in config.GROUPED_DTYPES else 2


def lengths(dtype: str) -> list[int]:
    """Of rows that fill three pages and a token, two, and one and a token."""
    Z = page_len(dtype)
    return [3 * Z + 1, 2 * Z, Z + 1]


def make_cache(model_config, batch_size: int, dtype="float32", **options: Any) -> kv_cache.KVCache:
    options = {"layout": "paged", "page_len": page_len(dtype), **options}
    num_pages = options.pop("num_pages", None)
    own = config.CacheConfig(dtype=dtype, **tiny_models.group_options(dtype), **options)
    sizes: dict[str, Any] = {"batch_size": batch_size, "capacity": CAPACITY, "compute_dtype": "float32"}
    return allocate.init_cache(model_config, own, **sizes, num_pages=num_pages)


@jax.jit
def prepare(cache: kv_cache.KVCache, is_poisoned_P: jax.Array, value: jax.Array, table_BC: jax.Array):
    """Overwrites pages in every layer, and gives the cache a table."""

    def fill(own: kv_cache.LayerStore) -> kv_cache.LayerStore:
        def leaf(array):
            return jnp.where(is_poisoned_P[:, None, None], tiny_models.poison(array, value), array)

        keys, values = (jax.tree.map(leaf, pool) for pool in (own.keys, own.values))
        return dataclasses.replace(own, keys=keys, values=values)

    stores = [fill(own) if cache.has_pages(idx) else own for idx, own in enumerate(cache.stores)]
    cache = dataclasses.replace(cache, stores=tuple(stores))
    return cache_rows.with_pages(cache, table_BC, jnp.zeros_like(cache.length_B), cache.length_B)


@dataclasses.dataclass
class Hosted:
    """A model's rows in pages that are taken when a token needs them, never ahead."""

    model: transformer.Transformer
    params: Any
    cache: kv_cache.KVCache
    tables: list[page_table.PageTable]
    poison: float

    @classmethod
    def of(cls, model, params, batch_size: int, dtype="float32", poison=np.nan, slack=0) -> "Hosted":
        pool = pages.PagePool(num_pages=NUM_PAGES, page_len=page_len(dtype))
        pool.allocate(3)  # so that pages lie elsewhere than columns
        cache = make_cache(model.config, batch_size, dtype, num_pages=NUM_PAGES, slack=slack)
        tables = [page_table.PageTable(pool, max_pages=CAPACITY // pool.page_len) for _ in range(batch_size)]
        return cls(model, params, cache, tables, poison)

    def feed(self, parts: list[list[int]], width: int) -> list[np.ndarray]:
        """Feeds a block of ragged rows; returns the logits of each row."""
        is_unmapped_P = np.ones(NUM_PAGES, bool)
        is_unmapped_P[[page for table in self.tables for page in table.pages]] = False
        for table, part in zip(self.tables, parts, strict=True):
            if part:
                assert not table.append(len(part)).copies
        table_BC = jnp.asarray(np.stack([table.padded_ids() for table in self.tables]))
        self.cache = prepare(self.cache, jnp.asarray(is_unmapped_P), jnp.float32(self.poison), table_BC)
        tokens_BT, num_tokens_B = tiny_models.padded(parts, width, padding=7)
        logits_BTV, self.cache = tiny_models.apply(self.model, self.params, tokens_BT, self.cache, num_tokens_B)
        return tiny_models.unpadded(logits_BTV, parts)

    def truncate(self, lengths: list[int]) -> None:
        for table, length in zip(self.tables, lengths, strict=True):
            table.truncate(length)
        self.cache = kv_cache.truncate(self.cache, jnp.asarray(lengths, jnp.int32))


def small_blocks(monkeypatch, size: int) -> str:
    monkeypatch.setitem(select.BACKENDS, "small blocks", functools.partial(blockwise.attend, block_size=size))
    return "small blocks"


# One page too many was attended whenever the length was a multiple of the page; fresh memory near zero hid it
# (pegainfer-project/pegainfer#291). Rows of 1 .. 3 Z + 1 tokens, step by step and in chunks that cross pages.
@pytest.mark.parametrize(
    ("backend", "chunk_len", "poison", "dtype"),
    [
        ("small blocks", 1, np.nan, "float32"),
        ("small blocks", 7, 1e4, "float32"),
        ("reference", 3, np.nan, "float32"),
        ("small blocks", 1, np.nan, "int4"),
        pytest.param("small blocks", 13, np.nan, "int4", marks=pytest.mark.slow),
        ("reference", 3, 1e4, "int8_channel"),
        pytest.param("blockwise", 4, np.nan, "float32", marks=pytest.mark.exhaustive),
        pytest.param("reference", 1, 1e4, "float32", marks=pytest.mark.exhaustive),
        pytest.param("small blocks", 3, np.nan, "int8_channel", marks=pytest.mark.exhaustive),
        pytest.param("reference", 13, np.nan, "int4", marks=pytest.mark.exhaustive),
    ],
)
def test_paged_is_full_whatever_unmapped_pages_hold(backend, chunk_len, poison, dtype, monkeypatch):
    small_blocks(monkeypatch, 2 * page_len(dtype))
    model = transformer.Transformer(MIXED, backend=backend)
    params, rows = tiny_models.random_params(MIXED), tiny_models.random_rows(lengths(dtype))
    full = make_cache(MIXED, 3, dtype, layout="auto", page_len=None)
    expected, _ = tiny_models.feed(model, params, rows, full, chunk_len)
    hosted = Hosted.of(model, params, 3, dtype, poison)
    for start in range(0, len(rows[0]), chunk_len):
        got = hosted.feed([row[start : start + chunk_len] for row in rows], chunk_len)
        for row, own in zip(expected, got, strict=True):
            np.testing.assert_array_equal(own, row[start : start + chunk_len])
    np.testing.assert_array_equal(hosted.cache.length_B, lengths(dtype))


@pytest.mark.parametrize(
    "dtype", [dtype if dtype in ("int8", "int4") else pytest.param(dtype, marks=pytest.mark.slow) for dtype in DTYPES]
)
def test_every_codec(dtype):
    model, params = transformer.Transformer(FULL), tiny_models.random_params(FULL)
    rows = tiny_models.random_rows(lengths(dtype))
    expected, _ = tiny_models.feed(model, params, rows, make_cache(FULL, 3, dtype, layout="full", page_len=None), 3)
    hosted = Hosted.of(model, params, 3, dtype)
    for start in range(0, len(rows[0]), 3):
        got = hosted.feed([row[start : start + 3] for row in rows], 3)
        for row, own in zip(expected, got, strict=True):
            np.testing.assert_array_equal(own, row[start : start + 3])


# Pages of three tokens, or groups, which blocks of two cut; the second block of 12, or 16, is moved back, to end at the
# last slot.
@pytest.mark.parametrize(
    ("dtype", "size"), [("float32", 2), ("float32", 12), ("float32", 99), ("int4", 8), ("int4", 16)]
)
def test_pages_and_blocks_of_other_lengths(dtype, size, monkeypatch):
    model = transformer.Transformer(FULL, backend=small_blocks(monkeypatch, size))
    params, rows = tiny_models.random_params(FULL), tiny_models.random_rows([16, 7])
    is_grouped = dtype in config.GROUPED_DTYPES
    cache = make_cache(FULL, 2, dtype, page_len=12 if is_grouped else 3)
    assert cache.max_len == (24 if is_grouped else 18)  # whole pages
    got, _ = tiny_models.feed(model, params, rows, cache, 4)
    reference = dataclasses.replace(model, backend="reference")
    if is_grouped:
        full = make_cache(FULL, 2, dtype, layout="full", page_len=None)
        tiny_models.assert_rows_close(got, tiny_models.feed(reference, params, rows, full, 4)[0])
    else:
        tiny_models.assert_rows_close(got, tiny_models.whole(reference, params, rows, 16))


# More sinks than a block of attention has slots, and no whole number of pages.
def test_many_sinks():
    layer = dataclasses.replace(tiny_models.MIXED.layers[1], window=40, num_sinks=300)
    model_config, own = dataclasses.replace(FULL, layers=(layer,)), config.CacheConfig(layout="paged")
    model, params, rows = transformer.Transformer(model_config), tiny_models.random_params(FULL), [[*range(1, 29)] * 11]
    cache = allocate.init_cache(model_config, own, batch_size=1, capacity=320, compute_dtype="float32")
    got, _ = tiny_models.feed(model, params, rows, cache, 308)
    expected = tiny_models.whole(dataclasses.replace(model, backend="reference"), params, rows, 308)
    tiny_models.assert_rows_close(got, expected)


# A page that comes back for another column, or row, holds old numbers or poison, which no position may vouch for.
@pytest.mark.parametrize(
    ("dtype", "held", "back"),
    [
        *(("float32", held, back) for held in (1, 4, 5) for back in (1, 2, 3)),
        ("int4", 8, 1),  # the second group is settled, is not, and is again
        pytest.param("int4", 9, 7, marks=pytest.mark.slow),
        pytest.param("int8_channel", 7, 4, marks=pytest.mark.slow),
    ],
)
def test_rollback_across_pages(dtype, held, back):
    model, params = transformer.Transformer(FULL), tiny_models.random_params(FULL)
    width, rows = 2 * page_len(dtype) + 1, tiny_models.random_rows([12, 12])
    slack = back - 1 if dtype in config.GROUPED_DTYPES else 0
    hosted = Hosted.of(model, params, 2, dtype, slack=slack)
    hosted.feed([row[:held] for row in rows], width)
    hosted.feed([[9] * back, [5] * back], width)
    hosted.truncate([held, held])
    tails = [rows[0][held : held + 1], rows[1][held : held + 3]]
    got = hosted.feed(tails, width)
    if dtype == "float32":
        expected = tiny_models.whole(model, params, rows, 12)
    else:
        full = make_cache(FULL, 2, dtype, layout="full", page_len=None, slack=slack)
        expected, _ = tiny_models.feed(model, params, rows, full, 12)
    tiny_models.assert_rows_close(got, [expected[0][held : held + 1], expected[1][held : held + 3]])


@pytest.mark.parametrize("dtype", ["float32", "int8_channel", "int4"])
def test_slots_of_no_page_and_shared_slots_are_never_written(dtype):
    model, params, Z = transformer.Transformer(FULL), tiny_models.random_params(FULL), page_len(dtype)
    cache = make_cache(FULL, 2, dtype, num_pages=4)
    table_BC = np.full((2, CAPACITY // Z), 4, np.int32)
    table_BC[0, :2], table_BC[1, :1] = (2, 0), 1
    cache = cache_rows.with_pages(cache, jnp.asarray(table_BC), jnp.asarray([0, Z]), jnp.asarray([0, 0]))
    tokens_BT = jnp.asarray(tiny_models.random_rows([3 * Z + 1] * 2))  # with which a third group settles
    _, after = tiny_models.apply(model, params, tokens_BT, cache)
    for side in ("keys", "values"):
        old, new = getattr(cache.stores[0], side), getattr(after.stores[0], side)
        for axis, *leaves in zip(old.slot_axes, jax.tree.leaves(old), jax.tree.leaves(new), strict=True):
            before_PZX, after_PZX = (np.moveaxis(leaf, axis, 1) for leaf in leaves)
            changed = np.argwhere((before_PZX != after_PZX).any(axis=-1))
            # Row 0 in pages 2 and 0; no page for what follows, nor for row 1, whose only one is not its own to write.
            entries = range(before_PZX.shape[1])
            np.testing.assert_array_equal(changed, [[page, entry] for page in (0, 2) for entry in entries])


OPTIONS: dict[str, Any] = {"max_new_tokens": 21, "ignore_eos": True, "logprobs": 0}
PAGED = config.CacheConfig(layout="paged", page_len=4)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("mistral_w16", "ngram"),
        pytest.param("llama_gqa", "model", marks=pytest.mark.slow),
        pytest.param("llama_gqa", "layer_skip", marks=pytest.mark.slow),
    ],
)
def test_generate_with_a_draft(name, kind):
    lm = tiny_model.load(name)
    rows = [[5, 6, 7] * 6, [9, 8], [3] * 11]
    options = {**OPTIONS, "draft": drafts_under_test.make(kind, lm), "num_draft_tokens": 3}
    full, paged = (lm.generate(rows, cache=own, **options) for own in (config.CacheConfig(), PAGED))
    assert paged.stats["drafted"] > paged.stats["accepted"]  # something was taken back
    assert tiny_model.rows(paged) == tiny_model.rows(full)
    np.testing.assert_allclose(np.asarray(paged.logprobs), np.asarray(full.logprobs), atol=1e-5)


# Forks of a text in mid-page, at a page's end, and of less than a page; with a draft whose cache is forked too.
@pytest.mark.parametrize(
    ("dtype", "draft"), [("auto", None), ("int4", None), pytest.param("auto", "model", marks=pytest.mark.slow)]
)
def test_samples_share_pages(dtype, draft):
    lm = tiny_model.load("llama_gqa")
    rows = [list(range(3, 3 + length)) for length in (18, 16, 3)]
    options = {**OPTIONS, "num_samples": 5, "capacity": 40, "sampling": config.SamplingConfig(temperature=1.0, seed=4)}
    if draft:
        options |= {"draft": drafts_under_test.make(draft, lm), "num_draft_tokens": 3, "verify": "coupled"}
    K, H, L = lm.config.num_kv_heads, lm.config.head_dim, lm.config.num_layers
    if dtype == "auto":
        caches = config.CacheConfig(), PAGED
        # Of 15 rows of ten pages, four rows of each prompt do without their four, four and no full pages: 118.
        columns, num_pages, page_bytes = 10, 120, L * 4 * 2 * K * H * 4
    else:
        groups: dict[str, Any] = {"dtype": "int4", "group_len": 8}
        caches = config.CacheConfig(**groups), config.CacheConfig(layout="paged", **groups)
        # Of 15 rows of five pages, without two, one and no pages of settled groups (with two tokens after them): 63.
        # A slot has half a byte a number; a group two float32 a channel of keys; values two float16 a token and head.
        columns, num_pages, page_bytes = 5, 64, L * 8 * (K * H + K * H + 4 * K)
    full, paged = (lm.generate(rows, cache=own, **options) for own in caches)
    assert tiny_model.rows(paged) == tiny_model.rows(full)
    assert len({tuple(row) for row in tiny_model.rows(full)}) == 15
    # Pages are rounded up to 120 and 64. Beside them there are columns and a shared length, int32, a row.
    saved = (15 * columns - num_pages) * page_bytes
    assert paged.stats["kv_cache_bytes"] == full.stats["kv_cache_bytes"] - saved + 15 * 4 * (columns + 1)


def test_text_is_taken_back_but_not_what_is_shared():
    model, params, rows = transformer.Transformer(FULL), tiny_models.random_params(FULL), [[3, 4, 5, 6, 7, 8, 9]] * 2
    expected = tiny_models.whole(model, params, rows, 7)
    _, cache = tiny_models.feed(model, params, rows, make_cache(FULL, 2), 7)
    cut = kv_cache.truncate(cache, jnp.asarray([5, 1]))
    again, _ = tiny_models.feed(model, params, [rows[0][5:], rows[0][1:4]], cut, 7)
    tiny_models.assert_rows_close(again, [expected[0][5:], expected[0][1:4]])
    forked = cache_rows.take_rows(cache, jnp.asarray([1, 1, 0]))
    np.testing.assert_array_equal(forked.shared_B, [6, 6, 0])  # three pages of two tokens; row 2 is alone
    with pytest.raises(ValueError, match=r"row 1: expected a length of at least the 6 tokens .* got 5; take the row"):
        kv_cache.truncate(forked, jnp.asarray([6, 5, 0]))
    kv_cache.truncate(forked, jnp.asarray([6, 9, 0]))
    kv_cache.truncate(cache_rows.take_rows(forked, jnp.asarray([1])), jnp.asarray([0]))
