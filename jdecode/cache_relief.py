"""Ways to make a cache smaller, side by side for one model: what each shrinks, by how much, and what it costs.

``WAYS`` is the table: a way is one entry. Its variants are other plans for the ledger, or other programs for the
compiler, so each has the bytes that a formula predicts and those that would really be allocated. A way that saves work,
and not memory, has operations instead.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import prompt_relief, relief_way, streaming
from jdecode.attention import blockwise, segment, select
from jdecode.cache import kv_cache
from jdecode.cache import ledger as ledger_lib
from jdecode.weights import head_pooling

SCORE_BYTES = 4
"""Of a float32 score."""

NUM_SAMPLES = 4
"""Of a prompt, in the what-if of pages that rows share."""


def _heads(question: relief_way.Question) -> list[relief_way.Variant]:
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
        variants.append(relief_way.cache_variant(question, words, dataclasses.replace(question.plan, model=fewer)))
    return variants


def _dtypes(question: relief_way.Question) -> list[relief_way.Variant]:
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
        variants.append(relief_way.cache_variant(question, dtype, dataclasses.replace(plan, cache=cache)))
    return sorted(variants, key=lambda variant: -variant.amount)


def _windows(question: relief_way.Question) -> list[relief_way.Variant]:
    plan = question.plan
    every = dataclasses.replace(plan.cache.without_eviction(), layout="full", page_len=None)
    every, ring = dataclasses.replace(plan, cache=every), plan
    if plan.cache.layout == "full":
        ring = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, layout="auto"))
    with_window = sum(layer.window is not None for layer in plan.model.layers)
    if not with_window:
        variants = [relief_way.cache_variant(question, "every slot", plan)]
    else:
        own = f"rings where the model has windows, {with_window} of {plan.model.num_layers} layers"
        variants = [
            relief_way.cache_variant(question, "every slot, windows as masks", every),
            relief_way.cache_variant(question, own, ring),
        ]
    if with_window < plan.model.num_layers:
        sinks = f" and {question.num_sinks} sinks" if question.num_sinks else ""
        asked = config_lib.StreamingConfig(window=question.window, num_sinks=question.num_sinks)
        model = streaming.with_window(plan.model, asked)
        which = "the others" if with_window else "every layer"
        name = f"what if {which} had a window of {question.window:,}{sinks}"
        variants.append(relief_way.cache_variant(question, name, dataclasses.replace(ring, model=model)))
    return variants


def _with_pages(plan: ledger_lib.Plan) -> ledger_lib.Plan | None:
    """Returns the plan with pages; ``None`` where it can have none."""
    if plan.mesh.data > 1:  # rows that are split over devices have no common pool
        return None
    if plan.cache.layout != "paged":
        plan = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache.without_eviction(), layout="paged"))
    return plan if ledger_lib.abstract_cache(plan).paged_layout is not None else None


def _pages(question: relief_way.Question) -> list[relief_way.Variant]:
    plan, count = question.plan, NUM_SAMPLES
    own, paged = plan, _with_pages(plan)
    if plan.cache.layout == "paged":
        own = dataclasses.replace(plan, cache=dataclasses.replace(plan.cache, layout="auto", page_len=None))
    variants = [relief_way.cache_variant(question, "every row its own slots", own)]
    if paged is None:
        return variants
    cache = ledger_lib.abstract_cache(paged)
    layout = cache.paged_layout
    assert layout is not None
    variants.append(relief_way.cache_variant(question, f"pages of {layout.page_len}, and rings for windows", paged))
    prompt_len = plan.capacity // 2
    samples = f"what if {count} samples a prompt of {prompt_len:,}"
    many = dataclasses.replace(own, batch_size=count * own.batch_size)
    whole = dataclasses.replace(relief_way.cache_variant(question, f"{samples}: own slots", many), plan=None)
    # A prompt's full pages once, and for each sample the columns after them.
    num_full = int(cache.codec.stored_len(jnp.int32(prompt_len))) // layout.page_len
    num_pages = plan.batch_size * (num_full + count * (layout.num_columns - num_full))
    many = dataclasses.replace(paged, batch_size=count * paged.batch_size)
    return [*variants, whole, relief_way.pool_variant(f"{samples}: shared pages", many, num_pages)]


def _lent_slots(question: relief_way.Question) -> list[relief_way.Variant]:
    return prompt_relief.lent_slots(question, _with_pages(question.plan))


def _evictions(question: relief_way.Question) -> list[relief_way.Variant]:
    plan = question.plan
    budget = plan.cache.budget or max(plan.capacity // 4, 2)
    variants = [
        relief_way.cache_variant(
            question, "every token", dataclasses.replace(plan, cache=plan.cache.without_eviction())
        )
    ]
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
            relief_way.cache_variant(
                question, f"{eviction}: {words}", dataclasses.replace(plan, cache=kept, num_new=num_new)
            )
        )
    return variants


def _attention(question: relief_way.Question) -> list[relief_way.Variant]:
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
        relief_way.Variant(
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


WAYS: tuple[relief_way.Way, ...] = (
    relief_way.Way(
        name="fewer key/value heads",
        shrinks="K: every layer, every slot",
        formula="2·L·B·S·K·H·b, linear in K",
        costs="quality, until the converted model is trained on (python -m jdecode.convert ... --kv-heads N)",
        suits="every layout and dtype; heads are split over a mesh only while its axis divides them",
        variants=_heads,
    ),
    relief_way.Way(
        name="a narrower dtype",
        shrinks="b: every number",
        formula="2·L·B·S·K·H·b, linear in b",
        costs="rounding of keys and values: bfloat16 keeps 8 bits of a number, float16 11 but no number over 65,504; "
        "mean KL to float32 in nats, SmolLM2-135M / Gemma 3 270M: bfloat16 6e-5 / 4e-5, int8 4e-4 / 1e-3, fp8 "
        "7e-3 / 1.2e-2, and, with the latest tokens exact, int8_channel 5e-5 / 4e-5, int4 4e-3 / 3e-3 (pieces of 512)",
        suits="every layout; int8_channel and int4 not beside an eviction, and in pages of whole groups; --kv-dtype",
        variants=_dtypes,
    ),
    relief_way.Way(
        name="windows in rings",
        shrinks="S of a layer with a window, to its window, sinks and slack",
        formula="2·B·K·H·b·(sum over layers of min(S, W + sinks + slack))",
        costs="none where the model was trained with windows; elsewhere it forgets what the window has left, and sinks "
        "only keep the text fluent (Xiao et al. 2024): perplexity of SmolLM2-135M over 10,000 tokens, window and sinks "
        "of 1,024, at most 1.1 times that with every key; without sinks about 1.8 (docs/streaming.md)",
        suits="long texts; --window W --sinks N plans it, and the same flags of jdecode.generate run it",
        variants=_windows,
    ),
    relief_way.Way(
        name="pages that rows share",
        shrinks="rows with a common beginning: its full pages are held once, and a copy of none is made",
        formula="2·L·Z·K·H·b a page; N samples of a prompt with F full pages, of C: F + N·(C - F) pages",
        costs="none in quality: the same numbers, found by a table of 4 bytes a column; the last is full in part, "
        "and int8_channel and int4 share settled groups alone",
        suits="num_samples, prompts with one beginning; full layers, on a mesh without a data axis; layout: paged",
        variants=_pages,
    ),
    relief_way.Way(
        name="a prefix cache",
        shrinks="a prefill, of prompts that begin as one before them did: only what is new of them is read",
        formula="operations: tokens that are read times 2·(weights of a token), and attention's 4·N·H a pair of query "
        "and key; a page of Z tokens that is held takes 2·L·Z·K·H·b",
        costs="none in quality: the same tokens; memory for what is held, and a copy of it into each request's cache. "
        "SmolLM2-135M, 20 prompts of 624 tokens that share 600: 0.12 of the time (benchmarks/prefix_cache.py)",
        suits="one system prompt, few-shot examples, a conversation sent anew; full layers and rings; "
        "lm.init_prefix_cache, --prefix-cache FOLDER",
        variants=prompt_relief.prefix_cache,
    ),
    relief_way.Way(
        name="tokens evicted by attention",
        shrinks="S of a layer without a window: to a budget of the prompt and the new tokens (snapkv), or in all (h2o)",
        formula="2·B·K·H·b·(sum over layers without a window of M + new tokens, or of M), and positions a layer",
        costs="what is evicted is forgotten; a prompt needs the whole cache first, h2o looks at the keys twice a step",
        suits="long prompts, of which the question at the end tells what matters; no draft with h2o",
        variants=_evictions,
    ),
    relief_way.Way(
        name="shorter prompts",
        shrinks="S: what a model finds most predictable of a prompt, or least told by a question, is left out",
        formula="2·L·B·S·K·H·b, linear in S; a prefill's attention quadratic",
        costs="what is left out is not read, and a model has to score the prompt first; answers to ten questions, mean "
        "log-likelihood in nats, SmolLM2-135M: whole -0.6, half of it by a question -0.7, without one -9.9, the latest "
        "half -11.6 (docs/compression.md)",
        suits="long texts with a question that is known; jdecode.compress_prompt, --prompt-budget",
        variants=prompt_relief.shorter_prompts,
    ),
    relief_way.Way(
        name="continuous batching",
        shrinks="slots that no token holds: requests take pages as they grow and give them back at their end",
        formula="2·L·Z·K·H·b a page; in pages what is held, rounded up to Z a request; otherwise B·S slots",
        costs="none in quality; tables, and a host that admits and ends requests: pages and their accounts are here, "
        "such a scheduler is not in this version",
        suits="many requests of lengths that nobody knows before; full layers, on a mesh without a data axis",
        variants=_lent_slots,
    ),
    relief_way.Way(
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


def answers(question: relief_way.Question) -> list[tuple[relief_way.Way, list[relief_way.Variant]]]:
    """Asks every way."""
    return [(way, way.variants(question)) for way in WAYS]
