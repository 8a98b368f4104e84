"""Prompts read once, prompts made shorter, and slots lent while they are used, as ways to need less."""

import dataclasses

import jax.numpy as jnp

from jdecode import relief_way
from jdecode.cache import attention_work
from jdecode.cache import ledger as ledger_lib


def prefix_cache(question: relief_way.Question) -> list[relief_way.Variant]:
    """Compares prefills of prompts as long as the context: read whole, and with the first half held already."""
    plan = question.plan

    def reading(name: str, num_held: int) -> relief_way.Variant:
        attention = attention_work.prefill(plan, question.chunk_len, num_held).operations
        products = plan.batch_size * (plan.capacity - num_held) * question.operations_a_token
        return relief_way.Variant(name=name, operations=products + attention, is_planned=num_held == 0)

    held = plan.capacity // 2
    variants = [reading(f"every prompt of {plan.capacity:,} read whole", 0)]
    if held:
        variants.append(reading(f"what if the first {held:,} tokens of each are held", held))
    return variants


def shorter_prompts(question: relief_way.Question) -> list[relief_way.Variant]:
    """Compares caches for prompts of which a half and a quarter is left."""
    plan = question.plan
    variants = [relief_way.cache_variant(question, "the whole prompt", plan)]
    for share, words in ((2, "a half"), (4, "a quarter")):
        left = -(-plan.longest_prompt // share)
        if left == plan.longest_prompt:
            break
        shorter = dataclasses.replace(plan, capacity=plan.capacity - plan.longest_prompt + left)
        variants.append(relief_way.cache_variant(question, f"what if {words} of it is left, {left:,} tokens", shorter))
    return variants


def lent_slots(question: relief_way.Question, paged: ledger_lib.Plan | None) -> list[relief_way.Variant]:
    """Compares slots for the longest text in every row with pages for what rows hold, half of that on the average.

    Args:
      paged: the plan with pages; ``None`` where it can have none.
    """
    variants = [relief_way.cache_variant(question, "every request has all its slots from the start", question.plan)]
    if paged is None:
        return variants
    cache = ledger_lib.abstract_cache(paged)
    layout, held = cache.paged_layout, max(paged.capacity // 2, 1)
    assert layout is not None
    num_pages = paged.batch_size * max(-(-int(cache.codec.stored_len(jnp.int32(held))) // layout.page_len), 1)
    name = f"what if they hold {held:,} tokens on the average, in pages of {layout.page_len}"
    return [*variants, relief_way.pool_variant(name, paged, num_pages)]
