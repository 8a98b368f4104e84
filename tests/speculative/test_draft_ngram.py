"""Prompt lookup against a plain search through lists."""

import types
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.speculative import draft_ngram


def propose(draft, prompts, outputs, want, *, most: int = 4):
    """Returns the proposals of rows with these prompts and outputs, as lists."""
    memory = draft.begin(cast(Any, None), prompts, num_samples=1, max_len=60)
    width = 16
    tokens_BM = np.zeros((len(prompts), width), np.int32)
    for row, output in enumerate(outputs):
        tokens_BM[row, : len(output)] = output
    state = types.SimpleNamespace(
        tokens_BM=jnp.asarray(tokens_BM),
        num_new_B=jnp.asarray([len(output) for output in outputs], jnp.int32),
        cache=None,
    )
    task = types.SimpleNamespace(most=most)
    found, after, _ = draft.propose(task, None, memory, state, jnp.asarray(want, jnp.int32))
    assert after is memory and found.logits_BGV is None
    return [row[:num].tolist() for row, num in zip(np.asarray(found.token_BG), np.asarray(found.num_B), strict=True)]


def plain(text: list[int], want: int, longest: int, shortest: int) -> list[int]:
    """Looks for the most latest tokens, and of equally many for the latest place."""
    for length in range(longest, shortest - 1, -1):
        for start in range(len(text) - length - 1, -1, -1):
            if text[start : start + length] == text[len(text) - length :]:
                return text[start + length : start + length + want]
    return []


def test_what_followed_is_proposed():
    draft = draft_ngram.NgramDraft()
    # 5 6 7 was followed by 8 9 10; the longer match wins over the later one of 7 alone.
    assert propose(draft, [[5, 6, 7, 8, 9, 10, 7, 3, 5, 6]], [[7]], [3]) == [[8, 9, 10]]
    # Of two equally long ones the later one counts.
    assert propose(draft, [[5, 6, 1, 5, 6, 2, 5]], [[6]], [1]) == [[2]]
    # A match may run into the latest tokens: a repeated token goes on.
    assert propose(draft, [[4, 4, 4]], [[4]], [3]) == [[4]]
    # Nothing stood before, or nothing is wanted.
    assert propose(draft, [[5, 6, 7], [5, 5]], [[8], [5]], [4, 0]) == [[], []]


@pytest.mark.parametrize(("longest", "shortest"), [(3, 1), (2, 2), (5, 3), (1, 1)])
def test_it_finds_what_a_plain_search_finds(longest, shortest):
    random = np.random.default_rng(7)
    draft = draft_ngram.NgramDraft(longest=longest, shortest=shortest)
    prompts = [random.integers(3, 7, random.integers(1, 30)).tolist() for _ in range(60)]
    outputs = [random.integers(3, 7, random.integers(1, 12)).tolist() for _ in range(60)]
    want = random.integers(0, 5, 60).tolist()
    got = propose(draft, prompts, outputs, want)
    expected = [
        plain(prompt + output, num, longest, shortest)
        for prompt, output, num in zip(prompts, outputs, want, strict=True)
    ]
    assert got == expected
    assert sum(map(bool, got)) > 10


def test_samples_stand_prompt_by_prompt():
    memory = draft_ngram.NgramDraft().begin(cast(Any, None), [[5, 6], [7, 8, 9]], num_samples=2, max_len=20)
    assert memory.length_B.tolist() == [2, 2, 3, 3]
    assert np.asarray(memory.token_BS)[:, :3].tolist() == [[5, 6, -1], [5, 6, -1], [7, 8, 9], [7, 8, 9]]


@pytest.mark.parametrize(
    ("options", "message"), [({"shortest": 0}, "shortest"), ({"longest": 2, "shortest": 3}, "longest")]
)
def test_lengths_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=f"ngram {message}: expected a count"):
        draft_ngram.NgramDraft(**options)
