"""Judging by held-out files: which tokens count, bits a byte by hand, and the same loss through the cached path."""

import dataclasses
import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies

from jdecode import config as config_lib
from jdecode import language_model
from jdecode.models import transformer
from jdecode.training import held_out
from tests import tiny_models

END = 0


def numbered(lengths: list[int]) -> list[np.ndarray]:
    """Documents in which no token is twice, each with the end token last."""
    ends = np.cumsum([1, *lengths])
    return [np.append(np.arange(end - length, end), END) for end, length in zip(ends[1:], lengths, strict=True)]


@hypothesis.settings(deadline=None, max_examples=200)
@hypothesis.given(
    lengths=strategies.lists(strategies.integers(0, 40), min_size=1, max_size=5), T=strategies.integers(2, 11)
)
def test_each_token_is_predicted_once_from_enough_context(lengths, T):
    documents = numbered(lengths)
    predicted: list[tuple[int, int]] = []
    starts = {int(document[0]): idx for idx, document in enumerate(documents) if len(document) > 1}
    document_idx, place = -1, 0
    for piece in held_out.pieces(documents, T, END):
        assert piece.tokens.dtype == np.int32
        assert 1 <= piece.num_context < len(piece.tokens) <= T + 1
        if piece.tokens[0] == END:  # only a document's first piece starts with the end of the one before
            document_idx, place = document_idx + 1, 0
            assert piece.num_context == 1
        whole = [END, *documents[document_idx].tolist()]
        first = place + 1 - piece.num_context  # where the piece starts in the document with the end token before it
        assert piece.tokens.tolist() == whole[first : first + len(piece.tokens)]
        for offset in range(piece.num_context, len(piece.tokens)):
            # All there is before it, or at least half a sequence.
            assert offset >= min(place + 1, math.ceil(T / 2))
            predicted.append((document_idx, place))
            place += 1
        np.testing.assert_array_equal(piece.predicted, piece.tokens[piece.num_context :])
    assert len(starts) <= len(documents)
    assert predicted == [(idx, at) for idx, document in enumerate(documents) for at in range(len(document))]


@pytest.mark.parametrize(
    ("total", "count", "expected"),
    [(3, 5, [0, 1, 2]), (5, 5, [0, 1, 2, 3, 4]), (10, 5, [0, 2, 4, 6, 8]), (7, 3, [0, 2, 4]), (7, 1, [0])],
)
def test_some_pieces_are_spread_evenly(total, count, expected):
    pieces = [held_out.Piece(tokens=np.asarray([idx, 1]), num_context=1) for idx in range(total)]
    assert [int(piece.tokens[0]) for piece in held_out.some(pieces, count)] == expected


def test_units_by_hand():
    # 12 nats over 4 tokens and 6 bytes: 3 a token, e^3 = 20.0855 choices, 12 / ln 2 / 6 = 2.885390 bits a byte.
    loss = held_out.HeldOutLoss(nats=12.0, num_tokens=4, num_bytes=6)
    assert loss.nats_a_token == 3.0
    np.testing.assert_allclose([loss.perplexity, loss.bits_per_byte], [20.085537, 2.8853901], rtol=1e-7)


# Training counts distances to sinks by the text.
CONFIG = dataclasses.replace(
    tiny_models.MIXED,
    layers=tuple(
        dataclasses.replace(layer, sink_positions="text") if layer.num_sinks else layer
        for layer in tiny_models.MIXED.layers
    ),
)
V = CONFIG.vocab_size
NUM_BYTES = np.arange(V) % 5
NUM_BYTES[END] = 0
LENGTHS = [30, 3, 12, 0, 17]
TOLERANCE = 5e-5
"""Of a mean loss in nats: logits of about 5 in two orders of summation (``tiny_models.LOGITS_ATOL``)."""


