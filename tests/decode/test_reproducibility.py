"""Seeds: a request's text depends on its seed and on nothing beside it."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from jdecode.decode import prefill
from tests import tiny_model

NUM_NEW = 20


def random_config(seed: int | None, temperature: float = 1.0) -> config.SamplingConfig:
    return config.SamplingConfig(temperature=temperature, seed=seed)


def generate(prompts, seeds, **options) -> list[list[int]]:
    """Returns the tokens of one request a prompt; a seed may also be a whole config."""
    configs = [seed if isinstance(seed, config.SamplingConfig) else random_config(seed) for seed in seeds]
    options = {"max_new_tokens": NUM_NEW, "ignore_eos": True, **options}
    return tiny_model.rows(tiny_model.load("llama_gqa").generate(prompts, sampling=configs, **options))


FIRST, SECOND, THIRD = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16]]


def test_row_does_not_depend_on_its_mates_or_its_slot():
    (alone,) = generate([FIRST], [42])
    penalised = config.SamplingConfig(temperature=2.0, top_k=9, repetition_penalty=1.5, no_repeat_ngram_size=2)
    for prompts, seeds, slot in [
        ([FIRST, SECOND, THIRD], [42, 43, 44], 0),
        ([SECOND, FIRST, THIRD], [None, 42, None], 1),
        ([SECOND, THIRD, FIRST], [config.SamplingConfig(), penalised, 42], 2),
        ([FIRST, FIRST, FIRST], [7, 42, 8], 1),
    ]:
        assert generate(prompts, seeds)[slot] == alone
    # Two requests of one seed and one prompt are one text; another prompt's is another.
    same = generate([FIRST, FIRST, SECOND], [42, 42, 42])
    assert same[0] == same[1] == alone != same[2]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_ragged_batch_equals_rows_alone(temperature):
    # Padding counts nowhere: not in positions, and not in the penalties, whose filler no row has seen.
    prompts = tiny_model.prompts("llama_gqa")
    configs = [
        config.SamplingConfig(temperature=temperature, seed=seed, repetition_penalty=penalty, frequency_penalty=0.5)
        for seed, penalty in ((11, 1.0), (12, 1.3), (13, 0.8))
    ]
    together = generate(prompts, configs)
    for row in range(3):
        assert generate([prompts[row]], [configs[row]]) == [together[row]]


def test_one_request_twice():
    assert generate([FIRST], [42]) == generate([FIRST], [42])
    assert generate([FIRST], [42]) != generate([FIRST], [43])


def test_zero_is_a_seed_like_any_other():
    assert generate([FIRST], [0]) == generate([FIRST], [0])
    assert generate([FIRST], [0]) != generate([FIRST], [1])
    lm = tiny_model.load("llama_gqa")
    assert lm.generate([FIRST], max_new_tokens=NUM_NEW, sampling=random_config(0)).seeds == [0]


def test_a_seed_counts_with_all_its_bits():
    texts = [generate([FIRST], [seed])[0] for seed in (5, 5 + 2**31, 5 + 2**32, 2**63 - 1)]
    assert len({tuple(tokens) for tokens in texts}) == 4


def test_requests_without_a_seed_differ_and_say_what_they_used():
    # 20 tokens of a model whose every token has a surprise of some nats: an accident is out of the question.
    lm = tiny_model.load("llama_gqa")
    options = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "sampling": random_config(None)}
    results = [lm.generate([FIRST, FIRST], **options) for _ in range(2)]
    texts = [tuple(tokens) for result in results for tokens in tiny_model.rows(result)]
    seeds = [seed for result in results for seed in result.seeds]
    assert len(set(texts)) == len(set(seeds)) == 4
    assert generate([FIRST, FIRST], seeds[:2]) == [list(tokens) for tokens in texts[:2]]


def test_samples_share_the_prefill_and_differ(monkeypatch):
    batches = []
    read = prefill.prefill_chunk

    def watched(model, params, cache, logits_BV, tokens_BT, num_tokens_B):
        batches.append(tokens_BT.shape[0])
        return read(model, params, cache, logits_BV, tokens_BT, num_tokens_B)

    monkeypatch.setattr(prefill, "prefill_chunk", watched)
    five = generate([FIRST, THIRD], [42, 43], num_samples=5)
    assert batches == [2]
    assert len({tuple(tokens) for tokens in five}) == 10
    three = generate([FIRST, THIRD], [42, 43], num_samples=3)
    assert [three[:3], three[3:]] == [five[:3], five[5:8]]
    # Each prompt's samples are what they are without the other prompt; the first is the request without samples.
    assert generate([THIRD], [43], num_samples=5) == five[5:]
    assert generate([FIRST], [42]) == [five[0]]
    assert generate([THIRD], [43]) == [five[5]]


def test_greedy_samples_are_all_alike():
    lm, (prompt, _, _) = tiny_model.load("llama_gqa"), tiny_model.prompts("llama_gqa")
    result = lm.generate([prompt], num_samples=3, max_new_tokens=tiny_model.NUM_GREEDY, ignore_eos=True)
    assert tiny_model.rows(result) == [tiny_model.greedy("llama_gqa")[0]] * 3


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_w16"])
@pytest.mark.parametrize("num_first", [1, 7, 19])
def test_a_text_continued_in_a_second_call_is_the_same(name, num_first):
    # The draw of a token is addressed by its place in the text, so a resumed request goes on as it would have.
    lm = tiny_model.load(name)
    options = {"sampling": random_config(42), "ignore_eos": True}
    prompt = tiny_model.prompts(name)[1]
    (whole,) = tiny_model.rows(lm.generate([prompt], max_new_tokens=NUM_NEW, **options))
    (first,) = tiny_model.rows(lm.generate([prompt], max_new_tokens=num_first, **options))
    (rest,) = tiny_model.rows(lm.generate([prompt + first], max_new_tokens=NUM_NEW - num_first, **options))
    assert first + rest == whole


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_sampled_chunks_give_the_tokens_of_one_run(steps):
    lm = tiny_model.load("llama_gqa")
    prompts = [FIRST, SECOND, THIRD]
    configs = [random_config(seed) for seed in (42, 43, 44)]
    options = {"max_new_tokens": NUM_NEW, "ignore_eos": True, "sampling": configs}
    stream = lm.stream(prompts, steps_per_look=steps, **options)
    list(stream)
    assert stream.result is not None
    assert tiny_model.rows(stream.result) == generate(prompts, [42, 43, 44])


def flat_model():
    """Returns a model of V=1000 all of whose logits are 0."""
    lm = tiny_model.make(
        vocab_size=1000,
        hidden_size=12,
        intermediate_size=20,
        num_heads=2,
        num_kv_heads=1,
        head_dim=6,
        layers=(config.LayerConfig(),),
    )
    head = {"weight": jnp.zeros((1000, 12))}
    return dataclasses.replace(lm, params={"params": {**lm.params["params"], "head": head}})


def test_every_step_draws_anew():
    # 64 uniform draws of 1000 tokens give 62.0 distinct ones on average, with a deviation of 1.4; fewer than 40 never
    # come by chance (under 1e-20), but one key for all steps gives 1.
    lm = flat_model()
    result = lm.generate([[5, 6]] * 2, max_new_tokens=64, sampling=[random_config(1), random_config(2)])
    first, second = tiny_model.rows(result)
    assert len(set(first)) >= 40 and len(set(second)) >= 40
    # Keys of two rows, or of two steps, that are shifted copies of each other would draw the same tokens again.
    assert len(set(first) & set(second)) < 20
    assert np.mean(first) == pytest.approx(499.5, abs=5 * 288.7 / 8)  # five deviations of the mean of 64
