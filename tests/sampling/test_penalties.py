import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling

VOCAB = 11


def _after(transform, params, tokens: list[int], vocab: int = VOCAB, batch: int = 1):
    """The state once ``tokens`` were accepted, by every row."""
    state = transform.init(params, batch, vocab)
    for token in tokens:
        state = transform.accept(state, jnp.full((batch,), token, jnp.int32), jnp.ones((batch,), bool))
    return state


def test_repetition_divides_positive_and_multiplies_negative(params_of):
    # A penalty of 2: +4 becomes 2, -4 becomes -8, 0 stays 0. Prompt tokens count; token 1 was never seen.
    logits_BV = jnp.asarray([[4.0, 4.0, -4.0, 0.0, -np.inf]])
    params = params_of({"repetition_penalty": 2.0}, vocab=5, prompt=[2, 4])
    transform = sampling.TokenPenalties()
    got = transform.apply(logits_BV, _after(transform, params, [0, 3], 5))
    assert got.tolist() == [[2.0, 4.0, -8.0, 0.0, -np.inf]]


def test_presence_counts_once_and_frequency_each_time(params_of):
    logits_BV = jnp.full((3, 5), 7.0)
    params = params_of(
        {"presence_penalty": 1.5},
        {"frequency_penalty": 0.25},
        {"presence_penalty": -1.0, "frequency_penalty": 2.0},
        vocab=5,
    )
    transform = sampling.TokenPenalties()
    got = transform.apply(logits_BV, _after(transform, params, [3, 4, 3, 3], 5, batch=3))
    assert got.tolist() == [[7, 7, 7, 5.5, 5.5], [7, 7, 7, 6.25, 6.75], [7, 7, 7, 2, 6]]


def test_presence_and_frequency_leave_the_prompt_alone(params_of):
    # Engines that kept one counter punished the words of the question (NVIDIA/TensorRT-LLM#5623).
    logits_BV = jnp.full((1, VOCAB), 3.0)
    transform = sampling.TokenPenalties()
    subtract = params_of({"presence_penalty": 1.0, "frequency_penalty": 1.0}, vocab=VOCAB, prompt=[7, 7, 7])
    assert transform.apply(logits_BV, transform.init(subtract, 1, VOCAB)).tolist() == logits_BV.tolist()
    repeat = params_of({"repetition_penalty": 2.0}, vocab=VOCAB, prompt=[7, 7, 7])
    got = np.asarray(transform.apply(logits_BV, transform.init(repeat, 1, VOCAB))[0])
    assert got[7] == 1.5 and np.all(np.delete(got, 7) == 3.0)


def test_repetition_comes_before_subtraction(params_of):
    # 4 / 2 - 1 = 1; the other way round it would be 1.5.
    params = params_of({"repetition_penalty": 2.0, "presence_penalty": 1.0}, vocab=5)
    transform = sampling.TokenPenalties()
    got = transform.apply(jnp.full((1, 5), 4.0), _after(transform, params, [3], 5))
    assert float(got[0, 3]) == 1.0


def test_padding_of_the_prompt_is_never_penalised():
    # A batch of ragged prompts (huggingface/text-generation-inference#1765): row 1 is padded, by id 0 too.
    transform = sampling.TokenPenalties()
    params = _ragged({"repetition_penalty": 2.0})
    for filler in (0, 4, VOCAB - 1, -1, VOCAB):
        padded_BT = params.prompt_ids_BT.at[1, 2:].set(filler)
        state = transform.init(_replace(params, padded_BT), 2, VOCAB)
        got = np.asarray(transform.apply(jnp.full((2, VOCAB), 3.0), state))
        assert np.flatnonzero(got[1] != 3.0).tolist() == [5, 6]
        assert np.flatnonzero(got[0] != 3.0).tolist() == [1, 2, 3]


def test_padding_of_the_prompt_is_no_ngram():
    params = _ragged({"no_repeat_ngram_size": 1})
    transform = sampling.NoRepeatNgram()
    for filler in (0, VOCAB - 1, -1):
        state = transform.init(_replace(params, params.prompt_ids_BT.at[1, 2:].set(filler)), 2, VOCAB)
        got = np.asarray(transform.apply(jnp.zeros((2, VOCAB)), state))
        assert np.flatnonzero(got[1] != 0).tolist() == [5, 6]


