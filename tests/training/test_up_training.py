"""Pooling and training on: the losses are those of the library's own scoring, the bytes those of a hand count."""

import dataclasses

import jax
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode import language_model
from jdecode.cache import allocate
from jdecode.models import transformer
from jdecode.training import held_out, train_config, up_training
from jdecode.training import task as task_lib
from jdecode.weights import head_pooling, parameter_tree
from tests import tiny_mha, tiny_models

OPTIMIZER = train_config.OptimizerConfig(learning_rate=1e-2, warmup_steps=1, weight_decay=0.0)
MODEL = tiny_mha.MODEL
FILES = tiny_mha.files()
TOKENIZER = tiny_mha.tokenizer()


def run(*, num_kv_heads: int = 1, num_steps: int = 3, seed: int = 5, dtype: str = "float32"):
    return up_training.pool_and_train(
        tiny_models.random_params(MODEL),
        MODEL,
        num_kv_heads,
        tokenizer=TOKENIZER,
        files=FILES,
        num_steps=num_steps,
        optimizer=OPTIMIZER,
        seed=seed,
        dtype=dtype,
    )


def scored_loss(params, model: config_lib.ModelConfig) -> held_out.HeldOutLoss:
    """Computes the loss by the engine's own scoring: prefill through a cache, with rings, another attention backend."""
    lm = language_model.LanguageModel(
        config=model, model=transformer.Transformer(model), params={"params": params}, tokenizer=TOKENIZER
    )
    end_token_id = TOKENIZER.eos_token_ids[0]
    documents = task_lib.encode(TOKENIZER, FILES.held_out, end_token_id)
    judged = held_out.pieces(documents, MODEL.max_positions, end_token_id)
    assert len(judged) < up_training.JUDGED_PIECES  # all of them are judged
    num_bytes = np.array([len(TOKENIZER.token_bytes(idx)) for idx in range(TOKENIZER.vocab_size)])
    return held_out.evaluate_by(lm.score, judged, num_bytes)


def assert_loss(reported: dict[str, float], expected: held_out.HeldOutLoss) -> None:
    # Two orders of summation in float32, over some hundred tokens of about 6 nats.
    assert reported["nats_a_token"] == pytest.approx(expected.nats_a_token, abs=1e-4)
    assert reported["perplexity"] == pytest.approx(expected.perplexity, rel=1e-4)
    assert reported["bits_per_byte"] == pytest.approx(expected.bits_per_byte, rel=1e-4)


def test_losses_are_those_of_the_three_models():
    params, model, report = run()
    losses = report["losses"]
    original = tiny_models.random_params(MODEL)
    pooled, pooled_model = head_pooling.pool_kv_heads(original, MODEL, 1)
    assert model == pooled_model == dataclasses.replace(MODEL, num_kv_heads=1)
    assert_loss(losses["before"], scored_loss(original, MODEL))
    assert_loss(losses["pooled"], scored_loss(pooled, pooled_model))
    assert_loss(losses["up_trained"], scored_loss(params, pooled_model))
    assert losses["up_trained"]["nats_a_token"] < losses["pooled"]["nats_a_token"] - 0.1  # random weights learn fast
    assert report["kv_heads"] == {"before": 4, "after": 1}
    # Every token of a held-out file is judged once, its end included.
    ids = [TOKENIZER.encode(tiny_mha.text(seed), add_special_tokens=False) for seed in (0, 1)]
    assert report["judged"]["tokens"] == sum(len(row) + 1 for row in ids)
    assert report["judged"]["corpus"]["description"] == "words"
    assert (report["up_training"]["steps"], report["up_training"]["history"][-1]["step"]) == (3, 3)
    assert (report["up_training"]["sequence_len"], report["up_training"]["seed"]) == (20, 5)


def test_without_steps_heads_are_pooled_and_nothing_else():
    params, model, report = run(num_steps=0, dtype="bfloat16")
    exact, _ = head_pooling.pool_kv_heads(tiny_models.random_params(MODEL), MODEL, 1)
    for path, leaf in parameter_tree.flat(params).items():
        expected = parameter_tree.flat(exact)[path].astype("bfloat16")
        assert leaf.dtype == expected.dtype and np.array_equal(np.asarray(leaf), np.asarray(expected)), path
    # The loss is that of the parameters as they are returned, not of the exact ones.
    assert_loss(
        report["losses"]["pooled"], scored_loss(jax.tree.map(lambda leaf: leaf.astype("float32"), params), model)
    )
    assert (report["losses"]["up_trained"], report["up_training"]) == (None, None)


def test_as_many_heads_and_no_steps_change_nothing():
    params, model, report = run(num_kv_heads=4, num_steps=0)
    assert model == MODEL and report["losses"]["before"] == report["losses"]["pooled"]
    same = jax.tree.map(lambda a, b: bool((a == b).all()), params, tiny_models.random_params(MODEL))
    assert all(jax.tree.leaves(same))
    assert report["cache"]["bytes"]["before"] == report["cache"]["bytes"]["after"]


def test_seed_orders_the_data():
    first, again, other = (run(seed=seed)[0] for seed in (5, 5, 6))
    leaves = [np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)]) for params in (first, again, other)]
    assert np.array_equal(leaves[0], leaves[1])
    assert not np.array_equal(leaves[0], leaves[2])


def test_cache_bytes_by_hand():
    few = head_pooling.pooled_config(MODEL, 2)
    # 2 (keys, values) x K heads x 6 numbers x 2 layers x 2 bytes
    assert up_training.token_bytes(MODEL, "bfloat16") == 2 * 4 * 6 * 2 * 2
    assert up_training.token_bytes(few, "bfloat16") == 2 * 2 * 6 * 2 * 2
    # Slots: a ring of 4, and 20; each layout has positions of 4 bytes, and the row a length of 4.
    assert up_training.cache_bytes(MODEL, "bfloat16", 20) == (4 + 20) * (2 * 4 * 6 * 2) + (4 + 20 + 1) * 4
    assert up_training.cache_bytes(few, "bfloat16", 20) == (4 + 20) * (2 * 2 * 6 * 2) + (4 + 20 + 1) * 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("capacity", [3, 5, 29])
def test_cache_bytes_are_those_of_an_allocated_cache(dtype, capacity):
    cache = allocate.init_cache(MODEL, config_lib.CacheConfig(), batch_size=1, capacity=capacity, compute_dtype=dtype)
    assert up_training.cache_bytes(MODEL, dtype, capacity) == cache.num_bytes


def test_heads_that_do_not_fit_are_refused_first():
    with pytest.raises(ValueError, match="expected a divisor of the model's 4 key/value heads"):
        run(num_kv_heads=3)


def test_tokenizer_that_does_not_fit_is_refused():
    large = tiny_mha.tokenizer(300)
    assert large.vocab_size > MODEL.vocab_size
    with pytest.raises(ValueError, match="tokenizer: expected at most 290 entries"):
        up_training.pool_and_train(
            tiny_models.random_params(MODEL),
            MODEL,
            1,
            tokenizer=large,
            files=FILES,
            num_steps=2,
            optimizer=OPTIMIZER,
            seed=0,
            dtype="float32",
        )
