"""Attention's work by formula, beside counting every pair and every slot."""

import dataclasses
from typing import Any

import pytest

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import attention_work, ledger
from tests import tiny_models

MIXED = tiny_models.MIXED
N, H, B = 4, 6, 5
SLOT_BYTES = 2 * 2 * 6 * 2  # keys and values, two heads of 6, bfloat16


def plan_of(capacity: int, *, layout: str = "auto", slack: int = 0, layers=MIXED.layers, **cache) -> ledger.Plan:
    return ledger.Plan(
        model=dataclasses.replace(MIXED, layers=layers),
        cache=config_lib.CacheConfig(layout=layout, slack=slack, **cache),
        batch_size=B,
        capacity=capacity,
        compute_dtype="bfloat16",
    )


def seen(query: int, layer: config_lib.LayerConfig) -> list[int]:
    """Lists what a query sees, by the rule that attention itself applies."""
    import jax.numpy as jnp

    mask = visibility.visible(
        jnp.asarray([[query]]), jnp.arange(query + 1)[None, :], window=layer.window, num_sinks=layer.num_sinks
    )
    return jnp.flatnonzero(mask[0, 0]).tolist()


@pytest.mark.parametrize("length", [1, 4, 5, 6, 7, 13])
@pytest.mark.parametrize("layer", MIXED.layers)
def test_operations_count_every_pair(length, layer):
    plan = plan_of(length, layers=(layer, layer))
    pairs = [len(seen(query, layer)) for query in range(length)]
    # Two layers; a product of width H for the score and one for the sum, of two operations each, a head and row.
    assert attention_work.decode_step(plan).operations == 2 * B * 2 * 2 * N * H * pairs[-1]
    for chunk_len in (1, 3, length):
        assert attention_work.prefill(plan, chunk_len).operations == 2 * B * 2 * 2 * N * H * sum(pairs)


# Windows of 4: a ring of 4, one of 2 sinks and 4, and every slot; 19 tokens are held.
@pytest.mark.parametrize(
    ("layout", "slack", "slots"),
    [("auto", 0, 4 + 6 + 19), ("auto", 3, 7 + 9 + 19), ("full", 0, 4 + 19 + 19)],  # sinks lie before the window
)
def test_a_step_reads_what_is_held(layout, slack, slots):
    work = attention_work.decode_step(plan_of(19, layout=layout, slack=slack))
    assert work.read_bytes == B * SLOT_BYTES * slots


def test_a_prefill_reads_once_a_chunk():
    local, _, full = MIXED.layers
    # Chunks end at 5, 10, 15 and 19.
    assert attention_work.prefill(plan_of(19, layers=(full,)), 5).read_bytes == B * SLOT_BYTES * (5 + 10 + 15 + 19)
    # A chunk longer than the ring's slack reads the old ring of 4 and itself.
    assert attention_work.prefill(plan_of(19, layers=(local,)), 5).read_bytes == B * SLOT_BYTES * (5 + 9 + 9 + 8)
    # With room for the chunk it is written first: rings of 8 hold 5, then 8.
    short = attention_work.prefill(plan_of(19, layers=(local,), slack=4), 5)
    assert short.read_bytes == B * SLOT_BYTES * (5 + 8 + 8 + 8)
    # As a mask, the window leaves out what is before it: positions 2, 7 and 12 are the first ones read.
    masked = attention_work.prefill(plan_of(19, layers=(local,), layout="full"), 5)
    assert masked.read_bytes == B * SLOT_BYTES * (5 + 8 + 8 + 7)


def test_groups_and_latest_tokens():
    full = MIXED.layers[2:]
    groups: dict[str, Any] = {"dtype": "int8_channel", "group_len": 4, "layers": full}
    # 19 tokens: 16 are settled, a token after the fourth group; the ring of 4 + 1 slots is full. A slot has a byte a
    # number, a scale of 4 bytes for a value, and a quarter of one for a key's channel; the ring has two bytes a number.
    slot, exact = 2 * 2 * 6 + 2 * 4 + 2 * 6, 2 * 2 * 6 * 2
    assert attention_work.decode_step(plan_of(19, **groups)).read_bytes == B * (16 * slot + 5 * exact)
    # Chunks of 10 end at 10 and 19; 8 are settled, then 16. A chunk is longer than the ring's slack.
    work = attention_work.prefill(plan_of(19, **groups), 10)
    assert work.read_bytes == B * ((8 + 16) * slot + (10 + (5 + 9)) * exact)


def test_a_step_is_linear_and_a_prefill_quadratic():
    full = MIXED.layers[2:]
    for double in (2, 4, 1024):
        first, second = plan_of(double // 2, layers=full), plan_of(double, layers=full)
        steps = [attention_work.decode_step(plan) for plan in (first, second)]
        assert steps[1].operations == 2 * steps[0].operations
        assert steps[1].read_bytes == 2 * steps[0].read_bytes
    whole = [attention_work.prefill(plan_of(length, layers=full), 64).operations for length in (512, 1024)]
    assert whole[1] / whole[0] == pytest.approx(4, rel=0.01)
    # Past the window a layer with one costs the same a step, and a prefill twice for twice the text.
    local = MIXED.layers[:1]
    steps = [attention_work.decode_step(plan_of(length, layers=local)) for length in (512, 1024)]
    assert steps[0] == steps[1]
    whole = [attention_work.prefill(plan_of(length, layers=local), 64).operations for length in (512, 1024)]
    assert whole[1] / whole[0] == pytest.approx(2, rel=0.01)
