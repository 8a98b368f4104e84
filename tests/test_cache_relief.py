"""The ways to need less: what a choice would take beside what is really allocated with it, and factors by hand."""

import dataclasses
import functools

import jax
import pytest

from jdecode import cache_relief, config_file, relief_way
from jdecode import config as config_lib
from jdecode.cache import allocate, ledger
from tests import tiny_models

MIXED = dataclasses.replace(tiny_models.MIXED, num_heads=8, num_kv_heads=4)
B, S = 3, 40


def question_of(
    model: config_lib.ModelConfig = MIXED, compute_dtype: str = "bfloat16", **changes
) -> relief_way.Question:
    cache = config_lib.CacheConfig(**changes)
    plan = ledger.Plan(model=model, cache=cache, batch_size=B, capacity=S, compute_dtype=compute_dtype)
    return relief_way.Question(plan=plan, window=10, num_sinks=2, chunk_len=8, operations_a_token=1000)


@functools.cache
def variants(name: str, question: relief_way.Question) -> list[relief_way.Variant]:
    (way,) = [way for way in cache_relief.WAYS if way.name == name]
    return way.variants(question)


@pytest.mark.parametrize("way", cache_relief.WAYS, ids=lambda way: way.name)
@pytest.mark.parametrize(
    "cache", [{}, {"layout": "full"}, {"layout": "paged", "page_len": 8}, {"layout": "paged", "dtype": "int4"}], ids=str
)
def test_every_way(way, cache):
    own = variants(way.name, question_of(**cache))
    evicts = way.name == "tokens evicted by attention"
    assert len(own) >= (1 if evicts and "dtype" in cache else 2)
    assert [variant.is_planned for variant in own].count(True) == 1
    assert len({variant.name for variant in own}) == len(own)
    assert all([way.shrinks, way.formula, way.costs, way.suits])
    for variant in own:
        is_work = way.name == "a prefix cache"
        assert (variant.operations is not None) == is_work
        assert (variant.formula_bytes is None) == (variant.allocated_bytes is None) == is_work
        if variant.plan is not None:
            plan = variant.plan
            init = functools.partial(allocate.init_compressed, num_new=plan.num_new)
            cache = (init if plan.cache.eviction else allocate.init_cache)(
                plan.model, plan.cache, batch_size=B, capacity=plan.capacity, compute_dtype=plan.compute_dtype
            )
            assert variant.allocated_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache.stores))
            if variant.plan.dtype in ("float32", "bfloat16", "float16"):  # others may have scales, beside the formula
                assert variant.allocated_bytes == variant.formula_bytes


# Keys and values of 3 rows: 4 heads of 6 in bfloat16; slots 4, 2 + 4 and 40.
PLANNED = 2 * 3 * 4 * 6 * 2 * (4 + 6 + 40)


def test_heads_by_hand():
    own = variants("fewer key/value heads", question_of())
    assert [(variant.name, PLANNED / variant.amount) for variant in own] == [
        ("8 heads, multi-head", 0.5),
        ("4 heads, grouped-query", 1.0),
        ("2 heads, grouped-query", 2.0),
        ("1 head, multi-query", 4.0),
    ]


def test_a_model_with_one_head_a_query_or_one_in_all():
    whole = dataclasses.replace(MIXED, num_kv_heads=8)
    assert [v.name.split()[0] for v in variants("fewer key/value heads", question_of(whole))] == ["8", "4", "2", "1"]
    one = dataclasses.replace(MIXED, num_kv_heads=1)
    assert [v.name.split()[0] for v in variants("fewer key/value heads", question_of(one))] == ["8", "1"]


@pytest.mark.parametrize("planned", ["float32", "bfloat16"])
def test_dtypes_by_hand(planned):
    own = variants("a narrower dtype", question_of(compute_dtype=planned))
    assert {variant.name for variant in own} == set(config_lib.CACHE_DTYPES) - {"auto"}
    sizes = {variant.name: variant.formula_bytes for variant in own}
    assert (sizes["float32"], sizes["bfloat16"], sizes["float16"]) == (2 * PLANNED, PLANNED, PLANNED)
    assert [variant.name for variant in own if variant.is_planned] == [planned]


