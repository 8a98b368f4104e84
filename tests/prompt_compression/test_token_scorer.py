"""Surprise by windows: every token once, with what stands before it; and what a question changes."""

from collections.abc import Sequence

import numpy as np
import pytest

from jdecode.prompt_compression import token_scorer
from tests import tiny_model
from tests.prompt_compression import small_prompts


class PlaceScorer:
    """Answers with the number of tokens before each, in the window."""

    window_len = 8

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        assert 2 <= len(ids) <= 8
        return np.arange(1.0, len(ids))


def test_windows_score_each_token_once_behind_a_quarter_at_least():
    # 8 tokens, then 6 new ones behind 2: by hand
    expected = [1, 2, 3, 4, 5, 6, 7, *range(2, 8), *range(2, 8), *range(6, 8)]
    scores = token_scorer.surprise_of_text(PlaceScorer(), list(range(22)))
    assert scores[1:].tolist() == expected
    assert scores[0] == np.mean(expected)


def test_a_context_starts_every_window():
    scorer = small_prompts.TableScorer([0.5] * 40)
    scores = token_scorer.surprise_of_text(scorer, list(range(10, 20)), context=[1, 2, 3], text_len=4)
    assert scores.tolist() == [0.5] * 10
    assert scorer.asked == [[1, 2, 3, 10, 11, 12, 13], [1, 2, 3, 13, 14, 15, 16], [1, 2, 3, 16, 17, 18, 19]]


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("window_len", [2, 3, 4])
def test_any_length_and_window(num_tokens: int, window_len: int):
    table = [float(n * n) for n in range(12)]
    scorer = small_prompts.TableScorer(table, window_len=window_len)
    ids = [(7 * n + 3) % 12 for n in range(num_tokens)]
    scores = token_scorer.surprise_of_text(scorer, ids)
    assert scores[1:].tolist() == [table[token_id] for token_id in ids[1:]]


def test_contrast_is_what_the_question_gains_and_never_negative():
    # behind the question 7 8 the ids 7 and 8 are 4 nats less surprising; 5 is where it was there before anyway
    gains = token_scorer.contrast(small_prompts.EchoScorer(), [5, 7, 5, 8, 8, 9], [7, 8])
    assert gains.tolist() == [0, 4, 0, 4, 0, 0]

    # what starts every text starts the question too, once, and is there without the question
    gains = token_scorer.contrast(small_prompts.EchoScorer(), [5, 7, 1, 8], [1, 7, 8], [1])
    assert gains.tolist() == [0, 4, 0, 4]
    table = small_prompts.TableScorer([1.0] * 9)
    token_scorer.contrast(table, [5, 7], [7], [1])
    assert table.asked == [[1, 5, 7], [1, 7, 5, 7]]

    class Worse(small_prompts.EchoScorer):
        def surprise(self, ids: Sequence[int]) -> np.ndarray:
            return 6.0 - super().surprise(ids)

    assert not token_scorer.contrast(Worse(), [5, 7, 5, 8, 8, 9], [7, 8]).any()


def test_a_question_longer_than_a_window_is_refused():
    scorer = small_prompts.EchoScorer(window_len=6)
    assert len(token_scorer.contrast(scorer, [1, 2, 3], [4] * 4)) == 3
    with pytest.raises(ValueError, match=r"question: expected at most 4 tokens, as many as .* got 5"):
        token_scorer.contrast(scorer, [1, 2, 3], [4] * 5)


def test_an_answer_of_another_length_is_refused():
    class Short:
        window_len = 8

        def surprise(self, ids: Sequence[int]) -> np.ndarray:
            return np.zeros(len(ids))

    with pytest.raises(ValueError, match=r"scorer: expected 2 numbers for 3 tokens, got \(3,\)"):
        token_scorer.surprise_of_text(Short(), [1, 2, 3])


def test_a_model_is_asked_in_windows_that_it_was_trained_for():
    lm = tiny_model.load("llama_gqa")
    (ids, *_) = tiny_model.prompts("llama_gqa")
    ids = (ids * 9)[:19]
    whole = token_scorer.ModelScorer(lm=lm)
    assert whole.window_len == min(token_scorer.WINDOW_LEN, lm.config.max_positions)
    # the log-softmax of a run without a cache
    logits_TV = np.asarray(lm.model.apply(lm.params, np.asarray([ids]))[0][0], np.float64)
    logits_TV -= np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    expected = [-logits_TV[idx, ids[idx + 1]] for idx in range(18)]
    np.testing.assert_allclose(token_scorer.surprise_of_text(whole, ids)[1:], expected, rtol=0, atol=1e-4)
    # in windows of 8: the last five are scored behind ids 13 and 12 only
    windows = token_scorer.surprise_of_text(token_scorer.ModelScorer(lm=lm, max_window_len=8), ids)
    last = token_scorer.surprise_of_text(whole, ids[11:])
    np.testing.assert_allclose(windows[14:], last[3:], rtol=0, atol=1e-4)
    with pytest.raises(ValueError, match="max_window_len: expected a whole number from 2"):
        token_scorer.ModelScorer(lm=lm, max_window_len=1)
