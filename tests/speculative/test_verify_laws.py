"""The law of what whole speculative rounds emit, and how often they accept, under both rules.

Every law: 20,000 rows with their own keys, in rounds of G = 3 proposals until each row has three tokens. The tokens at
the first, the second and the third place, and the pairs of neighbours, are held against the target's law by chi-square
with a false-alarm rate of 1e-4 (``table_round.FALSE_ALARM``). With some 80 such tests, a correct rule with new seeds
fails this module once in some 120 runs. The acceptance of the first proposal lies within three standard errors of the
formula: 0.27 % false alarm for each of 16 numbers.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.decode import state as state_lib
from jdecode.decode import step as step_lib
from jdecode.speculative import verify
from tests.speculative import table_round
from tests.speculative.table_round import START_TOKEN, VOCAB, assert_law

NUM_ROWS = 20_000
NUM_ROUNDS = 3
OUTPUT_LEN = NUM_ROUNDS * (table_round.G + 1) + 1  # no row ends

RULES = [verify.Rejection(), verify.Coupled()]
RULE_NAMES = ["rejection", "coupled"]

TOKENS = (9, 2, 5)  # where the three tokens of the pair lie
P, Q = (0.6, 0.3, 0.1), (0.3, 0.3, 0.4)

# Name: filters, seed of the pair of logits. With these seeds every filter changes the acceptance much.
FILTERS = {
    "temperature": ({"temperature": 0.7}, 40),
    "top_k": ({"temperature": 1.3, "top_k": 4}, 44),
    "top_p": ({"temperature": 1.0, "top_p": 0.8}, 41),
    "min_p": ({"temperature": 1.2, "min_p": 0.2}, 41),
    "everything": ({"temperature": 1.5, "top_k": 7, "top_p": 0.9, "min_p": 0.15}, 51),
}


def _spread(probabilities: tuple[float, ...]) -> np.ndarray:
    """The logits of three tokens' law in the vocabulary; the others cannot come."""
    logits_V = np.full(VOCAB, -np.inf)
    logits_V[list(TOKENS)] = np.log(probabilities)
    return logits_V