# Pages of 16; of one group (128 tokens, unless said) where 16 tokens are no whole groups, or where nobody says.
@pytest.mark.parametrize(
    ("cache", "slots"),
    [({"page_len": 16}, 128), ({"page_len": 16, "dtype": "int4", "group_len": 8}, 48), ({"dtype": "int4"}, 128)],
)
def test_dtypes_in_pages_by_hand(cache, slots):
    model = dataclasses.replace(MIXED, layers=MIXED.layers[2:])
    own = {
        variant.name: variant for variant in variants("a narrower dtype", question_of(model, layout="paged", **cache))
    }
    assert set(own) == set(config_lib.CACHE_DTYPES) - {"auto"}
    plan = own["int4"].plan
    assert plan is not None and plan.cache.layout == "paged"
    group_len, lag = plan.cache.group_len, plan.cache.group_lag
    assert lag is not None and lag == group_len // 4
    # Half a byte a number in whole pages; and the latest tokens, of bfloat16, a group and a quarter of one.
    assert own["int4"].formula_bytes == 2 * B * 4 * 6 * slots // 2 + 2 * B * 4 * 6 * 2 * (group_len + lag)
    assert own["int8"].formula_bytes == 2 * B * 4 * 6 * (64 if "page_len" not in cache else 48)


def test_windows_by_hand():
    own = variants("windows in rings", question_of())
    slot = PLANNED // 50
    # Every slot of three layers; rings of 4 and 6; the third layer in a ring of 10 and 2 sinks.
    assert [variant.formula_bytes for variant in own] == [120 * slot, 50 * slot, 22 * slot]
    assert "2 of 3 layers" in own[1].name and own[2].name == "what if the others had a window of 10 and 2 sinks"


def test_windows_of_a_model_without():
    model = dataclasses.replace(MIXED, layers=MIXED.layers[2:] * 2)
    every, ring = variants("windows in rings", question_of(model))
    assert (every.name, every.is_planned) == ("every slot", True)
    assert ring.name == "what if every layer had a window of 10 and 2 sinks"
    assert every.amount / ring.amount == 40 / 12


def test_windows_of_a_model_with_nothing_else():
    model = dataclasses.replace(MIXED, layers=MIXED.layers[:1] * 2)
    assert len(variants("windows in rings", question_of(model))) == 2


@pytest.mark.parametrize("layout", ["auto", "paged"])
def test_pages_by_hand(layout):
    own = variants("pages that rows share", question_of(layout=layout, page_len=3 if layout == "paged" else None))
    slot, page_len = PLANNED // 50, 3 if layout == "paged" else 64
    # Rings of 4 and 6 slots beside 14 pages of three; or beside one of 64, none of whose is full at 20 tokens.
    columns, full = (14, 6) if layout == "paged" else (1, 0)
    assert [variant.formula_bytes for variant in own] == [
        50 * slot,
        (10 + columns * page_len) * slot,
        4 * 50 * slot,
        (4 * 10 + (full + 4 * (columns - full)) * page_len) * slot,
    ]
    assert [variant.allocated_bytes for variant in own] == [variant.formula_bytes for variant in own]
    assert [variant.is_planned for variant in own] == [layout == "auto", layout == "paged", False, False]


# With five tokens after a group 8 of a prompt of 20 are settled: one of five pages of a group, or none of three of two.
@pytest.mark.parametrize(("layout", "page_len", "columns", "full"), [("auto", None, 5, 1), ("paged", 16, 3, 0)])
def test_pages_of_groups_by_hand(layout, page_len, columns, full):
    model = dataclasses.replace(MIXED, layers=MIXED.layers[2:])
    question = question_of(model, layout=layout, page_len=page_len, dtype="int4", group_len=8, slack=4)
    every, paged, samples, shared = variants("pages that rows share", question)
    # Bytes of a slot's keys and values, and of the latest tokens': a group, five and four to be taken back.
    row, latest, slots = 4 * 6, 2 * 2 * 4 * 6 * (8 + 5 + 4), (page_len or 8) * columns
    assert [variant.formula_bytes for variant in (every, paged, samples, shared)] == [
        B * (40 * row + latest),
        B * (slots * row + latest),
        4 * B * (40 * row + latest),
        B * ((page_len or 8) * (full + 4 * (columns - full)) * row + 4 * latest),
    ]
    assert [variant.is_planned for variant in (every, paged)] == [layout == "auto", layout == "paged"]
    # With scales: of a group two float32 a channel, of a slot and head two float16.
    page_bytes = (page_len or 8) * (row + 2 * 2 * 4) + (page_len or 8) // 8 * 2 * 4 * row
    assert samples.allocated_bytes == 4 * B * (5 * (8 * (row + 16) + 8 * row) + latest)
    assert shared.allocated_bytes == B * ((full + 4 * (columns - full)) * page_bytes + 4 * latest)


def test_where_no_pages_are():
    rings = dataclasses.replace(MIXED, layers=MIXED.layers[:1] * 2)
    assert len(variants("pages that rows share", question_of(rings))) == 1
    question = question_of()
    spread = dataclasses.replace(question.plan, mesh=config_lib.MeshConfig(data=3))
    (only,) = variants("pages that rows share", dataclasses.replace(question, plan=spread))
    assert only.is_planned


