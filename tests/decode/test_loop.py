"""The device loop: its steps, rows that have ended, donation, memory, and broken logits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling
from jdecode.decode import emission, loop, prefill, state, step, stopping
from tests import tiny_model

CHAIN = sampling.standard_chain()
REPEAT = sampling.standard_chain((tiny_model.RepeatPrompt(),))


def begin(lm, prompts, *, chain=CHAIN, max_new=(9,), stop_ids=(), capacity=64, num_top=None, **sampling_fields):
    """Reads prompts and draws the first tokens."""
    cache = lm.init_cache(batch_size=len(prompts), capacity=capacity)
    cache, logits_BV = prefill.prefill(lm.model, lm.params, prompts, cache)
    params = sampling.params_from_configs(
        [config.SamplingConfig(**sampling_fields)] * len(prompts),
        vocab_size=lm.config.vocab_size,
        prompts=prompts,
        history_len=64,
        stop_ids=[stop_ids] * len(prompts),
    )
    return loop.begin(
        chain,
        params,
        cache,
        logits_BV,
        key_B=sampling.request_keys([3] * len(prompts), range(len(prompts))),
        stop_ids_BX=stopping.padded([stop_ids] * len(prompts)),
        max_new_B=jnp.asarray(list(max_new) * (len(prompts) // len(max_new)), jnp.int32),
        output_len=16,
        num_top_logprobs=num_top,
    )


def to_numpy(tree):
    """Copies a state to the host; keys as their bits."""
    return jax.tree.map(lambda leaf: np.array(jax.random.key_data(leaf) if is_key(leaf) else leaf), tree)


def is_key(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


SCRIPTS = [[40, 51], [41, 52, 63, 74, 85, 96, 107, 118, 129], [42, 53, 64, 75, 86]]


def test_steps_are_counted_and_rows_have_their_own_ends():
    lm = tiny_model.load_text()
    # Ends: a stop token after two, the ninth token, the fourth token.
    now = begin(lm, SCRIPTS, chain=REPEAT, max_new=(9, 9, 4), stop_ids=(51,))
    assert now.num_new_B.tolist() == [1, 1, 1] and now.token_B.tolist() == [40, 41, 42]
    # The latest token is not in the cache: its length is the position of that token.
    assert now.cache.length_B.tolist() == [2, 9, 5]
    now = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now, 2)
    assert now.num_new_B.tolist() == [2, 3, 3]
    assert now.status_B.tolist() == [state.STOPPED, state.RUNNING, state.RUNNING]
    assert now.cache.length_B.tolist() == [3, 11, 7]
    now = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now, 0)
    assert now.num_new_B.tolist() == [2, 3, 3]
    now = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now)
    assert now.num_new_B.tolist() == [2, 9, 4]
    assert now.status_B.tolist() == [state.STOPPED, state.FULL, state.FULL]
    assert now.cache.length_B.tolist() == [2 + 1, 9 + 8, 5 + 3]
    tokens_BM = np.zeros((3, 16), int)
    tokens_BM[0, :2], tokens_BM[1, :9], tokens_BM[2, :4] = SCRIPTS[0], SCRIPTS[1], SCRIPTS[2][:4]
    np.testing.assert_array_equal(now.tokens_BM, tokens_BM)
    # Once all have ended, nothing runs.
    before = to_numpy(now)
    after = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now)
    jax.tree.map(np.testing.assert_array_equal, to_numpy(after), before)


@pytest.mark.parametrize("num_top", [None, 2])
def test_rows_that_have_ended_do_not_change(num_top):
    lm = tiny_model.load_text()
    now = begin(lm, SCRIPTS, chain=REPEAT, max_new=(3, 9, 9), num_top=num_top, repetition_penalty=1.1)
    now = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now, 3)
    assert now.status_B.tolist() == [state.FULL, state.RUNNING, state.RUNNING]
    before = to_numpy(now)
    after = to_numpy(loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now, 4))
    # Every leaf has the rows first. The row that has ended is bit for bit what it was; a running one moved.
    leaves, _ = jax.tree.flatten(before)
    assert all(leaf.shape[0] == 3 for leaf in leaves)
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[0], old[0]), after, before)
    assert after.num_new_B.tolist() == [3, 8, 8]
    assert not np.array_equal(after.cache.stores[0].keys.data_BSX[1], before.cache.stores[0].keys.data_BSX[1])


def test_finish_ends_running_rows_only():
    lm = tiny_model.load_text()
    now = begin(lm, SCRIPTS, chain=REPEAT, max_new=(1, 9, 9))
    now = state.finish(now, np.array([True, True, False]))
    assert now.status_B.tolist() == [state.FULL, state.STOPPED, state.RUNNING]
    now = loop.run(step.PlainStep(lm.model, REPEAT), lm.params, now)
    assert now.num_new_B.tolist() == [1, 1, 9]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_logits_that_are_not_finite_end_their_row_alone(bad):
    lm = tiny_model.load_text()
    now = begin(lm, SCRIPTS, max_new=(9,), temperature=1.0)
    before = to_numpy(now)
    logits_BV = np.random.default_rng(2).normal(size=(3, 288)).astype(np.float32)
    if np.isnan(bad):
        logits_BV[1, 7] = bad  # one of them is enough: an argmax would not notice
    else:
        logits_BV[1] = bad
    after = to_numpy(emission.emit(CHAIN, now, jnp.asarray(logits_BV)))
    assert after.status_B.tolist() == [state.RUNNING, state.INVALID, state.RUNNING]
    assert after.num_new_B.tolist() == [2, 1, 2]
    np.testing.assert_array_equal(after.tokens_BM[1], before.tokens_BM[1])
    assert after.token_B[1] == before.token_B[1]
    jax.tree.map(lambda new, old: np.testing.assert_array_equal(new[1], old[1]), after.sampler, before.sampler)


def test_stop_token_wins_over_the_length_and_broken_logits_over_both():
    lm = tiny_model.load_text()
    now = begin(lm, SCRIPTS, max_new=(2,), stop_ids=(77,))
    logits_BV = np.zeros((3, 288), np.float32)
    logits_BV[:, 77] = 5.0
    logits_BV[1, 77] = np.nan
    logits_BV[2, 99] = 6.0
    after = emission.emit(CHAIN, now, jnp.asarray(logits_BV))
    assert after.status_B.tolist() == [state.STOPPED, state.INVALID, state.FULL]
    assert after.tokens_BM[:, 1].tolist() == [77, 0, 99]


def pointers(tree) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(tree) if not is_key(leaf)]


def test_state_is_donated_and_nothing_in_it_aliases():
    lm = tiny_model.load_text()
    now = begin(lm, SCRIPTS, max_new=(9,), num_top=2)
    # Keys and values never share a buffer, nor does any other pair of leaves.
    assert len(set(pointers(now.cache))) == len(jax.tree.leaves(now.cache))
    own = loop.unaliased(now)
    assert len({id(leaf) for leaf in jax.tree.leaves(own)}) == len(jax.tree.leaves(own))
    old = jax.tree.leaves(now.cache)
    places = pointers(now.cache)
    after = loop.run(step.PlainStep(lm.model, CHAIN), lm.params, now, 2)
    assert all(leaf.is_deleted() for leaf in old)
    assert len(set(pointers(after))) == len(pointers(after))
    # In place: keys and values lie where they lay.
    assert pointers(after.cache.stores) == places[: len(pointers(after.cache.stores))]
    with pytest.raises((RuntimeError, ValueError), match=r"[Dd]eleted|donated"):
        loop.run(step.PlainStep(lm.model, CHAIN), lm.params, now, 1)
    # The parameters are nobody's to give away, and the state after it is as good as ever.
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(lm.params))
    assert loop.run(step.PlainStep(lm.model, CHAIN), lm.params, after).num_new_B.tolist() == [9, 9, 9]


def test_unaliased_copies_what_stands_twice():
    leaf, other = jnp.arange(3), jnp.arange(5)
    first, second, third = loop.unaliased((leaf, other, leaf))
    assert first is leaf and second is other and third is not leaf
    assert third.unsafe_buffer_pointer() != leaf.unsafe_buffer_pointer()
    np.testing.assert_array_equal(third, leaf)


def lowered_loop(lm, capacity: int, dtype: str):
    """Lowers the loop of two rows with a cache of ``dtype``. Nothing is allocated."""
    prompts = [[5, 6, 7], [8, 9]]

    def first_state():
        cache = lm.init_cache(batch_size=2, capacity=capacity, cache=config.CacheConfig(dtype=dtype))
        params = sampling.params_from_configs(
            [config.SamplingConfig(temperature=0.7, top_p=0.9)] * 2,
            vocab_size=lm.config.vocab_size,
            prompts=prompts,
            history_len=64,
            stop_ids=[()] * 2,
        )
        return loop.begin(
            CHAIN,
            params,
            cache,
            jnp.zeros((2, lm.config.vocab_size)),
            key_B=sampling.request_keys([3, 4], [0, 0]),
            stop_ids_BX=stopping.padded([(), ()]),
            max_new_B=jnp.full(2, 9, jnp.int32),
            output_len=64,
        )

    return loop._run.lower(step.PlainStep(lm.model, CHAIN), lm.params, jax.eval_shape(first_state), jnp.int32(4))


# A CPU does not compute in 16 bits: what it converts to write a row must not be the cache.
@pytest.mark.parametrize(("dtype", "num_bytes"), [("float32", 4), ("bfloat16", 2), ("float16", 2)])
def test_the_loop_holds_the_cache_once_and_never_asks_the_host(dtype, num_bytes):
    lm = tiny_model.make(
        vocab_size=512,
        hidden_size=96,
        intermediate_size=160,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        layers=(config.LayerConfig(),) * 5,
    )
    lowered = lowered_loop(lm, capacity=8192, dtype=dtype)
    assert "callback" not in lowered.as_text()
    # Keys and values of 5 layers, 2 rows, 8192 slots, 2 heads of 64; positions; lengths.
    cache_bytes = 2 * 5 * 2 * 8192 * 2 * 64 * num_bytes + 2 * 8192 * 4 + 2 * 4
    memory = lowered.compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < 0.3 * cache_bytes
    # The cache comes out where it went in.
    assert memory.alias_size_in_bytes >= cache_bytes


def test_one_request_after_a_failed_one():
    lm = tiny_model.load_text()
    broken = {"params": {**lm.params["params"], "head": {"weight": jnp.full((288, 64), jnp.nan)}}}
    with pytest.raises(FloatingPointError):
        dataclasses.replace(lm, params=broken).generate([[40, 51]], max_new_tokens=4)
    good = lm.generate([[40, 51]], max_new_tokens=4, ignore_eos=True)
    assert good.lengths.tolist() == [4]
