"""Ways to make a cache smaller, side by side for one model: what each shrinks, by how much, and what it costs.

``WAYS`` is the table: a way is one entry. Its variants are other plans for the ledger, or other programs for the
compiler, so each has the bytes that a formula predicts and those that would really be allocated.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import streaming
from jdecode.attention import blockwise, segment, select
from jdecode.cache import kv_cache
from jdecode.cache import ledger as ledger_lib
from jdecode.weights import head_pooling

SCORE_BYTES = 4
"""Of a float32 score."""

NUM_SAMPLES = 4
"""Of a prompt, in the what-if of pages that rows share."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What the ways are asked about.

    Attributes:
      plan: the cache as it is planned; what factors are relative to.
      window: W of the what-if of a window on every full layer, in tokens.
      num_sinks: of the same.
      chunk_len: T, tokens of a prefill's chunk.
    """

    plan: ledger_lib.Plan
    window: int
    num_sinks: int
    chunk_len: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One choice of a way.

    Attributes:
      name: of the choice.
      formula_bytes: by the way's formula.
      allocated_bytes: of the traced cache's keys and values, or of the compiled program's temporaries.
      is_planned: whether the plan has it so.
      plan: the plan with this choice, where it is one of the cache.
    """

    name: str
    formula_bytes: int
    allocated_bytes: int
    is_planned: bool
    plan: ledger_lib.Plan | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to need less memory.

    Attributes:
      name: of the way.
      shrinks: what becomes smaller.
      formula: of the bytes, in the letters of ``jdecode.shapes``; b is the bytes of a number.
      costs: in quality or speed.
      suits: where it fits.
      variants: its choices for a plan.
    """

    name: str
    shrinks: str
    formula: str
    costs: str
    suits: str
    variants: Callable[[Question], list[Variant]]


def _cache_variant(question: Question, name: str, plan: ledger_lib.Plan) -> Variant:
    own = ledger_lib.ledger(plan)
    return Variant(
        name=name,
        formula_bytes=own.formula_stored_bytes,
        allocated_bytes=own.stored_bytes,
        is_planned=plan == question.plan,
        plan=plan,
    )


def _heads(question: Question) -> list[Variant]:
    model = question.plan.model
    pooled = [count for count in range(model.num_kv_heads, 0, -1) if model.num_kv_heads % count == 0]
    names = {model.num_heads: "multi-head", 1: "multi-query"}
    variants = []
    for count in dict.fromkeys([model.num_heads, *pooled]):
        if count > model.num_kv_heads:
            fewer = dataclasses.replace(model, num_kv_heads=count)
        else:
            fewer = head_pooling.pooled_config(model, count)
        words = f"{count} head{'s'[: count > 1]}, {names.get(count, 'grouped-query')}"
        variants.append(_cache_variant(question, words, dataclasses.replace(question.plan, model=fewer)))
    return variants


def _dtypes(question: Question) -> list[Variant]:
    plan = question.plan
    variants = []
    for dtype in config_lib.CACHE_DTYPES:
        is_by_group = dtype in config_lib.GROUPED_DTYPES
        if dtype == "auto" or (is_by_group and plan.cache.eviction is not None):  # groups are not evicted from
            continue
        cache = plan.cache  # named as the plan names it, where it is the planned one, which so compares equal
        if dtype != plan.dtype:
            group_len = cache.group_len if is_by_group else config_lib.GROUP_LEN
            page_len = None if is_by_group and (cache.page_len or 0) % group_len else cache.page_len
            cache = dataclasses.replace(cache, dtype=dtype, group_len=group_len, page_len=page_len)
        variants.append(_cache_variant(question, dtype, dataclasses.replace(plan, cache=cache)))
    return sorted(variants, key=lambda variant: -variant.formula_bytes)


def _windows(question: Question) -> list[Variant]:
    plan = question.plan
    every = dataclasses.replace(plan.cache.without_eviction(), layout="full", page_len=None)
    every, ring = dataclasses.replace(plan, cache=every), plan
    if plan.cache.layout == "full":
        ring = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, layout="auto"))
    with_window = sum(layer.window is not None for layer in plan.model.layers)
    if not with_window:
        variants = [_cache_variant(question, "every slot", plan)]
    else:
        own = f"rings where the model has windows, {with_window} of {plan.model.num_layers} layers"
        variants = [
            _cache_variant(question, "every slot, windows as masks", every),
            _cache_variant(question, own, ring),
        ]
    if with_window < plan.model.num_layers:
        sinks = f" and {question.num_sinks} sinks" if question.num_sinks else ""
        asked = config_lib.StreamingConfig(window=question.window, num_sinks=question.num_sinks)
        model = streaming.with_window(plan.model, asked)
        which = "the others" if with_window else "every layer"
        name = f"what if {which} had a window of {question.window:,}{sinks}"
        variants.append(_cache_variant(question, name, dataclasses.replace(ring, model=model)))
    return variants


def _pages(question: Question) -> list[Variant]:
    plan, count = question.plan, NUM_SAMPLES
    own = paged = plan
    if plan.cache.layout == "paged":
        own = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, layout="auto", page_len=None))
    else:
        paged = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache.without_eviction(), layout="paged"))
    variants = [_cache_variant(question, "every row its own slots", own)]
    if plan.mesh.data > 1:  # rows that are split over devices have no common pool
        return variants
    cache = ledger_lib.abstract_cache(paged)
    layout = cache.paged_layout
    if layout is None:
        return variants
    variants.append(_cache_variant(question, f"pages of {layout.page_len}, and rings for windows", paged))
    prompt_len = plan.capacity // 2
    samples = f"what if {count} samples a prompt of {prompt_len:,}"
    many = dataclasses.replace(own, batch_size=count * own.batch_size)
    whole = dataclasses.replace(_cache_variant(question, f"{samples}: own slots", many), plan=None)
    # A prompt's full pages once, and for each sample the columns after them.
    num_full = int(cache.codec.stored_len(jnp.int32(prompt_len))) // layout.page_len
    num_pages = plan.batch_size * (num_full + count * (layout.num_columns - num_full))
    many = dataclasses.replace(paged, batch_size=count * paged.batch_size)
    in_pages = sum(
        line.formula_bytes or 0
        for line in ledger_lib.ledger(many).lines
        if line.is_stored and line.layout == ledger_lib.layout_name(layout)
    )
    rest = ledger_lib.ledger(many).formula_stored_bytes - in_pages
    stores = ledger_lib.abstract_cache(many, num_pages).stores
    shared = Variant(
        name=f"{samples}: shared pages",
        formula_bytes=rest + in_pages * num_pages // (many.batch_size * layout.num_columns),
        allocated_bytes=sum(map(ledger_lib.leaf_bytes, jax.tree.leaves(stores))),
        is_planned=False,
    )
    return [*variants, whole, shared]


def _evictions(question: Question) -> list[Variant]:
    plan = question.plan
    budget = plan.cache.budget or max(plan.capacity // 4, 2)
    variants = [_cache_variant(question, "every token", dataclasses.replace(plan, cache=plan.cache.without_eviction()))]
    if plan.cache.dtype in config_lib.GROUPED_DTYPES:
        return variants
    for eviction in config_lib.EVICTIONS:
        kept = dataclasses.replace(plan.cache, layout="auto", page_len=None, budget=budget, eviction=eviction)
        # A prompt and, unless the plan says otherwise, as many new tokens as an eighth of the context.
        is_planned = eviction == plan.cache.eviction
        num_new = plan.num_new if is_planned else plan.num_new or max(plan.capacity // 8, 1)
        words = (
            f"{budget:,} tokens in all" if eviction == "h2o" else f"{budget:,} of the prompt and {num_new:,} new tokens"
        )
        variants.append(
            _cache_variant(question, f"{eviction}: {words}", dataclasses.replace(plan, cache=kept, num_new=num_new))
        )
    return variants


def _attention(question: Question) -> list[Variant]:
    # Of a prefill, which reads a prompt before anything is evicted.
    plan = dataclasses.replace(question.plan, cache=question.plan.cache.without_eviction())
    cache = ledger_lib.abstract_cache(plan)
    num_slots = max(cache.layouts[idx].capacity for idx in cache.layout_idx)
    T = min(question.chunk_len, plan.capacity)
    pairs = plan.batch_size * plan.model.num_heads * T
    lengths = {"reference": num_slots, "blockwise": min(blockwise.BLOCK_SIZE, num_slots)}
    names = {
        "reference": f"the whole matrix, {T:,} x {num_slots:,}",
        "blockwise": f"blockwise, {T:,} x {lengths['blockwise']:,} at a time",
    }
    return [
        Variant(
            name=names[backend],
            formula_bytes=SCORE_BYTES * pairs * length,
            allocated_bytes=attention_temporaries(plan, backend, T),
            is_planned=backend == "blockwise",  # what "auto" is
        )
        for backend, length in lengths.items()
    ]


def attention_temporaries(plan: ledger_lib.Plan, backend: str, block_len: int) -> int:
    """Compiles attention over the layer with the most slots for this machine, and returns its temporary bytes.

    Nothing is allocated and nothing runs.

    Args:
      plan: of the cache that it reads, as if on one device.
      backend: see ``attention.select``.
      block_len: T, tokens of the block whose queries attend.
    """
    cache = ledger_lib.abstract_cache(dataclasses.replace(plan, mesh=config_lib.MeshConfig()))
    idx = max(cache.layout_idx, key=lambda idx: cache.layouts[idx].capacity)
    layer_idx, model, B = cache.layout_idx.index(idx), plan.model, plan.batch_size

    def attend(q_BTNH: jax.Array, query_position_BT: jax.Array, cache: kv_cache.KVCache):
        own = cache.stores[layer_idx]
        seen = segment.Segment(
            keys=cache.rows(idx, own.keys),
            values=cache.rows(idx, own.values),
            position_BS=cache.positions[idx],
            first_slot=jnp.int32(0),
            end_slot=query_position_BT.max() + 1,
        )
        return select.backend(backend)(q_BTNH, query_position_BT, [seen], scale=model.attention_scale)

    q_BTNH = jax.ShapeDtypeStruct((B, block_len, model.num_heads, model.head_dim), plan.compute_dtype)
    query_position_BT = jax.ShapeDtypeStruct((B, block_len), jnp.int32)
    memory = jax.jit(attend).lower(q_BTNH, query_position_BT, cache).compile().memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes


WAYS: tuple[Way, ...] = (
    Way(
        name="fewer key/value heads",
        shrinks="K: every layer, every slot",
        formula="2·L·B·S·K·H·b, linear in K",
        costs="quality, until the converted model is trained on (python -m jdecode.convert ... --kv-heads N)",
        suits="every layout and dtype; heads are split over a mesh only while its axis divides them",
        variants=_heads,
    ),
    Way(
        name="a narrower dtype",
        shrinks="b: every number",
        formula="2·L·B·S·K·H·b, linear in b",
        costs="rounding of keys and values: bfloat16 keeps 8 bits of a number, float16 11 but no number over 65,504; "
        "mean KL to float32 in nats, SmolLM2-135M / Gemma 3 270M: bfloat16 6e-5 / 4e-5, int8 4e-4 / 1e-3, fp8 "
        "7e-3 / 1.2e-2, and, with the latest tokens exact, int8_channel 5e-5 / 4e-5, int4 4e-3 / 3e-3 (pieces of 512)",
        suits="every layout; int8_channel and int4 not beside an eviction, and in pages of whole groups; --kv-dtype",
        variants=_dtypes,
    ),
    Way(
        name="windows in rings",
        shrinks="S of a layer with a window, to its window, sinks and slack",
        formula="2·B·K·H·b·(sum over layers of min(S, W + sinks + slack))",
        costs="none where the model was trained with windows; elsewhere it forgets what the window has left, and sinks "
        "only keep the text fluent (Xiao et al. 2024): perplexity of SmolLM2-135M over 10,000 tokens, window and sinks "
        "of 1,024, at most 1.1 times that with every key; without sinks about 1.8 (docs/streaming.md)",
        suits="long texts; --window W --sinks N plans it, and the same flags of jdecode.generate run it",
        variants=_windows,
    ),
    Way(
        name="pages that rows share",
        shrinks="rows with a common beginning: its full pages are held once, and a copy of none is made",
        formula="2·L·Z·K·H·b a page; N samples of a prompt with F full pages, of C: F + N·(C - F) pages",
        costs="none in quality: the same numbers, found by a table of 4 bytes a column; the last is full in part, "
        "and int8_channel and int4 share settled groups alone",
        suits="num_samples, prompts with one beginning; full layers, on a mesh without a data axis; layout: paged",
        variants=_pages,
    ),
    Way(
        name="tokens evicted by attention",
        shrinks="S of a layer without a window: to a budget of the prompt and the new tokens (snapkv), or in all (h2o)",
        formula="2·B·K·H·b·(sum over layers without a window of M + new tokens, or of M), and positions a layer",
        costs="what is evicted is forgotten; a prompt needs the whole cache first, h2o looks at the keys twice a step",
        suits="long prompts, of which the question at the end tells what matters; no draft with h2o",
        variants=_evictions,
    ),
    Way(
        name="attention by blocks",
        shrinks="temporaries of a prefill's chunk: scores of T queries and S slots, one layer at a time",
        formula="scores alone: 4·B·N·T·S, by blocks of C slots 4·B·N·T·C (Dao et al. 2022); the compiler's temporaries "
        "hold the queries and the sum of the output too",
        costs="none in quality; a loop over blocks, which reads no slots beyond those held",
        suits="always: it is what a model uses unless told otherwise",
        variants=_attention,
    ),
)
"""All ways, in the order in which they are shown."""


def answers(question: Question) -> list[tuple[Way, list[Variant]]]:
    """Asks every way."""
    return [(way, way.variants(question)) for way in WAYS]