def _random_pair(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of a target, and of a draft that is like it."""
    rng = np.random.default_rng([FILTERS[name][1], list(FILTERS).index(name)])
    target_V = rng.normal(scale=1.5, size=VOCAB)
    return target_V, target_V + rng.normal(scale=1.0, size=VOCAB)


def _run(step, target, draft, fields: dict, seed: int, num_rounds: int = NUM_ROUNDS):
    state = table_round.begin(step, NUM_ROWS, fields, seed=seed, output_len=OUTPUT_LEN)
    return table_round.run(step, table_round.table(target), draft, state, jnp.int32(num_rounds))


def _first_three(state) -> np.ndarray:
    assert int(jnp.min(state.num_new_B)) >= 3
    return np.asarray(state.decode.tokens_BM[:, :3])


def _assert_independent(tokens_B3: np.ndarray, p_V: np.ndarray) -> None:
    for place in range(3):
        assert_law(tokens_B3[:, place], p_V)
    assert_law(tokens_B3[:, :2], np.multiply.outer(p_V, p_V))
    assert_law(tokens_B3[:, 1:], np.multiply.outer(p_V, p_V))


def _acceptance(rule: verify.Verify, p_V: np.ndarray, q_V: np.ndarray) -> float:
    """The formula of each rule, for one proposal."""
    if isinstance(rule, verify.Rejection):
        return float(np.minimum(p_V, q_V).sum())
    both = np.flatnonzero((p_V > 0) & (q_V > 0))
    return float(sum(1 / np.maximum(p_V / p_V[token], q_V / q_V[token]).sum() for token in both))


def _assert_acceptance(state_after_one, expected: float) -> None:
    counts = state_after_one.drafting.counts
    tested = np.asarray(counts.tested_BG[:, 0])
    assert tested.tolist() == [1] * NUM_ROWS
    measured = float(np.asarray(counts.accepted_BG[:, 0]).mean())
    error = np.sqrt(expected * (1 - expected) / NUM_ROWS)
    assert abs(measured - expected) < 3 * error, (measured, expected, error)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_the_pair(rule):
    p_V, q_V = np.zeros(VOCAB), np.zeros(VOCAB)
    p_V[list(TOKENS)], q_V[list(TOKENS)] = P, Q
    draft_VV = table_round.table(_spread(Q))
    after = _run(table_round.rounds(rule), _spread(P), draft_VV, {"temperature": 1.0}, seed=101)
    tokens_B3 = _first_three(after)
    _assert_independent(tokens_B3, p_V)
    # All three at once: 27 cells, with 20 counts expected in the least.
    assert_law(tokens_B3, np.multiply.outer(np.multiply.outer(p_V, p_V), p_V))

    # .3 + .3 + .1; and 1 / (1 + 1 + 4/3) + 1 / (2 + 1 + 4/3) + 1 / (6 + 3 + 1) = .3 + .2308 + .1
    by_hand = {"rejection": 0.7, "coupled": 0.3 + 3 / 13 + 0.1}[RULE_NAMES[RULES.index(rule)]]
    assert _acceptance(rule, p_V, q_V) == pytest.approx(by_hand, abs=1e-12)
    one = _run(table_round.rounds(rule), _spread(P), draft_VV, {"temperature": 1.0}, seed=102, num_rounds=1)
    _assert_acceptance(one, by_hand)


def test_the_noise_of_a_proposal_is_not_used_again():
    # p - q leaves two tokens, .3 and .2, and token 0 is among them: a uniform number and the first of a row's noise
    # numbers would be the same if their keys were. Accepted with .05 + .1 + .35 = .5.
    p_V, q_V = np.zeros(VOCAB), np.zeros(VOCAB)
    p_V[[0, 6, 9]], q_V[[0, 6, 9]] = (0.35, 0.3, 0.35), (0.05, 0.1, 0.85)
    with np.errstate(divide="ignore"):
        target_V, draft_VV = np.log(p_V), table_round.table(np.log(q_V))
    step = table_round.rounds(verify.Rejection())
    _assert_independent(_first_three(_run(step, target_V, draft_VV, {"temperature": 1.0}, seed=111)), p_V)
    _assert_acceptance(_run(step, target_V, draft_VV, {"temperature": 1.0}, seed=112, num_rounds=1), 0.5)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
@pytest.mark.parametrize("name", FILTERS)
def test_laws_that_passed_filters(rule, name: str):
    fields, (target_V, draft_V) = FILTERS[name][0], _random_pair(name)
    p_V, q_V = table_round.law(target_V, **fields), table_round.law(draft_V, **fields)
    seed = 200 + list(FILTERS).index(name)
    draft_VV = table_round.table(draft_V)
    after = _run(table_round.rounds(rule), target_V, draft_VV, fields, seed=seed)
    _assert_independent(_first_three(after), p_V)
    one = _run(table_round.rounds(rule), target_V, draft_VV, fields, seed=seed + 50, num_rounds=1)
    expected = _acceptance(rule, p_V, q_V)
    _assert_acceptance(one, expected)
    if name == "temperature":
        return
    # Were the filters left out on either side, the acceptance would be another: eight standard errors away, or more.
    whole_p_V, whole_q_V = table_round.law(target_V), table_round.law(draft_V)
    for wrong in [(whole_p_V, whole_q_V), (p_V, whole_q_V), (whole_p_V, q_V)]:
        assert abs(_acceptance(rule, *wrong) - expected) > 8 * np.sqrt(expected * (1 - expected) / NUM_ROWS), wrong


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_laws_that_depend_on_the_token_before(rule):
    # A law taken at the place before or after shows in the pairs.
    rng = np.random.default_rng(43)
    target_VV = rng.normal(scale=1.5, size=(VOCAB, VOCAB))
    draft_VV = target_VV + rng.normal(scale=0.7, size=(VOCAB, VOCAB))
    fields = {"temperature": 0.9, "top_k": 5}
    p_VV = np.stack([table_round.law(row_V, **fields) for row_V in target_VV])
    after = _run(table_round.rounds(rule), target_VV, jnp.asarray(draft_VV, jnp.float32), fields, seed=301)
    tokens_B3 = _first_three(after)
    first_V = p_VV[START_TOKEN]
    assert_law(tokens_B3[:, 0], first_V)
    assert_law(tokens_B3[:, :2], first_V[:, None] * p_VV)
    assert_law(tokens_B3[:, 1:], (first_V @ p_VV)[:, None] * p_VV)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_laws_that_penalties_change_within_a_block(rule):
    # Presence: the logits of tokens that are out lose log 3, so their weights are a third. An n-gram size of 2: the
    # prompt and the first token, 7 7, forbid a second 7 after a 7.
    target_V, draft_V = _random_pair("top_p")
    target_V[START_TOKEN] = target_V.max() + 0.5  # so that 7 7 comes often
    fields = {"temperature": 1.0, "presence_penalty": float(np.log(3)), "no_repeat_ngram_size": 2}
    p_V = table_round.law(target_V)

    def next_law(*out: int) -> np.ndarray:
        weights_V = p_V.copy()
        weights_V[list(set(out))] /= 3
        text = [START_TOKEN, *out]
        for before, token in itertools.pairwise(text):
            if before == text[-1]:
                weights_V[token] = 0
        return weights_V / weights_V.sum()

    joint_VVV = np.zeros((VOCAB, VOCAB, VOCAB))
    for first in range(VOCAB):
        for second in range(VOCAB):
            joint_VVV[first, second] = p_V[first] * next_law(first)[second] * next_law(first, second)
    tokens_B3 = _first_three(_run(table_round.rounds(rule), target_V, table_round.table(draft_V), fields, seed=311))
    assert p_V[START_TOKEN] > 0.25 and joint_VVV[START_TOKEN, START_TOKEN].sum() == 0
    assert_law(tokens_B3[:, 1], joint_VVV.sum(axis=(0, 2)))
    assert_law(tokens_B3[:, 2], joint_VVV.sum(axis=(0, 1)))
    assert_law(tokens_B3[:, :2], joint_VVV.sum(axis=2))
    assert_law(tokens_B3[:, 1:], joint_VVV.sum(axis=0))


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_proposals_that_were_not_drawn(rule):
    # All of q lies on the proposal, so it is accepted with probability p(token): .3 for token 2 of the pair.
    p_V = np.zeros(VOCAB)
    p_V[list(TOKENS)] = P
    step = table_round.rounds(rule, table_round.PointDraft(), table_round.PLAIN_CHAIN)
    proposal_G = jnp.asarray([2, 9, 4], jnp.int32)  # 4 cannot come at all
    after = _run(step, _spread(P), proposal_G, {"temperature": 1.0}, seed=321)
    _assert_independent(_first_three(after), p_V)
    accepted_G, tested_G = (
        np.asarray(counts_BG).sum(axis=0)
        for counts_BG in (after.drafting.counts.accepted_BG, after.drafting.counts.tested_BG)
    )
    assert accepted_G[2] == 0 < tested_G[2]
    _assert_acceptance(_run(step, _spread(P), proposal_G, {"temperature": 1.0}, seed=322, num_rounds=1), 0.3)


def test_an_argmax_that_is_reported_as_a_draw_is_found_out():
    # The argmax of q is its third token, of p = .1 and q = .4. It is accepted with .25; else the first stands there,
    # the only one of which p has more than q: .75, 0, .25.
    step = table_round.rounds(verify.Rejection(), table_round.ArgmaxDraft(), table_round.PLAIN_CHAIN)
    state = _run(step, _spread(P), table_round.table(_spread(Q)), {"temperature": 1.0}, seed=331, num_rounds=1)
    first_B = np.asarray(state.decode.tokens_BM[:, 0])
    wrong_V, p_V = np.zeros(VOCAB), np.zeros(VOCAB)
    wrong_V[list(TOKENS)], p_V[list(TOKENS)] = (0.75, 0.0, 0.25), P
    assert_law(first_B, wrong_V)
    statistic, limit = table_round.chi_square(np.bincount(first_B, minlength=VOCAB), p_V)
    assert limit == pytest.approx(18.42, abs=0.01)  # 2 degrees of freedom: -2 log 1e-4
    # Expected: 20,000 (.15^2 / .6 + .3 + .15^2 / .1) = 11,250.
    assert statistic > 600 * limit
    with pytest.raises(AssertionError):
        assert_law(first_B, p_V)


def test_coupled_rounds_write_the_text_of_plain_decoding():
    rng = np.random.default_rng(47)
    target_VV = rng.normal(scale=1.5, size=(VOCAB, VOCAB))
    draft_VV = target_VV + rng.normal(size=(VOCAB, VOCAB))
    fields = {"temperature": 0.8, "top_p": 0.95, "repetition_penalty": 1.4}
    step = table_round.rounds(verify.Coupled())
    start = table_round.begin(step, NUM_ROWS, fields, seed=341, output_len=OUTPUT_LEN, stop_ids=(4,))
    plain_step = step_lib.PlainStep(step.model, step.chain)
    advance = jax.jit(lambda table_VV, state: plain_step(table_VV, state))
    target, plain = table_round.table(target_VV), start.decode
    for _ in range(OUTPUT_LEN):
        plain = advance(target, plain)
    assert {state_lib.STOPPED, state_lib.FULL} == set(np.asarray(plain.status_B).tolist())
    for draft in (draft_VV, target_VV, np.flip(draft_VV, axis=1)):
        after = table_round.run(step, target, table_round.table(draft), start, jnp.int32(OUTPUT_LEN)).decode
        np.testing.assert_array_equal(after.tokens_BM, plain.tokens_BM)
        np.testing.assert_array_equal(after.status_B, plain.status_B)
        np.testing.assert_array_equal(after.cache.length_B, plain.cache.length_B)


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_rows_at_temperature_0_write_the_greedy_text(rule):
    rng = np.random.default_rng(53)
    target_VV = rng.normal(size=(VOCAB, VOCAB))
    draft_VV = target_VV + rng.normal(scale=0.5, size=(VOCAB, VOCAB))
    greedy, token = [], START_TOKEN
    for _ in range(OUTPUT_LEN):
        token = int(target_VV[token].argmax())
        greedy.append(token)
    after = _run(table_round.rounds(rule), target_VV, table_round.table(draft_VV), {}, seed=351, num_rounds=OUTPUT_LEN)
    assert np.unique(after.decode.tokens_BM, axis=0).tolist() == [greedy]
    counts = after.drafting.counts
    assert 0 < int(counts.accepted_BG.sum()) < int(counts.tested_BG.sum())