def test_evictions_by_hand():
    own = variants("tokens evicted by attention", question_of())
    slot = PLANNED // 50
    # Rings of 4 and 6, and of the third layer all 40, a quarter and an eighth, or a quarter; of h2o 10 numbers of 4
    # bytes for each of 3 rows beside it.
    sizes = [50 * slot, 25 * slot, 20 * slot + 3 * 10 * 4]
    assert [variant.formula_bytes for variant in own] == sizes
    assert [variant.name for variant in own] == [
        "every token",
        "snapkv: 10 of the prompt and 5 new tokens",
        "h2o: 10 tokens in all",
    ]
    planned = question_of(eviction="h2o", budget=10)
    for way in cache_relief.WAYS:
        if way.name != "attention by blocks":
            assert [variant.is_planned for variant in way.variants(planned)].count(True) == 1, way.name


def test_a_prefix_cache_by_hand():
    whole, rest = variants("a prefix cache", question_of())
    # Pairs of 40 tokens, and of the latter 20: windows of 4 (1 + 2 + 3 + 37 · 4), such with two sinks before them
    # (1 + 35 · 2 more), and all. 3 rows of 8 heads of 6, two products of two operations a number; 1,000 beside them.
    pairs, pairs_of_rest = 154 + 225 + 820, 20 * 4 + (20 * 4 + 20 * 2) + 20 * 61 // 2
    assert whole.operations == 3 * (40 * 1000 + 4 * 8 * 6 * pairs)
    assert rest.operations == 3 * (20 * 1000 + 4 * 8 * 6 * pairs_of_rest)
    assert "every prompt of 40" in whole.name and "first 20 tokens" in rest.name
    single = dataclasses.replace(question_of().plan, capacity=1)
    (only,) = variants("a prefix cache", dataclasses.replace(question_of(), plan=single))
    assert only.is_planned


def test_shorter_prompts_by_hand():
    own = variants("shorter prompts", question_of())
    slot = PLANNED // 50
    assert [variant.formula_bytes for variant in own] == [50 * slot, 30 * slot, 20 * slot]
    assert [variant.plan.capacity for variant in own if variant.plan] == [40, 20, 10]
    # New tokens keep their slots: of 40 tokens 6 are new, and 17 and 9 of the others stay.
    question = question_of(eviction="snapkv", budget=30)
    question = dataclasses.replace(question, plan=dataclasses.replace(question.plan, num_new=6))
    assert [variant.plan.capacity for variant in variants("shorter prompts", question) if variant.plan] == [40, 23, 15]
    single = dataclasses.replace(question_of().plan, capacity=1)
    (only,) = variants("shorter prompts", dataclasses.replace(question, plan=single))
    assert only.is_planned


@pytest.mark.parametrize("layout", ["auto", "paged"])
def test_lent_slots_by_hand(layout):
    own = variants("continuous batching", question_of(layout=layout, page_len=3 if layout == "paged" else None))
    slot = PLANNED // 50
    # Rings of 4 and 6 slots; 20 tokens in one page of 64, or in 7 of 3. With pages of its own a row has 14 of these.
    sizes = [(10 + 42) * slot, (10 + 21) * slot] if layout == "paged" else [50 * slot, (10 + 64) * slot]
    assert [variant.formula_bytes for variant in own] == sizes == [variant.allocated_bytes for variant in own]


def test_scores_are_not_held_at_once():
    model = config_file.load("smollm2_135m").architecture
    plan = ledger.Plan(
        model=model, cache=config_lib.CacheConfig(), batch_size=2, capacity=4096, compute_dtype="float32"
    )
    question = relief_way.Question(plan=plan, window=10, num_sinks=0, chunk_len=512, operations_a_token=0)
    whole, blocks = variants("attention by blocks", question)
    # 2 rows · 9 heads · 512 queries · 4,096 slots, and 256 slots, in float32.
    assert (whole.formula_bytes, blocks.formula_bytes) == (4 * 2 * 9 * 512 * 4096, 4 * 2 * 9 * 512 * 256)
    assert whole.allocated_bytes is not None and blocks.allocated_bytes is not None
    assert whole.allocated_bytes >= whole.amount
    # Queries and the running output in float32, twice each, and a few blocks of scores; not the matrix.
    assert blocks.allocated_bytes < 4 * 4 * 2 * 9 * 512 * 64 + 4 * blocks.amount < whole.amount


def test_blocks_do_not_grow_with_the_context():
    def temporaries(context: int) -> int:
        plan = dataclasses.replace(question_of(layout="full", compute_dtype="float32").plan, capacity=context)
        return cache_relief.attention_temporaries(plan, "blockwise", 8)

    assert temporaries(2048) == temporaries(512)
