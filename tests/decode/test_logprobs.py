"""Log-probabilities of new tokens, against a softmax of the model's own forward pass without a cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config
from tests import tiny_model

ATOL = 1e-4
"""Two orders of summation in float32, at logits of about ten: 1e-5."""


def forward_logprobs(lm, ids: list[int]) -> np.ndarray:
    """Computes the log-softmax (T, V) after each token, in float64, without a cache."""
    logits_BTV, cache = lm.model.apply(lm.params, jnp.asarray([ids], jnp.int32))
    assert cache is None
    logits_TV = np.asarray(logits_BTV[0], np.float64)
    return logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))


RANDOM = config.SamplingConfig(temperature=0.7, top_k=40, repetition_penalty=1.7, logit_bias=((9, 5.0),), seed=6)


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text"])
@pytest.mark.parametrize("sampling", [config.SamplingConfig(), RANDOM])
@pytest.mark.parametrize("steps", [3, 64])
def test_logprobs_are_those_of_the_model(name, sampling, steps):
    # No transform counts: the model's own distribution, whatever the temperature, the penalties and the bias.
    lm = tiny_model.load(name)
    prompts = tiny_model.prompts(name)
    stream = lm.stream(prompts, max_new_tokens=20, ignore_eos=True, sampling=sampling, logprobs=5, steps_per_look=steps)
    list(stream)
    result = stream.result
    assert result is not None and result.logprobs is not None and result.top_logprobs is not None
    assert result.logprobs.dtype == np.float32
    for row, tokens in enumerate(tiny_model.rows(result)):
        prompt = prompts[row]
        expected_TV = forward_logprobs(lm, prompt + tokens)[len(prompt) - 1 : -1]
        np.testing.assert_allclose(result.logprobs[row], expected_TV[np.arange(20), tokens], atol=ATOL, rtol=0)
        for place, top in enumerate(result.top_logprobs[row]):
            values = [logprob for _, logprob in top]
            assert len(top) == 5 and values == sorted(values, reverse=True)
            np.testing.assert_allclose(values, np.sort(expected_TV[place])[::-1][:5], atol=ATOL, rtol=0)
            np.testing.assert_allclose(values, expected_TV[place][[token for token, _ in top]], atol=ATOL, rtol=0)
        if sampling.temperature == 0:
            assert [top[0][0] for top in result.top_logprobs[row]] == tokens
            np.testing.assert_array_equal([top[0][1] for top in result.top_logprobs[row]], result.logprobs[row])


def test_rows_of_different_lengths():
    lm = tiny_model.load_text()
    scripts = [[40, 2], [41, 42, 43, 44, 2]]
    result = lm.generate(scripts, transforms=[tiny_model.RepeatPrompt()], logprobs=3, max_new_tokens=9)
    assert result.logprobs is not None and result.top_logprobs is not None
    assert result.logprobs.shape == result.tokens.shape == (2, 5)
    assert not result.logprobs[0, 2:].any() and result.logprobs[0, :2].all()
    assert [len(top) for top in result.top_logprobs] == [2, 5]
    expected_TV = forward_logprobs(lm, scripts[1] * 2)
    np.testing.assert_allclose(result.logprobs[1], expected_TV[np.arange(4, 9), scripts[1]], atol=ATOL, rtol=0)


@pytest.mark.parametrize("num_top", [None, 0, 288])
def test_as_many_as_asked_for(num_top):
    lm = tiny_model.load("llama_gqa")
    result = lm.generate([[5, 6, 7]], max_new_tokens=4, ignore_eos=True, logprobs=num_top)
    if num_top is None:
        assert result.logprobs is result.top_logprobs is None
        return
    assert result.logprobs is not None and result.logprobs.shape == (1, 4)
    if num_top == 0:
        assert result.top_logprobs is None
        return
    assert result.top_logprobs is not None
    for top in result.top_logprobs[0]:
        # All of the vocabulary, each token once; the probabilities sum to one.
        assert sorted(token for token, _ in top) == list(range(288))
        assert sum(np.exp(logprob) for _, logprob in top) == pytest.approx(1, abs=1e-5)


def test_scores_of_the_continuation_equal_its_logprobs():
    lm, prompt = tiny_model.load("mistral_w16"), tiny_model.prompts("mistral_w16")[1]
    result = lm.generate([prompt], max_new_tokens=20, ignore_eos=True, logprobs=0)
    assert result.logprobs is not None
    (score,) = lm.score([prompt + tiny_model.rows(result)[0]])
    np.testing.assert_allclose(score[len(prompt) - 1 :], result.logprobs[0], atol=ATOL, rtol=0)