@pytest.fixture(scope="module")
def judged() -> list[held_out.Piece]:
    rows = tiny_models.random_rows(LENGTHS)
    return held_out.pieces([np.asarray([*row, END]) for row in rows], 8, END)


def model_of(backend: str = "banded") -> tuple[transformer.Transformer, dict]:
    return transformer.Transformer(CONFIG, backend=backend), {"params": tiny_models.random_params(CONFIG)}


def test_evaluate_by_hand(judged):
    """One piece at a time, through the reference, in float64."""
    model, params = model_of()
    got = held_out.evaluate(model, params, judged, NUM_BYTES)
    reference, _ = model_of("reference")
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for piece in judged:
        (logits,) = tiny_models.whole(reference, params["params"], [piece.tokens.tolist()], width=9)
        for at in range(piece.num_context, len(piece.tokens)):
            row = logits[at - 1].astype(np.float64)
            nats += math.log(np.exp(row - row.max()).sum()) + row.max() - row[piece.tokens[at]]
            num_tokens += 1
            num_bytes += int(piece.tokens[at]) % 5
    assert (got.num_tokens, got.num_bytes) == (num_tokens, num_bytes)
    assert num_tokens == sum(LENGTHS) + len(LENGTHS)
    np.testing.assert_allclose(got.nats_a_token, nats / num_tokens, rtol=0, atol=TOLERANCE)


def test_a_model_that_knows_nothing_pays_log_v_a_token(judged):
    model, params = model_of()
    zeros = {"params": {**params["params"], "head": {"weight": jnp.zeros_like(params["params"]["head"]["weight"])}}}
    loss = held_out.evaluate(model, zeros, judged, NUM_BYTES)
    np.testing.assert_allclose(loss.nats_a_token, math.log(V), rtol=1e-6)


def test_the_cached_path_gives_the_same_loss(judged):
    """Training judges without a cache, the library scores through ring buffers; the windows are crossed."""
    model, params = model_of()
    lm = language_model.LanguageModel(
        config=CONFIG, model=transformer.Transformer(CONFIG), params=params, tokenizer=None
    )
    assert any(layer.window is not None and layer.window < 8 for layer in lm.config.layers)
    assert isinstance(lm.config.layers[0], config_lib.LayerConfig)
    got = held_out.evaluate_by(lm.score, judged, NUM_BYTES)
    expected = held_out.evaluate(model, params, judged, NUM_BYTES)
    assert (got.num_tokens, got.num_bytes) == (expected.num_tokens, expected.num_bytes)
    np.testing.assert_allclose(got.nats_a_token, expected.nats_a_token, rtol=0, atol=TOLERANCE)


def test_evaluate_by_asks_for_whole_pieces_and_counts_the_predicted(judged):
    """A scorer that says how many nats each place costs: its own index."""
    asked = []

    def score(rows: list[list[int]]) -> list[np.ndarray]:
        assert len(rows) <= held_out.BATCH_SIZE
        asked.extend(rows)
        return [-np.arange(1, len(row), dtype=np.float32) for row in rows]

    loss = held_out.evaluate_by(score, judged, NUM_BYTES)
    assert asked == [piece.tokens.tolist() for piece in judged] and len(asked) > held_out.BATCH_SIZE
    assert loss.nats == sum(at for piece in judged for at in range(piece.num_context, len(piece.tokens)))


def test_a_loss_that_no_float_can_turn_into_a_perplexity():
    ruined = held_out.HeldOutLoss(nats=7100.0, num_tokens=10, num_bytes=20)  # e^710 is over the greatest float
    assert ruined.perplexity == math.inf
    for nats in (7100.0, math.nan, math.inf):
        with pytest.raises(FloatingPointError, match=r"^weights: expected a finite loss and perplexity, got "):
            held_out.HeldOutLoss(nats=nats, num_tokens=10, num_bytes=20).check_finite("weights")
    held_out.HeldOutLoss(nats=7000.0, num_tokens=10, num_bytes=20).check_finite("weights")
