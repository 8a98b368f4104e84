"""What a step takes: the count of operations, by hand; blocks leave one token each, look-ups fill the output."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling, step_cost
from jdecode.cache import allocate
from jdecode.decode import prefill, state, stopping
from jdecode.models import transformer
from jdecode.speculative import draft, draft_ngram
from tests import tiny_models


@pytest.mark.parametrize("is_tied", [False, True])
def test_operations_leave_out_a_table_that_is_only_read(is_tied: bool):
    # Three layers of D = 12, F = 20, N = 4, K = 2, H = 6: query and output 2 * 24 * 12, key and value 2 * 12 * 12,
    # gate, up and down 3 * 20 * 12; the head is 29 * 12 more. Two operations a weight.
    expected = 2 * (3 * (576 + 288 + 720) + 348)
    assert step_cost.operations_a_token(dataclasses.replace(tiny_models.MIXED, tie_embeddings=is_tied)) == expected


def test_blocks_leave_one_token_each():
    model = transformer.Transformer(tiny_models.MIXED)
    params = {"params": tiny_models.random_params(tiny_models.MIXED)}
    cache = allocate.init_cache(
        model.config, config.CacheConfig(slack=2), batch_size=1, capacity=24, compute_dtype="float32"
    )
    cache, _ = prefill.prefill(model, params, [[7, 11, 13, 17, 19, 23]], cache)
    tokens_BT, cache = step_cost.feed_blocks(model, params, cache, jnp.int32(5), 3)
    assert tokens_BT.shape == (1, 3) and cache.length_B.tolist() == [6 + 5]


def test_look_ups_propose_after_every_token():
    own = draft_ngram.NgramDraft()
    nothing = draft.Params(target=(), draft=())
    memory = own.begin(nothing, [[5, 6, 7, 5, 6, 7]], num_samples=1, max_len=40)
    cache = allocate.init_cache(
        tiny_models.MIXED, config.CacheConfig(), batch_size=1, capacity=1, compute_dtype="float32"
    )
    rows = state.init_state(
        cache,
        sampler=(),
        key_B=sampling.request_keys([0], [0]),
        temperature_B=jnp.zeros(1),
        stop_ids_BX=stopping.padded([[]]),
        max_new_B=jnp.full(1, 8, jnp.int32),
        output_len=9,
        num_top_logprobs=None,
    )
    rows = dataclasses.replace(rows, tokens_BM=rows.tokens_BM.at[0, 0].set(5))
    task = draft.Task(
        chain=sampling.standard_chain(), vocab_size=29, most=3, purpose=sampling.PURPOSE_DRAFT, needs_law=False
    )
    tokens_BM = step_cost.look_up(own, task, memory, rows, jnp.int32(6))
    # The text repeats 5 6 7, and each look-up goes on with it.
    assert np.asarray(tokens_BM)[0].tolist() == [5, 6, 7, 5, 6, 7, 5, 0, 0]


def test_bandwidth_is_a_rate(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(step_cost, "BANDWIDTH_BYTES", 2**20)
    assert step_cost.memory_bandwidth() > 2**20  # a mebibyte in less than a second
