"""The figures of ``python -m jdecode.ledger``: a plan in, one report of plain values out. No arrays are made."""

import dataclasses
from typing import Any

import jax

from jdecode import cache_plan, cache_relief, language_model, relief_way, step_cost
from jdecode.cache import attention_work, layout_ring
from jdecode.cache import ledger as ledger_lib
from jdecode.decode import prefill
from jdecode.models import weight_bytes
from jdecode.parallel import known_devices


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What somebody wants to know.

    Attributes:
      name: of the model.
      plan: the cache, with the model as the what-if has it; ``plan.compute_dtype`` is the weights' own.
      memory: of one device, or ``None``.
      window: W of the what-if in the plan, ``None`` for none.
      num_sinks: of the same; ``None`` where nobody said.
      compare: whether to ask for the ways to need less.
    """

    name: str
    plan: ledger_lib.Plan
    memory: known_devices.Memory | None = None
    window: int | None = None
    num_sinks: int | None = None
    compare: bool = False


COMPARED_SINKS = 4
"""Sinks of the what-if that ``compare`` makes by itself: as many as Xiao et al. (2024) keep."""


def figures(question: Question) -> dict[str, Any]:
    """Answers a question.

    Returns:
      Plain values that JSON can hold; sizes in bytes, operations as multiplications and additions.

    Raises:
      ValueError: a size is under 1, or the memory does not even hold the weights.
    """
    plan, model = question.plan, question.plan.model
    own = ledger_lib.ledger(plan)
    weights = weight_bytes.weights(model, plan.compute_dtype, plan.mesh)
    memory = None if question.memory is None else _memory(question.memory, plan, own, weights)
    return {
        "name": question.name,
        "model": {
            "num_layers": model.num_layers,
            "num_heads": model.num_heads,
            "num_kv_heads": model.num_kv_heads,
            "head_dim": model.head_dim,
            "max_positions": model.max_positions,
        },
        "batch": plan.batch_size,
        "context": plan.capacity,
        "layout": plan.cache.layout,
        "slack": plan.cache.slack,
        "eviction": plan.cache.eviction,
        "budget": plan.cache.budget,
        "new_tokens": plan.num_new if plan.cache.eviction is not None else None,
        "window": question.window,
        "sinks": question.num_sinks if question.window is not None else None,
        "kv_dtype": plan.dtype,
        "weight_dtype": plan.compute_dtype,
        "mesh": dataclasses.asdict(plan.mesh),
        "lines": [_line(line, plan.batch_size) for line in own.lines],
        "cache": {
            "bytes": own.num_bytes,
            "formula_bytes": own.formula_bytes,
            "kv_bytes": own.stored_bytes,
            "kv_formula_bytes": own.formula_stored_bytes,
            "bytes_a_request": _share(own.num_bytes, plan.batch_size),
            "device_bytes": own.device_bytes,
            "tpu_device_bytes": own.tiled_bytes,
            "prompt_bytes": ledger_lib.prompt_bytes(plan),
        },
        "weights": {
            "parameters": weights.num_parameters,
            "bytes": weights.num_bytes,
            "device_bytes": weights.device_bytes,
            "operations_a_token": step_cost.operations_a_token(model),
        },
        "memory": memory,
        "growth": [_growth(plan, context) for context in _contexts(plan.capacity)],
        "prefill_chunk": prefill.CHUNK_LEN,
        "compare": _compare(question) if question.compare else None,
        "notes": _notes(question, own),
    }


def _share(total: int, parts: int) -> int | float:
    return total // parts if total % parts == 0 else total / parts


def _line(line: ledger_lib.Line, batch_size: int) -> dict[str, Any]:
    a_token = _share(line.num_bytes, batch_size * line.num_slots) if line.num_slots else None
    return {
        "name": line.name,
        "layout": line.layout,
        "layers": line.num_layers,
        "slots": line.num_slots,
        "bytes_a_token": a_token,
        "bytes_a_request": _share(line.num_bytes, batch_size),
        "bytes": line.num_bytes,
        "formula": line.formula,
        "formula_bytes": line.formula_bytes,
        "device_bytes": line.device_bytes,
        "tpu_device_bytes": line.tiled_bytes,
        "split": list(line.split),
    }


def _memory(
    memory: known_devices.Memory, plan: ledger_lib.Plan, own: ledger_lib.Ledger, weights: weight_bytes.Weights
) -> dict[str, Any]:
    left = memory.num_bytes - weights.device_bytes
    if left < 0:
        size = known_devices.size_text
        raise ValueError(
            f"--memory {memory.name}: expected at least {size(weights.device_bytes)} a device for the weights in "
            f"{plan.compute_dtype}, got {size(memory.num_bytes)}; give a larger --memory, a narrower --weight-dtype or "
            "more devices along model in --mesh"
        )
    is_tpu = memory.platform == "tpu"
    return {
        "name": memory.name,
        "bytes": memory.num_bytes,
        "left_bytes": left,
        "requests": ledger_lib.most_rows(plan, left, is_tiled=is_tpu),
        "fits": (own.tiled_bytes if is_tpu else own.device_bytes) <= left,
    }


def _contexts(context: int) -> list[int]:
    return list(dict.fromkeys([max(context // 2, 1), context, 2 * context]))


def _growth(plan: ledger_lib.Plan, context: int) -> dict[str, Any]:
    own = dataclasses.replace(plan, capacity=context)
    twice = dataclasses.replace(own, batch_size=2 * plan.batch_size)
    return {
        "context": context,
        "bytes": ledger_lib.ledger(own).num_bytes,
        "bytes_of_twice_the_batch": ledger_lib.ledger(twice).num_bytes,
        "decode_step": dataclasses.asdict(attention_work.decode_step(own)),
        "prefill": dataclasses.asdict(attention_work.prefill(own, prefill.CHUNK_LEN)),
    }


def _compare(question: Question) -> list[dict[str, Any]]:
    sinks = COMPARED_SINKS if question.num_sinks is None else question.num_sinks
    asked = relief_way.Question(
        plan=question.plan,
        window=question.window or max(question.plan.capacity // 4, 1),
        num_sinks=sinks,
        chunk_len=prefill.CHUNK_LEN,
        operations_a_token=step_cost.operations_a_token(question.plan.model),
    )
    return [_way(question, way, variants) for way, variants in cache_relief.answers(asked)]


def _way(question: Question, way: relief_way.Way, variants: list[relief_way.Variant]) -> dict[str, Any]:
    planned = next(variant for variant in variants if variant.is_planned)
    words = ("name", "shrinks", "formula", "costs", "suits")
    return {
        **{word: getattr(way, word) for word in words},
        "variants": [
            {
                "name": variant.name,
                "is_planned": variant.is_planned,
                "formula_bytes": variant.formula_bytes,
                "allocated_bytes": variant.allocated_bytes,
                "operations": variant.operations,
                "factor": planned.amount / variant.amount,
                "requests": _requests(question, variant),
            }
            for variant in variants
        ],
    }


def _requests(question: Question, variant: relief_way.Variant) -> int | None:
    """Returns how many requests fit with a variant, ``None`` where that is no question."""
    if question.memory is None or variant.plan is None:
        return None
    plan = variant.plan
    left = question.memory.num_bytes - weight_bytes.weights(plan.model, plan.compute_dtype, plan.mesh).device_bytes
    return ledger_lib.most_rows(plan, left, is_tiled=question.memory.platform == "tpu")


def _notes(question: Question, own: ledger_lib.Ledger) -> list[str]:
    plan, model, cache = question.plan, question.plan.model, ledger_lib.abstract_cache(question.plan)
    notes = []
    if plan.capacity > model.max_positions:
        notes.append(
            f"context: {plan.capacity:,} tokens are more than the {model.max_positions:,} that the model was trained "
            "for; the ledger counts them all the same"
        )
    if plan.cache.eviction is not None:
        notes.append(_eviction_note(plan, own))
    if any(isinstance(layout, layout_ring.RingLayout) for layout in cache.layouts):
        notes.append("ring: its slots are used again, so past them a token costs nothing there")
    with_window = [idx for layer, idx in zip(model.layers, cache.layout_idx, strict=True) if layer.window is not None]
    if question.window is not None and any(cache.layouts[idx].max_len is not None for idx in with_window):
        notes.append(
            f"--window {question.window}: where a ring of window, sinks and slack is not smaller than the context, "
            "layers keep every slot"
        )
    notes += _mesh_notes(plan, own)
    reserved = language_model.capacity_for(plan.capacity)
    if reserved != plan.capacity:
        notes.append(
            f"slots: unless --capacity is given, jdecode.generate reserves {reserved:,} for {plan.capacity:,} tokens, "
            "so that few programs are compiled"
        )
    if question.memory is not None and question.memory.platform == "tpu":
        padding = own.tiled_bytes - own.device_bytes
        notes.append(
            f"tpu: tiles of 8 x 128 pad this cache by {known_devices.size_text(padding)} a device "
            f"({100 * padding / own.device_bytes:.1f} %), which the number of requests takes into account"
        )
    if question.memory is not None:
        notes.append("memory: logits, activations and the compiler's temporaries come on top of weights and cache")
    return notes


def _eviction_note(plan: ledger_lib.Plan, own: ledger_lib.Ledger) -> str:
    if not plan.is_compressed:
        return f"eviction: the budget of {plan.cache.budget:,} holds all that it would keep, so every token is kept"
    prompt, size = ledger_lib.prompt_bytes(plan), known_devices.size_text
    lengths = {"longest_prompt": plan.longest_prompt, "max_new_tokens": plan.num_new, "capacity": None}
    reserved = cache_plan.plan(plan.model, plan.cache, plan.compute_dtype, **lengths).row_shapes()
    before, after = (plan.batch_size * sum(map(ledger_lib.leaf_bytes, jax.tree.leaves(row))) for row in reserved)
    return (
        f"eviction: a prompt of {plan.longest_prompt:,} tokens is read into a cache of {size(prompt)} first; for a "
        f"moment both stand side by side, {size(prompt + own.num_bytes)}; jdecode.generate, which reserves few sizes, "
        f"takes {size(before)} and then {size(after)}"
    )


def _mesh_notes(plan: ledger_lib.Plan, own: ledger_lib.Ledger) -> list[str]:
    """Says which axes of the mesh split no keys and values, and why."""
    what = {
        "data": (f"{plan.batch_size} rows", "every device along it holds all rows"),
        "model": (f"{plan.model.num_kv_heads} key/value heads", "keys and values stay whole along it"),
    }
    return [
        f"mesh: {axis}={getattr(plan.mesh, axis)} does not divide {words}, so {so}"
        for axis, (words, so) in what.items()
        if getattr(plan.mesh, axis) > 1 and not any(axis in line.split for line in own.lines if line.is_stored)
    ]
