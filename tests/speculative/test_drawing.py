"""What a draft with logits proposes, where its model is a table of logits after each token."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling
from jdecode.decode import state as state_lib
from jdecode.sampling import draw
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import drawing
from tests.speculative.table_round import Lengths, assert_law

VOCAB, G = 11, 4
CHAIN = sampling.Chain((sampling.TokenPenalties(), sampling.NoRepeatNgram(), sampling.Temperature()))
TASK = draft_lib.Task(chain=CHAIN, vocab_size=VOCAB, most=G, purpose=sampling.PURPOSE_DRAFT, needs_law=True)


def _state(num_rows: int, fields: dict[str, Any], *, latest: list[int], prompt=(7,), seed: int = 5):
    params = sampling.params_from_configs(
        [config.SamplingConfig(**fields)] * num_rows,
        vocab_size=VOCAB,
        prompts=[prompt] * num_rows,
        history_len=17,
        stop_ids=[[]] * num_rows,
    )
    state = state_lib.init_state(
        cast(Any, Lengths(length_B=3 * jnp.arange(num_rows, dtype=jnp.int32) % 21)),
        sampler=CHAIN.init(params, num_rows, VOCAB),
        key_B=sampling.request_keys([seed] * num_rows, range(num_rows)),
        temperature_B=params.temperature_B,
        stop_ids_BX=jnp.full((num_rows, 1), state_lib.NO_STOP_ID, jnp.int32),
        max_new_B=jnp.full(num_rows, 9, jnp.int32),
        output_len=9,
        num_top_logprobs=None,
    )
    return dataclasses.replace(state, token_B=jnp.asarray(latest, jnp.int32))


@functools.partial(jax.jit, static_argnums=0)
def _propose(task: draft_lib.Task, draft_XV: jax.Array, state: state_lib.DecodeState, want_B: jax.Array):
    """Proposes from the table of a vocabulary of any size; its cache counts what each row has read."""

    def feed(num_read_B, token_B, is_asked_B):
        return draft_XV[jnp.minimum(token_B, draft_XV.shape[0] - 1)], num_read_B + is_asked_B

    return drawing.propose(task, feed, jnp.zeros_like(want_B), state, want_B)


def _chain_of(table_VV: np.ndarray, token: int, num: int) -> list[int]:
    """The greedy tokens after a token."""
    tokens = []
    for _ in range(num):
        token = int(table_VV[token].argmax())
        tokens.append(token)
    return tokens


def _table(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(scale=1.5, size=(VOCAB, VOCAB)).astype(np.float32)


@pytest.mark.parametrize("needs_law", [False, True])
def test_rows_that_want_different_numbers(needs_law: bool):
    table_VV = _table(71)
    latest, want = [7, 0, 10, 9, 4], [2, 0, 4, 1, 3]
    task = dataclasses.replace(TASK, needs_law=needs_law)
    proposals, num_read_B = _propose(
        task, jnp.asarray(table_VV), _state(5, {}, latest=latest), jnp.asarray(want, jnp.int32)
    )
    assert proposals.num_B.tolist() == want
    assert proposals.token_BG.shape == (5, G) and proposals.token_BG.dtype == jnp.int32
    for row, num in enumerate(want):
        expected = _chain_of(table_VV, latest[row], num)
        assert proposals.token_BG[row, :num].tolist() == expected
    # All are read but the last one.
    assert num_read_B.tolist() == [2, 0, 4, 1, 3]  # the latest token, and all proposals but the last
    assert (proposals.logits_BGV is not None) == needs_law


def test_no_row_wants_anything():
    proposals, num_read_B = _propose(
        TASK, jnp.asarray(_table(72)), _state(5, {}, latest=[1, 2, 3, 4, 5]), jnp.zeros(5, jnp.int32)
    )
    assert not proposals.num_B.any() and not num_read_B.any()


@pytest.mark.parametrize("purpose", [sampling.PURPOSE_DRAFT, sampling.PURPOSE_TOKEN])
def test_draws_are_addressed_by_the_place_of_the_token(purpose: int):
    # The first proposal stands one place after the latest token, which is at the length of the cache.
    table_VV = _table(73)
    num_rows = 67
    latest = [row % VOCAB for row in range(num_rows)]
    state = _state(num_rows, {"temperature": 0.8}, latest=latest)
    proposals, _ = _propose(
        dataclasses.replace(TASK, purpose=purpose), jnp.asarray(table_VV), state, jnp.full(num_rows, G, jnp.int32)
    )
    assert proposals.logits_BGV is not None and proposals.logits_BGV.dtype == jnp.float32
    token_B = np.asarray(latest)
    for place in range(G):
        logits_BV = (table_VV[token_B] - table_VV[token_B].max(axis=1, keepdims=True)) / np.float32(0.8)
        np.testing.assert_allclose(proposals.logits_BGV[:, place], logits_BV, atol=1e-5)
        position_B = 3 * jnp.arange(num_rows, dtype=jnp.int32) % 21 + 1 + place
        own_B = draw.draw(jnp.asarray(logits_BV), state.key_B, position_B, jnp.ones(num_rows, bool), purpose=purpose)
        np.testing.assert_array_equal(proposals.token_BG[:, place], own_B)
        token_B = np.asarray(own_B)


def test_penalties_see_the_drafts_own_tokens():
    # The logits are always 3, 2, 1.5, 1 for 9, 4, 2, 0, and negative for the rest. Halved for what the row holds: 9
    # falls to 1.5, then 4 to 1; now 9 ties with 2, the lower id; then 2 falls to .75.
    logits_V = np.full(VOCAB, -5.0, np.float32)
    logits_V[[9, 4, 2, 0]] = 3.0, 2.0, 1.5, 1.0
    table = jnp.asarray(np.broadcast_to(logits_V, (VOCAB, VOCAB)))
    want_B = jnp.asarray([4, 3], jnp.int32)
    state = _state(2, {"repetition_penalty": 2.0}, latest=[7, 7])
    proposals, _ = _propose(TASK, table, state, want_B)
    assert proposals.token_BG[0].tolist() == [9, 4, 2, 9]
    assert proposals.token_BG[1, :3].tolist() == [9, 4, 2]

    # No pair twice: 7 (the prompt) 9, 9 9, not 9 9 again but 9 4, and 4 9.
    state = _state(2, {"no_repeat_ngram_size": 2}, latest=[7, 7])
    proposals, _ = _propose(TASK, table, state, want_B)
    assert proposals.token_BG[0].tolist() == [9, 9, 4, 9]
    # The rows' own state is as it was: the target decides what is said.
    assert state.sampler[1].history_len_B.tolist() == [1, 1]


def test_the_laws_are_those_after_the_penalties():
    # Presence: what is out loses 0.5; the logits of the second place show the first token.
    table_VV = np.zeros((VOCAB, VOCAB), np.float32)
    table_VV[:, 6] = 2.0
    state = _state(2, {"temperature": 0.25, "presence_penalty": 0.5}, latest=[1, 3])
    proposals, _ = _propose(TASK, jnp.asarray(table_VV), state, jnp.full(2, 3, jnp.int32))
    assert proposals.token_BG[:, 0].tolist() == [6, 6]  # e^-8 against it, ten times
    assert proposals.logits_BGV is not None
    expected_2V = np.full((2, VOCAB), -8.0)
    expected_2V[1] = -6.0  # (0 - 1.5) / 0.25
    expected_2V[:, 6] = 0.0
    for row in range(2):
        np.testing.assert_allclose(proposals.logits_BGV[row, :2], expected_2V, atol=1e-6)


@pytest.mark.parametrize("width", [8, 13])
def test_vocabularies_of_another_width(width: int):
    # What the draft lacks cannot be drawn; what only the draft has is cut off, here its own favourite.
    rng = np.random.default_rng(74)
    table = rng.normal(size=(width, width)).astype(np.float32)
    table[:, width - 1] = 9.0
    num_rows = 301
    state = _state(num_rows, {"temperature": 1.0}, latest=[row % VOCAB for row in range(num_rows)])
    proposals, _ = _propose(TASK, jnp.asarray(table), state, jnp.full(num_rows, G, jnp.int32))
    assert proposals.num_B.tolist() == [G] * num_rows
    assert proposals.logits_BGV is not None and proposals.logits_BGV.shape == (num_rows, G, VOCAB)
    law_BGV = np.asarray(jax.nn.softmax(proposals.logits_BGV, axis=-1))
    np.testing.assert_allclose(law_BGV.sum(axis=2), 1.0, atol=1e-5)
    tokens = np.asarray(proposals.token_BG)
    held = min(width, VOCAB)
    assert not law_BGV[:, :, held:].any() and (law_BGV[:, :, :held] > 0).all()
    assert tokens.max() < held
    if width < VOCAB:
        assert (tokens == width - 1).mean() > 0.9
    first = table[np.minimum(np.asarray(state.token_B), width - 1)][:, :held].astype(np.float64)
    weights = np.exp(first - first.max(axis=1, keepdims=True))
    np.testing.assert_allclose(law_BGV[:, 0, :held], weights / weights.sum(axis=1, keepdims=True), atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_whose_logits_break_propose_no_more(temperature: float):
    # Each token leads to the next one; after 5 the model is broken. 3 4 5 is said after 2, nothing after 5.
    table_VV = np.full((VOCAB, VOCAB), -np.inf, np.float32)
    table_VV[np.arange(VOCAB), (np.arange(VOCAB) + 1) % VOCAB] = 0.0
    table_VV[5] = np.nan
    state = _state(5, {"temperature": temperature}, latest=[2, 5, 6, 4, 2])
    proposals, num_read_B = _propose(TASK, jnp.asarray(table_VV), state, jnp.asarray([4, 4, 4, 4, 2], jnp.int32))
    assert proposals.num_B.tolist() == [3, 0, 4, 1, 2]
    assert proposals.token_BG[0, :3].tolist() == [3, 4, 5]
    assert proposals.token_BG[2].tolist() == [7, 8, 9, 10]
    assert proposals.token_BG[3, 0] == 5
    # The row that broke after its third token had read all three; a row that proposes no more reads no more.
    assert num_read_B.tolist() == [4, 1, 4, 2, 2]
    assert (np.asarray(proposals.token_BG) >= 0).all()


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_the_law_that_is_reported_is_the_law_of_the_draws(dtype):
    # bfloat16 holds 300, 301.2 and 302.4 as 300, 302 and 302, which is another law. 20,000 rows, false alarm 1e-4 for
    # each of two places.
    num_rows = 20_000
    logits_V = np.full(VOCAB, -np.inf)
    logits_V[[9, 3, 6]] = 300.0, 301.2, 302.4
    rounded = jnp.asarray(np.broadcast_to(logits_V, (VOCAB, VOCAB))).astype(jnp.bfloat16).astype(dtype)
    latest = jnp.full(num_rows, 7, jnp.int32)
    state = _one_row_repeated({"temperature": 1.0}, num_rows)
    proposals, _ = _propose(TASK, rounded, dataclasses.replace(state, token_B=latest), jnp.full(num_rows, 2, jnp.int32))
    assert proposals.logits_BGV is not None
    by_hand = np.zeros(VOCAB)
    by_hand[[9, 3, 6]] = np.exp([-2.0, 0.0, 0.0]) / (np.exp(-2.0) + 2)
    for place in range(2):
        law_BV = np.asarray(jax.nn.softmax(proposals.logits_BGV[:, place], axis=-1), np.float64)
        np.testing.assert_allclose(law_BV, np.broadcast_to(by_hand, law_BV.shape), atol=1e-6)
        assert_law(np.asarray(proposals.token_BG[:, place]), by_hand)
        with pytest.raises(AssertionError):  # so it would be, had the draws seen the logits before rounding
            assert_law(
                np.asarray(proposals.token_BG[:, place]), np.exp(logits_V - 302.4) / np.exp(logits_V - 302.4).sum()
            )


def _one_row_repeated(fields: dict[str, Any], num_rows: int) -> state_lib.DecodeState:
    """Many rows that are equal but for their keys."""
    state = _state(1, fields, latest=[7])
    keyless = dataclasses.replace(state, key_B=jnp.zeros(1, jnp.int32))
    many = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_rows, axis=0), keyless)
    return dataclasses.replace(many, key_B=sampling.request_keys([75] * num_rows, range(num_rows)))
