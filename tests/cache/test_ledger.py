"""The ledger's lines beside what is really allocated, what the compiler states, and arithmetic by hand."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdecode import config as config_lib
from jdecode import config_file
from jdecode.cache import allocate, kv_cache, ledger
from jdecode.models import transformer
from jdecode.parallel import mesh as mesh_lib
from tests import tiny_models

MIXED = tiny_models.MIXED
FLOATS = {"float32": 4, "bfloat16": 2, "float16": 2}
B, CAPACITY = 5, 19


def plan_of(model: config_lib.ModelConfig = MIXED, **changes: Any) -> ledger.Plan:
    """Returns a plan of five rows of 19 tokens in bfloat16."""
    names = [field.name for field in dataclasses.fields(config_lib.CacheConfig)]
    cache = {name: changes.pop(name) for name in names if name in changes}
    plan = ledger.Plan(
        model=model,
        cache=config_lib.CacheConfig(**cache),
        batch_size=B,
        capacity=CAPACITY,
        compute_dtype="bfloat16",
    )
    return dataclasses.replace(plan, **changes)


def allocated(plan: ledger.Plan) -> kv_cache.KVCache:
    """Allocates what the plan describes, as a run does."""
    mesh = None if plan.mesh == config_lib.MeshConfig() else mesh_lib.make_mesh(plan.mesh)
    init = functools.partial(allocate.init_compressed, num_new=plan.num_new)
    return (init if plan.is_compressed else allocate.init_cache)(
        plan.model,
        plan.cache,
        batch_size=plan.batch_size,
        capacity=plan.capacity,
        compute_dtype=plan.compute_dtype,
        mesh=mesh,
    )


def argument_bytes(*arguments: Any) -> int:
    """Returns what the compiler states for the arguments of a program, on one device."""
    compiled = jax.jit(lambda *leaves: jnp.int32(0), keep_unused=True).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes


# 2 · 32 layers · 16 requests · 4,096 slots · 8 heads · 128 · 2 bytes = 2^1 · 2^5 · 2^4 · 2^12 · 2^3 · 2^7 · 2^1 = 2^33.
def test_llama3_8b_takes_8_gibibytes():
    model = config_file.load("llama3_8b.yaml").architecture
    own = ledger.ledger(plan_of(model, dtype="bfloat16", batch_size=16, capacity=4096))
    assert own.stored_bytes == own.formula_stored_bytes == 2**33 == 8 * 2**30
    # An int32 position for each of 16 · 4,096 slots, and 16 lengths.
    assert own.num_bytes == own.formula_bytes == 2**33 + 4 * 65_536 + 4 * 16
    keys_and_values, positions, length = own.lines
    assert (keys_and_values.name, keys_and_values.layout) == ("keys and values", "full")
    assert (keys_and_values.num_layers, keys_and_values.num_slots) == (32, 4096)
    assert keys_and_values.formula == "2·32·16·4,096·8·128·2"
    assert (positions.name, positions.formula, positions.num_bytes) == ("positions", "16·4,096·4", 262_144)
    assert (length.name, length.formula, length.num_bytes) == ("length", "16·4", 64)


@pytest.mark.parametrize("dtype", FLOATS)
def test_lines_by_hand(dtype):
    own = ledger.ledger(plan_of(dtype=dtype, slack=1))
    width = FLOATS[dtype]
    # Rings of 4 + 1 and 2 + 4 + 1 slots, and 19 slots; a layer each; 2 heads of 6.
    names = ["ring(window=4, slack=1)", "ring(window=4, slack=1, num_sinks=2)", "full"]
    assert [(line.name, line.layout, line.num_layers, line.num_slots, line.num_bytes) for line in own.lines] == [
        *(
            ("keys and values", name, 1, S, 2 * B * S * 2 * 6 * width)
            for name, S in zip(names, (5, 7, 19), strict=True)
        ),
        *(("positions", name, 0, S, 4 * B * S) for name, S in zip(names, (5, 7, 19), strict=True)),
        ("length", "", 0, 0, 4 * B),
    ]
    assert all(line.formula_bytes == line.num_bytes == line.device_bytes for line in own.lines)


# Pages beside two rings, of the layer without a window: 19 slots are 7 pages of 3, or one of 64.
def test_lines_of_pages_by_hand():
    for page_len, columns, slots in ((3, 7, 21), (None, 1, 64)):
        lines = {line.name: line for line in ledger.ledger(plan_of(layout="paged", page_len=page_len)).lines[-5:]}
        assert (lines["pages"].formula, lines["pages"].num_bytes) == (f"5·{columns}·4", 4 * B * columns)
        assert (lines["shared"].formula, lines["shared"].num_bytes) == ("5·4", 4 * B)
        assert (lines["positions"].layout, lines["positions"].num_bytes) == (
            f"paged(page_len={page_len or 64})",
            4 * B * slots,
        )
        own = ledger.ledger(plan_of(layout="paged", page_len=page_len))
        keys_and_values = own.lines[2]
        assert keys_and_values.formula == f"2·1·5·{slots}·2·6·2"
        assert keys_and_values.num_bytes == keys_and_values.formula_bytes == 2 * B * slots * 2 * 6 * 2


LAYOUTS = [("auto", 0), ("auto", 3), ("full", 0), ("paged", 1)]


@pytest.mark.parametrize(("layout", "slack"), LAYOUTS)
@pytest.mark.parametrize("dtype", [dtype for dtype in config_lib.CACHE_DTYPES if dtype != "auto"])
def test_ledger_is_the_cache_and_the_compiler_s_argument(layout, slack, dtype):
    pages: dict[str, Any] = {}
    if layout == "paged":  # of three tokens, or of two groups of four
        pages = {"page_len": 8, "group_len": 4} if dtype in config_lib.GROUPED_DTYPES else {"page_len": 3}
    plan = plan_of(layout=layout, slack=slack, dtype=dtype, **pages)
    own, cache = ledger.ledger(plan), allocated(plan)
    assert own.num_bytes == own.device_bytes == cache.num_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(cache))
    assert own.num_bytes == argument_bytes(cache)
    # The closed form covers every array of a float cache, and the numbers themselves of any.
    covered = [line for line in own.lines if line.formula_bytes is not None]
    assert [line.formula_bytes for line in covered] == [line.num_bytes for line in covered]
    assert dtype not in FLOATS or len(covered) == len(own.lines)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
@pytest.mark.parametrize("eviction", config_lib.EVICTIONS)
def test_a_cache_that_evicts(eviction, dtype):
    model = dataclasses.replace(MIXED, layers=(*MIXED.layers, *MIXED.layers))
    plan = plan_of(model, dtype=dtype, eviction=eviction, budget=6, num_new=4)
    own, cache = ledger.ledger(plan), allocated(plan)
    assert own.num_bytes == cache.num_bytes == argument_bytes(cache)
    covered = [line for line in own.lines if line.formula_bytes is not None]
    assert [line.formula_bytes for line in covered] == [line.num_bytes for line in covered]
    lasting = eviction == "h2o"
    slots, name = (6, "evicting(budget=6, num_recent=3)") if lasting else (10, "kept(num_kept=6, num_new=4)")
    lines = {line.name: line for line in own.lines if line.layout == name}
    # Two of six layers, each with positions of its own: 2 · 5 rows · slots · 4 bytes.
    assert lines["positions"].num_bytes == 2 * B * slots * 4 and lines["positions"].num_slots == slots
    assert lines["keys and values"].num_layers == 2
    assert ("received" in lines) == lasting
    if lasting:
        assert (lines["received"].formula, lines["received"].num_bytes) == (f"2·5·{slots}·4", 2 * B * slots * 4)
    # A prompt of 15 tokens is read into 15 slots of the same layers, with one table; rings are as they are.
    whole = ledger.ledger(dataclasses.replace(plan, cache=plan.cache.without_eviction(), capacity=15))
    assert ledger.prompt_bytes(plan) == whole.num_bytes > own.num_bytes


def test_a_budget_that_holds_the_text_is_counted_as_none():
    plain = ledger.ledger(plan_of())
    for eviction, budget in (("snapkv", 15), ("h2o", 19)):
        plan = plan_of(eviction=eviction, budget=budget, num_new=4)
        assert ledger.ledger(plan).lines == plain.lines and ledger.prompt_bytes(plan) == plain.num_bytes
        assert plan_of(eviction=eviction, budget=budget - 1, num_new=4).is_compressed


def test_a_cache_that_evicts_on_a_mesh():
    plan = plan_of(eviction="h2o", budget=6, batch_size=4, mesh=config_lib.MeshConfig(data=4, model=2))
    own, cache = ledger.ledger(plan), allocated(plan)
    shard = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(cache))
    assert own.device_bytes == shard == argument_bytes(cache)


# 19 slots are 5 groups of 4, or 3 pages of two.
@pytest.mark.parametrize(("layout", "page_len", "groups"), [("full", None, 5), ("paged", 8, 6)])
def test_lines_of_groups_by_hand(layout, page_len, groups):
    model = dataclasses.replace(MIXED, layers=MIXED.layers[2:] * 3)
    own = ledger.ledger(plan_of(model, layout=layout, dtype="int4", slack=3, group_len=4, page_len=page_len))
    # 2 heads of 6 in one run each; a ring of 4 + (3 + 1) + 3 slots for the latest tokens.
    name, ring, S = f"{layout}(page_len=8)" if page_len else layout, "ring(window=8, slack=3)", 4 * groups
    tables = [("pages", "", 0, 0, 4 * B * 3), ("shared", "", 0, 0, 4 * B)] if page_len else []
    assert [(line.name, line.layout, line.num_layers, line.num_slots, line.num_bytes) for line in own.lines] == [
        ("keys and values", name, 3, S, 3 * B * S * 2 * 6),
        ("keys: scale", name, 3, S, 3 * B * groups * 2 * 6 * 4),
        ("keys: offset", name, 3, S, 3 * B * groups * 2 * 6 * 4),
        ("values: scale", name, 3, S, 3 * B * S * 2 * 2),
        ("values: offset", name, 3, S, 3 * B * S * 2 * 2),
        ("recent keys and recent values", ring, 3, 11, 2 * 3 * B * 11 * 2 * 6 * 2),
        ("positions", name, 0, S, 4 * B * S),
        ("positions", ring, 0, 11, 4 * B * 11),
        ("length", "", 0, 0, 4 * B),
        *tables,
    ]
    formulas = [line.formula for line in own.lines if line.formula is not None]
    assert formulas[:5] == [f"2·3·5·{S}·2·6·4/8", "2·3·5·11·2·6·2", f"5·{S}·4", "5·11·4", "5·4"]
    assert own.stored_bytes == sum(line.num_bytes for line in own.lines[:6])


@pytest.mark.parametrize(("data", "model"), [(2, 4), (8, 1)])
@pytest.mark.parametrize("dtype", config_lib.GROUPED_DTYPES)
def test_bytes_a_device_of_groups(data, model, dtype):
    config = dataclasses.replace(MIXED, num_heads=4, num_kv_heads=4)
    plan = plan_of(config, dtype=dtype, slack=1, batch_size=8, mesh=config_lib.MeshConfig(data=data, model=model))
    own, cache = ledger.ledger(plan), allocated(plan)
    held = [sum(shard.data.nbytes for shard in leaf.addressable_shards[:1]) for leaf in jax.tree.leaves(cache)]
    assert own.device_bytes == sum(held) == argument_bytes(cache)
    # Every row and head has its own scales, so all of them are split as their numbers are.
    tables = sum(line.device_bytes for line in own.lines if not line.is_stored)
    assert own.device_bytes - tables == own.stored_bytes // (data * model)


def test_arguments_of_a_real_step():
    plan = plan_of(slack=1)
    cache, model = allocated(plan), transformer.Transformer(MIXED, dtype="bfloat16")
    params = {"params": tiny_models.random_params(MIXED)}
    tokens_B1 = jnp.ones((B, 1), jnp.int32)
    step = jax.jit(model.apply, donate_argnums=2).lower(params, tokens_B1, cache).compile().memory_analysis()
    alone = jax.jit(model.apply, keep_unused=True).lower(params, tokens_B1).compile().memory_analysis()
    assert step is not None and alone is not None
    assert step.argument_size_in_bytes - alone.argument_size_in_bytes == ledger.ledger(plan).num_bytes
    assert step.alias_size_in_bytes == ledger.ledger(plan).num_bytes  # it comes out where it went in


# Rows and heads that the mesh divides, or does not: 8, 6 and 5 rows; 4, 3 and 8 heads.
MESHES = [(2, 4, 8, 4), (2, 4, 6, 3), (8, 1, 8, 3), (1, 8, 5, 8), (4, 2, 6, 4), (8, 1, 6, 4), (1, 1, 5, 3)]


@pytest.mark.parametrize(("data", "model", "rows", "heads"), MESHES)
@pytest.mark.parametrize("layout", ["auto", "full"])
def test_bytes_a_device(data, model, rows, heads, layout):
    config = dataclasses.replace(MIXED, num_heads=heads, num_kv_heads=heads)
    mesh = config_lib.MeshConfig(data=data, model=model)
    plan = plan_of(config, layout=layout, slack=1, batch_size=rows, mesh=mesh)
    own, cache = ledger.ledger(plan), allocated(plan)
    assert own.num_bytes == cache.num_bytes
    held = [sum(shard.data.nbytes for shard in leaf.addressable_shards[:1]) for leaf in jax.tree.leaves(cache)]
    assert own.device_bytes == sum(held) == argument_bytes(cache)
    # By hand: 2 heads · 6 numbers · 2 bytes for K and V, and a position, a slot; slots 5, 7 and 19, or three times 19.
    slots, tables = ([5, 7, 19], [5, 7, 19]) if layout == "auto" else ([19] * 3, [19])
    own_rows = rows // data if rows % data == 0 else rows
    own_heads = heads // model if heads % model == 0 else heads
    expected = sum(2 * own_rows * S * own_heads * 6 * 2 for S in slots) + 4 * own_rows * (sum(tables) + 1)
    assert own.device_bytes == expected
    split = [axis for axis, of, size in (("data", rows, data), ("model", heads, model)) if of % size == 0 and size > 1]
    assert all(line.split == tuple(split) for line in own.lines if line.is_stored)
    assert all(line.split == tuple(split[:1] if "data" in split else []) for line in own.lines if not line.is_stored)


# Heads of pools are split along `model`; a page may be any row's, so rows cannot be split along `data`.
@pytest.mark.parametrize(("model", "heads"), [(8, 8), (4, 4), (8, 3)])
def test_bytes_a_device_of_pages(model, heads):
    config = dataclasses.replace(MIXED, num_heads=heads, num_kv_heads=heads)
    plan = plan_of(config, layout="paged", page_len=3, mesh=config_lib.MeshConfig(model=model))
    own, cache = ledger.ledger(plan), allocated(plan)
    held = [sum(shard.data.nbytes for shard in leaf.addressable_shards[:1]) for leaf in jax.tree.leaves(cache)]
    assert own.device_bytes == sum(held) == argument_bytes(cache)
    own_heads = heads // model if heads % model == 0 else heads
    slots = 4 + 6 + 21  # rings of 4 and of 2 + 4, and seven pages
    assert own.device_bytes == B * (2 * slots * own_heads * 6 * 2 + 4 * (slots + 7 + 1 + 1))
    groups = plan_of(
        config, layout="paged", dtype="int4", group_len=4, page_len=8, mesh=config_lib.MeshConfig(model=model)
    )
    held = [
        sum(shard.data.nbytes for shard in leaf.addressable_shards[:1]) for leaf in jax.tree.leaves(allocated(groups))
    ]
    # Numbers, scales and offsets of two groups a page are split as the heads are; so are latest tokens.
    assert ledger.ledger(groups).device_bytes == sum(held) == argument_bytes(allocated(groups))
    stored = sum(line.num_bytes for line in ledger.ledger(groups).lines if line.is_stored)
    assert (
        sum(line.device_bytes for line in ledger.ledger(groups).lines if line.is_stored) == stored * own_heads // heads
    )
    with pytest.raises(ValueError, match=r"layout paged: expected a mesh with data=1 .* got data=2; use model"):
        ledger.ledger(dataclasses.replace(plan, mesh=config_lib.MeshConfig(data=2)))


def test_no_device_needs_to_be_there():
    # 4,096 chips, 64 · 64: 128 rows, two a device; 64 heads, one a device.
    config = dataclasses.replace(MIXED, num_heads=64, num_kv_heads=64, layers=MIXED.layers[2:])
    own = ledger.ledger(plan_of(config, batch_size=128, mesh=config_lib.MeshConfig(data=64, model=64)))
    assert own.device_bytes == 2 * 2 * 19 * 1 * 6 * 2 + 4 * 2 * 19 + 4 * 2


# The argument bytes that libtpu 0.0.52 states for TPU v5e, where the loop chooses the order of axes:
# benchmarks/cache_arguments.py --tpu v5e:2x4 --step --config NAME --batch B --context S --kv-dtype DTYPE
@pytest.mark.parametrize(
    ("name", "batch", "context", "dtype", "stated"),
    [
        ("smollm2_135m", 4, 8192, "bfloat16", 1_006_764_544),  # rows of 192 numbers in 256
        ("gqa_small", 3, 1000, "bfloat16", 4_921_856),  # rows of 64 in 128
        ("gqa_small", 1, 1024, "float32", 3_347_456),
        ("gemma3_270m", 4, 8192, "bfloat16", 132_260_352),  # rows of 256: only the lengths are padded
        ("llama3_8b", 1, 4096, "bfloat16", 536_887_808),
    ],
)
def test_tiles_of_a_tpu(name, batch, context, dtype, stated):
    model = config_file.load(name).architecture
    own = ledger.ledger(plan_of(model, dtype=dtype, batch_size=batch, capacity=context))
    assert own.tiled_bytes == stated >= own.device_bytes


@pytest.mark.parametrize("data", [1, 4])
def test_most_rows(data):
    plan = plan_of(slack=1, mesh=config_lib.MeshConfig(data=data))
    # Of one row: slots 5, 7, 19 with 2 · 2 · 6 · 2 bytes of keys and values and a position each, and a length.
    row = 31 * (48 + 4) + 4
    for num_rows in (1, 2, 3, 7, 100):
        assert ledger.most_rows(plan, num_rows * row) == num_rows * data
        assert ledger.most_rows(plan, num_rows * row - 1) == (num_rows - 1) * data
    assert ledger.most_rows(plan, 0) == 0
    # Padded to tiles, a row of 12 numbers takes 128, 5 and 7 and 19 slots take 8, 8 and 24, a table 128 numbers.
    tiled = 2 * 40 * 128 * 2 + 3 * 128 * 4 + 128 * 4
    assert ledger.most_rows(plan, tiled, is_tiled=True) == data
    assert ledger.most_rows(plan, tiled - 1, is_tiled=True) == 0


def test_counts_under_one_are_refused():
    with pytest.raises(ValueError, match="capacity: expected a count of at least 1, got 0"):
        ledger.ledger(plan_of(capacity=0))


def test_bits_of_a_number():
    bits = {"float32": 32, "bfloat16": 16, "float16": 16, "int8": 8, "fp8": 8, "int4": 4, "float8_e4m3fn": 8}
    assert {name: ledger.number_bits(name) for name in bits} == bits
    with pytest.raises(ValueError, match="bfloat16, got 'auto'"):
        ledger.number_bits("auto")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfRows:
    """Rows of 4-bit codes, two a byte, with a scale a head: a codec that the ledger has never heard of."""

    scale_BSK: jax.Array
    code_BSX: jax.Array


@dataclasses.dataclass(frozen=True, kw_only=True)
class StripedLayout:
    """A layout that the ledger has never heard of."""

    capacity: int
    stripe_len: int
    max_len: int | None = None


@pytest.fixture
def foreign_cache(monkeypatch: pytest.MonkeyPatch):
    """Every cache is one of two layers, with a table beside its rows; plans of the real ones are forgotten."""

    def init_cache(model, cache_config, *, batch_size, capacity, compute_dtype, mesh, num_pages, platform):
        del cache_config, compute_dtype, mesh, num_pages, platform
        own: Any = StripedLayout(capacity=capacity, stripe_len=4)
        K, H = model.num_kv_heads, model.head_dim

        def rows() -> Any:
            scale_BSK = jnp.ones((batch_size, capacity, K), jnp.float16)
            return HalfRows(scale_BSK=scale_BSK, code_BSX=jnp.zeros((batch_size, capacity, K * H // 2), jnp.uint8))

        return kv_cache.KVCache(
            stores=tuple(kv_cache.LayerStore(keys=rows(), values=rows()) for _ in range(2)),
            positions=(jnp.zeros((batch_size, capacity), jnp.int32),),
            length_B=jnp.zeros(batch_size, jnp.int32),
            layouts=(own,),
            layout_idx=(0, 0),
            codec=None,  # pyright: ignore[reportArgumentType]
        )

    monkeypatch.setattr(allocate, "init_cache", init_cache)
    ledger.abstract_cache.cache_clear()
    yield
    ledger.abstract_cache.cache_clear()


def test_codec_and_layout_of_others_need_no_word_here(foreign_cache):
    own = ledger.ledger(plan_of(compute_dtype="int4"))
    layout = "striped(stripe_len=4)"
    found = [(line.name, line.layout, line.num_layers, line.num_bytes, line.formula_bytes) for line in own.lines]
    assert found == [
        ("keys and values: scale", layout, 2, 2 * 2 * B * CAPACITY * 2 * 2, None),
        ("keys and values", layout, 2, 2 * 2 * B * CAPACITY * 2 * 6 // 2, 2 * 2 * B * CAPACITY * 2 * 6 // 2),
        ("positions", layout, 0, 4 * B * CAPACITY, 4 * B * CAPACITY),
        ("length", "", 0, 4 * B, 4 * B),
    ]
    assert own.lines[1].formula == "2·2·5·19·2·6·4/8"
    assert own.stored_bytes == own.lines[0].num_bytes + own.lines[1].num_bytes
    assert own.formula_bytes == own.num_bytes - own.lines[0].num_bytes
