"""What of a block is emitted, against a plain Python model of the rule: row by row, place by place."""

import dataclasses
import functools
import itertools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling
from jdecode.decode import emission
from jdecode.decode import state as state_lib
from tests.speculative.table_round import Lengths

VOCAB, OUTPUT_LEN, NUM_TOP = 13, 11, 2
CHAIN = sampling.Chain((sampling.TokenPenalties(), sampling.NoRepeatNgram(), sampling.MinNewTokens()))
STOP_IDS = [5, 12, state_lib.NO_STOP_ID]
ORDINARY = [0, 1, 2, 3, 4, 6, 7, 8, 9, 10, 11]
INVALID = sampling.INVALID_TOKEN


@dataclasses.dataclass(frozen=True)
class Row:
    """One row before a block, and the block."""

    status: int
    out: list[int]
    max_new: int
    latest: int
    tokens: list[int]
    num_open: int

    def emitted(self) -> tuple[list[int], int]:
        """The rule: the tokens that are emitted, and the status after them."""
        said: list[int] = []
        if self.status != state_lib.RUNNING:
            return said, self.status
        for token in self.tokens[: self.num_open]:
            if token == INVALID:
                return said, state_lib.INVALID
            said.append(token)
            if token in STOP_IDS:
                return said, state_lib.STOPPED
            if len(self.out) + len(said) == self.max_new:
                return said, state_lib.FULL
        return said, state_lib.RUNNING


def _every_row(places: int, rng: np.random.Generator) -> list[Row]:
    """A stop token, the limit and an invalid token at every place or none, any number of open places, ended rows."""
    rows = []
    at_any = [None, *range(places)]
    statuses = [state_lib.RUNNING, state_lib.RUNNING, state_lib.STOPPED, state_lib.FULL, state_lib.INVALID]
    for stop_at, invalid_at, room, num_open, status in itertools.product(
        at_any, at_any, range(1, places + 2), range(1, places + 1), statuses
    ):
        tokens = rng.choice(ORDINARY, places).tolist()
        if stop_at is not None:
            tokens[stop_at] = int(rng.choice(STOP_IDS[:2]))
        if invalid_at is not None:
            tokens[invalid_at] = INVALID
        out = rng.choice(ORDINARY, 1 + len(rows) % 3 + 3 * (len(rows) % 2)).tolist()
        rows.append(Row(status, out, len(out) + room, out[-1], tokens, num_open))
    return rows


def _state(rows: list[Row]) -> state_lib.DecodeState:
    fields = {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "min_new_tokens": 7}
    one = sampling.params_from_configs(
        [config.SamplingConfig(**fields)], vocab_size=VOCAB, prompts=[[3, 8]], history_len=17, stop_ids=[STOP_IDS[:2]]
    )
    params = jax.tree.map(lambda leaf: jnp.repeat(leaf, len(rows), axis=0), one)
    state = state_lib.init_state(
        cast(Any, Lengths(length_B=jnp.full(len(rows), 2, jnp.int32))),
        sampler=CHAIN.init(params, len(rows), VOCAB),
        key_B=sampling.request_keys([0] * len(rows), range(len(rows))),
        temperature_B=params.temperature_B,
        stop_ids_BX=jnp.asarray([STOP_IDS] * len(rows), jnp.int32),
        max_new_B=jnp.asarray([row.max_new for row in rows], jnp.int32),
        output_len=OUTPUT_LEN,
        num_top_logprobs=NUM_TOP,
    )
    out_BM = np.asarray([row.out + [0] * (OUTPUT_LEN - len(row.out)) for row in rows], np.int32)
    assert state.scores is not None
    marked = jax.tree.map(lambda leaf: jnp.full_like(leaf, 77), state.scores)
    return dataclasses.replace(
        state,
        token_B=jnp.asarray([row.latest for row in rows], jnp.int32),
        tokens_BM=jnp.asarray(out_BM),
        num_new_B=jnp.asarray([len(row.out) for row in rows], jnp.int32),
        status_B=jnp.asarray([row.status for row in rows], jnp.int32),
        sampler=_fed(state.sampler, [row.out for row in rows]),
        scores=marked,
    )


def _fed(sampler: Any, texts: list[list[int]]) -> Any:
    """Feeds each row its tokens, one by one."""
    for place in range(max(len(text) for text in texts)):
        token_B = jnp.asarray([text[place] if place < len(text) else 1 for text in texts], jnp.int32)
        is_live_B = jnp.asarray([place < len(text) for text in texts])
        sampler = _accept(sampler, token_B, is_live_B)
    return sampler


_accept = jax.jit(CHAIN.accept)


@jax.jit
def _commit(state, token_BP, num_open_B, logits_BPV):
    return emission.commit(CHAIN, state, token_BP, num_open_B, logits_BPV)


@functools.cache
def _case(places: int):
    """Every row, its state before the block, the logits, and what ``commit`` returns."""
    rng = np.random.default_rng(81)
    rows = _every_row(places, rng)
    state = _state(rows)
    token_BP = np.asarray([row.tokens for row in rows], np.int32)
    logits_BPV = rng.normal(scale=2.0, size=(len(rows), places, VOCAB)).astype(np.float32)
    num_open_B = jnp.asarray([row.num_open for row in rows], jnp.int32)
    after, num_emitted_B = _commit(state, jnp.asarray(token_BP), num_open_B, jnp.asarray(logits_BPV))
    return rows, state, logits_BPV, after, np.asarray(num_emitted_B)


PLACES = [1, 4]


