"""Batches by number, against a plain list of tokens."""

import collections

import hypothesis
import jax
import numpy as np
import pytest
from hypothesis import strategies

from jdecode.training import token_stream

KEY, OTHER_KEY = jax.random.key(3), jax.random.key(4)


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents in which no token is twice: each one says where it stands."""
    ends = np.cumsum(lengths)
    return [np.arange(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def epoch(stream: token_stream.TokenStream, number: int, key=KEY) -> np.ndarray:
    count = stream.sequences_an_epoch
    return stream.sequences(key, number * count, count)


def check_window(row: list[int], documents: list[list[int]]) -> None:
    """A sequence is documents in some order, cut at its ends: inside it every document is whole and in order."""
    starts = {document[0]: document for document in documents}
    place = {token: (idx, at) for idx, document in enumerate(documents) for at, token in enumerate(document)}
    idx, at = place[row[0]]
    rest = documents[idx][at:]
    while len(row) > len(rest):
        assert row[: len(rest)] == rest
        row = row[len(rest) :]
        rest = starts[row[0]]  # a KeyError: a document entered in its middle
    assert row == rest[: len(row)]


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    lengths=strategies.lists(strategies.integers(1, 23), min_size=1, max_size=9), T=strategies.integers(1, 9)
)
def test_an_epoch(lengths, T):
    documents = numbered(lengths)
    num_tokens = sum(lengths)
    if num_tokens < 2 * T + 1:
        with pytest.raises(ValueError, match=f"^corpus: expected at least {2 * T + 1} tokens"):
            token_stream.TokenStream(documents, T)
        return
    stream = token_stream.TokenStream(documents, T)
    assert stream.num_tokens == num_tokens
    for number in (0, 1, 5):
        rows = epoch(stream, number)
        assert rows.dtype == np.int32 and rows.shape == (stream.sequences_an_epoch, T + 1)
        predicted = collections.Counter(rows[:, 1:].ravel().tolist())
        assert max(predicted.values()) == 1
        assert num_tokens - len(predicted) < 2 * T + 1
        for row in rows.tolist():
            check_window(row, [document.tolist() for document in documents])


def test_every_token_is_predicted_sooner_or_later():
    """The place of the first cut is drawn anew in each epoch, so no token is left out for good."""
    stream = token_stream.TokenStream(numbered([7, 12, 4]), 5)
    seen = {token for number in range(12) for token in epoch(stream, number)[:, 1:].ravel().tolist()}
    assert seen == set(range(23))
    # One document cannot be shuffled: only the first cut moves.
    alone = token_stream.TokenStream(numbered([200]), 5)
    assert {int(epoch(alone, number)[0, 0]) % 5 for number in range(30)} == set(range(5))


@hypothesis.settings(deadline=None, max_examples=40)
@hypothesis.given(first=strategies.integers(0, 40), cuts=strategies.lists(strategies.integers(1, 9), min_size=1))
def test_addressed_not_consumed(first, cuts):
    """Any split into calls gives the same rows, asked in any order, over the ends of epochs (of three sequences)."""
    documents = numbered([7, 12, 4])
    whole = token_stream.TokenStream(documents, 5).sequences(KEY, first, sum(cuts))
    stream = token_stream.TokenStream(documents, 5)
    assert stream.sequences_an_epoch == 3
    starts = first + np.cumsum([0, *cuts[:-1]])
    parts = [stream.sequences(KEY, int(at), count) for at, count in reversed(list(zip(starts, cuts, strict=True)))]
    np.testing.assert_array_equal(np.concatenate(parts[::-1]), whole)


def test_epochs_and_keys_differ():
    stream = token_stream.TokenStream(numbered([31, 17, 23, 11, 29, 13]), 5)
    orders = [epoch(stream, number, key).tolist() for number in range(4) for key in (KEY, OTHER_KEY)]
    assert all(orders[a] != orders[b] for a in range(len(orders)) for b in range(a))
    np.testing.assert_array_equal(epoch(stream, 2, jax.random.key(3)), epoch(stream, 2))


def test_sequences_are_shuffled():
    """Not only documents: one document is read in another order than it stands."""
    stream = token_stream.TokenStream(numbered([200]), 5)
    firsts = epoch(stream, 0)[:, 0].tolist()
    assert firsts != sorted(firsts) and len({first % 5 for first in firsts}) == 1


def test_too_short_is_refused_in_one_line():
    assert token_stream.TokenStream(numbered([4, 7]), 5).sequences_an_epoch == 1
    with pytest.raises(ValueError) as refused:
        token_stream.TokenStream(numbered([4, 6]), 5)
    assert str(refused.value) == (
        "corpus: expected at least 11 tokens for sequences of 5, got 10; give more text or shorter sequences"
    )