def _ragged(fields: dict) -> sampling.SamplingParams:
    return sampling.params_from_configs(
        [config.SamplingConfig(**fields)] * 2,
        vocab_size=VOCAB,
        prompts=[[1, 2, 3, 1, 2], [5, 6]],
        history_len=19,
        stop_ids=[[], []],
    )


def _replace(params: sampling.SamplingParams, prompt_ids_BT: jax.Array) -> sampling.SamplingParams:
    return dataclasses.replace(params, prompt_ids_BT=prompt_ids_BT)


def _repeats(history: list[int], size: int) -> set[int]:
    """Plain model: tokens whose n-gram with the last n - 1 tokens is in the history."""
    if size == 0 or len(history) < size:
        return set()
    grams = {tuple(history[start : start + size]) for start in range(len(history) - size + 1)}
    last = tuple(history[len(history) - size + 1 :])
    return {gram[-1] for gram in grams if gram[:-1] == last}


def test_no_repeat_ngram_against_plain_lists(params_of):
    # Four words, so that n-grams repeat all the time; sizes differ between rows, and 0 is off.
    rng = np.random.default_rng(6)
    sizes, prompt, vocab, capacity = [3, 0, 1, 2, 5], [1, 3, 1, 3, 1], 6, 31
    transform = sampling.NoRepeatNgram()
    fields = [{"no_repeat_ngram_size": size} for size in sizes]
    params = params_of(*fields, vocab=vocab, prompt=prompt, history_len=capacity)
    state = transform.init(params, len(sizes), vocab)
    apply, accept = jax.jit(transform.apply), jax.jit(transform.accept)
    histories = [list(prompt) for _ in sizes]
    for _ in range(capacity - len(prompt)):
        got = np.asarray(apply(jnp.zeros((len(sizes), vocab)), state))
        for row, size in enumerate(sizes):
            assert set(np.flatnonzero(got[row] == -np.inf).tolist()) == _repeats(histories[row], size)
        tokens, live = rng.integers(1, 5, len(sizes)), rng.random(len(sizes)) < 0.8
        state = accept(state, jnp.asarray(tokens, jnp.int32), jnp.asarray(live))
        for row, history in enumerate(histories):
            if live[row]:
                history.append(int(tokens[row]))


def test_tokens_past_the_length_of_the_history_do_not_count(params_of):
    # As after a rollback by length: 5 6 | 5 4 leaves 5 6 5, after which only 6 repeats a pair.
    transform = sampling.NoRepeatNgram()
    params = params_of({"no_repeat_ngram_size": 2}, vocab=7, prompt=[5, 6])
    state = _after(transform, params, [5, 4], 7)
    state = dataclasses.replace(state, history_len_B=state.history_len_B - 1)
    got = np.asarray(transform.apply(jnp.zeros((1, 7)), state))
    assert np.flatnonzero(got[0] == -np.inf).tolist() == [6]


def test_ngram_ban_of_every_token_leaves_the_row(params_of):
    # A prompt with all of the vocabulary and n = 1 would leave nothing.
    params = params_of({"no_repeat_ngram_size": 1}, vocab=5, prompt=[4, 3, 2, 1, 0])
    transform = sampling.NoRepeatNgram()
    logits_BV = jnp.asarray([[1.0, 2.0, 3.0, 5.0, 4.0]])
    assert transform.apply(logits_BV, transform.init(params, 1, 5)).tolist() == logits_BV.tolist()


def test_history_of_full_length_drops_more(params_of):
    # The history holds 3: the fourth token is dropped, and nothing before it is overwritten.
    transform = sampling.NoRepeatNgram()
    params = params_of({"no_repeat_ngram_size": 2}, vocab=7, prompt=[5, 6], history_len=3)
    state = _after(transform, params, [5, 3, 2], 7)
    assert state.history_BS.tolist() == [[5, 6, 5]]
    assert state.history_len_B.tolist() == [3]


@pytest.mark.parametrize("field", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_a_penalty_in_one_row_changes_no_other(params_of, field: str):
    logits_BV = jnp.asarray(np.random.default_rng(7).normal(size=(2, VOCAB)), jnp.float32)
    params = params_of({field: 1.7}, {}, vocab=VOCAB, prompt=[9, 2])
    transform = sampling.TokenPenalties()
    got = transform.apply(logits_BV, _after(transform, params, [9, 4], batch=2))
    np.testing.assert_array_equal(got[1], logits_BV[1])
    assert float(got[0, 9]) != float(logits_BV[0, 9])