@pytest.mark.parametrize("places", PLACES)
def test_tokens_and_statuses(places: int):
    rows, _, _, after, num_emitted_B = _case(places)
    seen = set()
    for number, row in enumerate(rows):
        said, status = row.emitted()
        seen.add((len(said), status))
        out = row.out + said
        assert num_emitted_B[number] == len(said), row
        assert int(after.num_new_B[number]) == len(out), row
        assert int(after.status_B[number]) == status, row
        assert int(after.token_B[number]) == out[-1], row
    out_BM = [row.out + row.emitted()[0] for row in rows]
    assert after.tokens_BM.tolist() == [out + [0] * (OUTPUT_LEN - len(out)) for out in out_BM]
    # Every end was met at every place, and rows that go on after any number of tokens.
    for place in range(places):
        assert {
            (place + 1, state_lib.RUNNING),
            (place + 1, state_lib.STOPPED),
            (place + 1, state_lib.FULL),
            (place, state_lib.INVALID),
        } <= seen
    assert {(0, status) for status in (state_lib.STOPPED, state_lib.FULL, state_lib.INVALID)} <= seen


@pytest.mark.parametrize("places", PLACES)
def test_the_sampler_is_as_if_fed_token_by_token(places: int):
    rows, state, _, after, _ = _case(places)
    expected = _fed(state.sampler, [row.emitted()[0] for row in rows])
    assert len(jax.tree.leaves(expected)) > 6
    for got, wanted in zip(jax.tree.leaves(after.sampler), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, wanted)
    # Against a plain count, too: two tokens of prompt, and the output, in order.
    penalties, ngrams, least = after.sampler
    for number in range(0, len(rows), 7):
        out = rows[number].out + rows[number].emitted()[0]
        assert penalties.output_count_BV[number].tolist() == np.bincount(out, minlength=VOCAB).tolist()
        assert ngrams.history_BS[number, : 2 + len(out)].tolist() == [3, 8, *out]
        assert int(ngrams.history_len_B[number]) == 2 + len(out)
        assert int(least.num_missing_B[number]) == max(7 - len(out), 0)


@pytest.mark.parametrize("places", PLACES)
def test_scores_stand_at_the_places_of_their_tokens(places: int):
    rows, state, logits_BPV, after, _ = _case(places)
    logits = logits_BPV.astype(np.float64)
    logprob_BPV = logits - np.log(np.exp(logits).sum(axis=2, keepdims=True))
    assert state.scores is not None and after.scores is not None
    expected = [np.array(leaf) for leaf in jax.tree.leaves(state.scores)]  # 77 wherever nothing is written
    logprob_BM, top_ids_BMJ, top_logprobs_BMJ = expected
    assert (logprob_BM == 77).all()
    for number, row in enumerate(rows):
        for place, token in enumerate(row.emitted()[0]):
            slot, values_V = len(row.out) + place, logprob_BPV[number, place]
            best = np.argsort(-values_V)[:NUM_TOP]
            logprob_BM[number, slot] = values_V[token]
            top_ids_BMJ[number, slot], top_logprobs_BMJ[number, slot] = best, values_V[best]
    np.testing.assert_allclose(after.scores.logprob_BM, logprob_BM, atol=1e-5)
    np.testing.assert_array_equal(after.scores.top_ids_BMJ, top_ids_BMJ)
    np.testing.assert_allclose(after.scores.top_logprobs_BMJ, top_logprobs_BMJ, atol=1e-5)


def test_nothing_else_changes():
    _, state, _, after, _ = _case(4)
    for name in ("cache", "max_new_B", "stop_ids_BX", "is_random_B"):
        for got, before in zip(
            jax.tree.leaves(getattr(after, name)), jax.tree.leaves(getattr(state, name)), strict=True
        ):
            np.testing.assert_array_equal(got, before)
    np.testing.assert_array_equal(jax.random.key_data(after.key_B), jax.random.key_data(state.key_B))


def test_a_block_without_scores():
    rows, state, logits_BPV, after, _ = _case(4)
    tokens = jnp.asarray([row.tokens for row in rows], jnp.int32)
    num_open_B = jnp.asarray([row.num_open for row in rows], jnp.int32)
    plain, _ = _commit(dataclasses.replace(state, scores=None), tokens, num_open_B, jnp.asarray(logits_BPV))
    assert plain.scores is None
    np.testing.assert_array_equal(plain.tokens_BM, after.tokens_BM)


def test_each_place_is_processed_after_the_tokens_before_it():
    # Nothing repeated (n-grams of one token): place i forbids the prompt and the i proposals before it.
    chain = sampling.Chain((sampling.NoRepeatNgram(),))
    params = sampling.params_from_configs(
        [config.SamplingConfig(no_repeat_ngram_size=1)] * 2,
        vocab_size=VOCAB,
        prompts=[[3], [8, 2]],
        history_len=17,
        stop_ids=[[], []],
    )
    proposals = [[4, 12, 0], [7, 9, 7]]
    logits_BPV = jnp.asarray(np.random.default_rng(82).normal(size=(2, 4, VOCAB)), jnp.float32)
    sampler = chain.init(params, 2, VOCAB)
    processed_BPV = np.asarray(emission.process(chain, sampler, jnp.asarray(proposals, jnp.int32), logits_BPV))
    for row, prompt in enumerate(([3], [8, 2])):
        for place in range(4):
            expected_V = np.array(logits_BPV[row, place])
            expected_V[prompt + proposals[row][:place]] = -np.inf
            np.testing.assert_array_equal(processed_BPV[row, place], expected_V)
