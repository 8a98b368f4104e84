"""Both rules of acceptance, a block at a time; the laws of whole rounds are in ``test_verify_laws.py``."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import sampling
from jdecode.sampling import draw
from jdecode.speculative import proposals as proposals_lib
from jdecode.speculative import verify
from tests.speculative.table_round import assert_law, law

VOCAB, PLACES, G = 11, 4, 3
RULES = [verify.Rejection(), verify.Coupled()]
RULE_NAMES = ["rejection", "coupled"]
INVALID = sampling.INVALID_TOKEN


def _keys(seed: int, num_rows: int) -> jax.Array:
    return sampling.request_keys([seed] * num_rows, range(num_rows))


def _positions(num_rows: int, places: int = PLACES) -> jax.Array:
    """Each row stands somewhere else."""
    return 5 * jnp.arange(num_rows, dtype=jnp.int32)[:, None] % 35 + jnp.arange(1, places + 1, dtype=jnp.int32)[None, :]


def _proposals(tokens, num, logits=None) -> proposals_lib.Proposals:
    return proposals_lib.Proposals(
        token_BG=jnp.asarray(tokens, jnp.int32),
        num_B=jnp.asarray(num, jnp.int32),
        logits_BGV=None if logits is None else jnp.asarray(logits, jnp.float32),
    )


@functools.partial(jax.jit, static_argnums=0)
def _compiled(rule: verify.Verify, *arguments) -> tuple[jax.Array, jax.Array]:
    return rule.choose(*arguments)


def _choose(
    rule, target, proposals, seed: int = 6, is_random: bool | np.ndarray = True
) -> tuple[np.ndarray, np.ndarray]:
    target_BPV = jnp.asarray(target, jnp.float32)
    num_rows, places, _ = target_BPV.shape
    is_random_B = jnp.broadcast_to(jnp.asarray(is_random), (num_rows,))
    key_B, position_BP = _keys(seed, num_rows), _positions(num_rows, places)
    token_BP, num_accepted_B = _compiled(rule, target_BPV, proposals, key_B, position_BP, is_random_B)
    assert token_BP.dtype == num_accepted_B.dtype == jnp.int32
    assert token_BP.shape == (num_rows, places) and num_accepted_B.shape == (num_rows,)
    return np.asarray(token_BP), np.asarray(num_accepted_B)


def _draws(target, seed: int = 6, purpose: int = sampling.PURPOSE_TOKEN) -> np.ndarray:
    """What a random row draws at each place, one place after another."""
    target_BPV = jnp.asarray(target, jnp.float32)
    num_rows, places, _ = target_BPV.shape
    key_B, position_BP = _keys(seed, num_rows), _positions(num_rows, places)
    always_B = jnp.ones(num_rows, bool)
    columns = [
        draw.draw(target_BPV[:, place], key_B, position_BP[:, place], always_B, purpose=purpose)
        for place in range(places)
    ]
    return np.stack(columns, axis=1)


def _num_agreeing(tokens, own, num) -> list[int]:
    """Counts, row by row, the proposals that are the target's own tokens, up to the first that is not."""
    counts = []
    for row_tokens, row_own, row_num in zip(tokens, own, num, strict=True):
        count = 0
        while count < row_num and row_tokens[count] == row_own[count]:
            count += 1
        counts.append(count)
    return counts


def _partly_right(own_BP: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Proposals of which about three of four are the target's own tokens."""
    own_BG = own_BP[:, :-1]
    return np.where(rng.random(own_BG.shape) < 0.75, own_BG, rng.integers(0, VOCAB, own_BG.shape))


@pytest.mark.parametrize("kind", ["right", "partly", "wrong"])
def test_coupled_places_hold_the_draws_of_plain_decoding(kind: str):
    rng = np.random.default_rng(61)
    num_rows = 67
    target_BPV = rng.normal(scale=1.5, size=(num_rows, PLACES, VOCAB))
    target_BPV[:, :, 3] = -np.inf
    own_BP = _draws(target_BPV)
    tokens_BG = {
        "right": own_BP[:, :-1],
        "partly": _partly_right(own_BP, rng),
        "wrong": (own_BP[:, :-1] + 1) % VOCAB,
    }[kind]
    num_B = rng.integers(0, G + 1, num_rows)
    token_BP, num_accepted_B = _choose(verify.Coupled(), target_BPV, _proposals(tokens_BG, num_B))
    expected = _num_agreeing(tokens_BG, own_BP, num_B)
    assert num_accepted_B.tolist() == expected
    assert set(expected) == ({0} if kind == "wrong" else {0, 1, 2, 3})
    for row, num in enumerate(expected):
        assert token_BP[row, : num + 1].tolist() == own_BP[row, : num + 1].tolist()


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_greedy_rows_accept_the_argmax_alone(rule, with_law: bool):
    rng = np.random.default_rng(62)
    num_rows = 67
    target_BPV = rng.normal(size=(num_rows, PLACES, VOCAB))
    target_BPV[::5, :, 8] = target_BPV[::5, :, 2] = 4.0  # a tie: the lower id
    best_BP = target_BPV.argmax(axis=2)
    tokens_BG, num_B = _partly_right(best_BP, rng), rng.integers(0, G + 1, num_rows)
    tokens_BG[0] = [8, 2, 2]
    num_B[0] = 3
    law_BGV = rng.normal(size=(num_rows, G, VOCAB)) if with_law else None
    proposals = _proposals(tokens_BG, num_B, law_BGV)
    token_BP, num_accepted_B = _choose(rule, target_BPV, proposals, is_random=False)
    expected = _num_agreeing(tokens_BG, best_BP, num_B)
    assert expected[0] == 0 and set(expected) == {0, 1, 2, 3}
    assert num_accepted_B.tolist() == expected
    for row, num in enumerate(expected):
        assert token_BP[row, : num + 1].tolist() == best_BP[row, : num + 1].tolist()


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_greedy_and_random_rows_do_not_disturb_each_other(rule):
    rng = np.random.default_rng(63)
    num_rows = 66
    target_BPV = rng.normal(size=(num_rows, PLACES, VOCAB))
    law_BGV = target_BPV[:, :G] + rng.normal(scale=0.5, size=(num_rows, G, VOCAB))
    tokens_BG, num_B = law_BGV.argmax(axis=2), rng.integers(0, G + 1, num_rows)
    proposals = _proposals(tokens_BG, num_B, law_BGV)
    is_random_B = rng.random(num_rows) < 0.5
    mixed_BP, mixed_B = _choose(rule, target_BPV, proposals, is_random=is_random_B)
    greedy_BP, greedy_B = _choose(rule, target_BPV, proposals, is_random=False)
    random_BP, random_B = _choose(rule, target_BPV, proposals, is_random=True)
    assert (greedy_B != random_B).any() and (greedy_BP != random_BP).any()
    np.testing.assert_array_equal(mixed_B, np.where(is_random_B, random_B, greedy_B))
    wanted_BP = np.where(is_random_B[:, None], random_BP, greedy_BP)
    is_open_BP = np.arange(PLACES)[None, :] <= mixed_B[:, None]  # what stands at the other places is no token
    np.testing.assert_array_equal(mixed_BP[is_open_BP], wanted_BP[is_open_BP])


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_rows_without_proposals_draw_as_plain_decoding(rule):
    # Whatever stands in the unused places, and also where there are none.
    rng = np.random.default_rng(64)
    num_rows = 67
    target_BPV = rng.normal(size=(num_rows, PLACES, VOCAB))
    own_BP = _draws(target_BPV)
    law_BGV = np.full((num_rows, G, VOCAB), np.nan)
    proposals = _proposals(own_BP[:, :G], np.zeros(num_rows), law_BGV)
    token_BP, num_accepted_B = _choose(rule, target_BPV, proposals)
    assert not num_accepted_B.any()
    np.testing.assert_array_equal(token_BP[:, 0], own_BP[:, 0])

    for logits in (None, np.zeros((num_rows, 0, VOCAB))):
        one = _proposals(np.zeros((num_rows, 0)), np.zeros(num_rows), logits)
        token_B1, num_accepted_B = _choose(rule, target_BPV[:, :1], one)
        assert not num_accepted_B.any()
        np.testing.assert_array_equal(token_B1[:, 0], own_BP[:, 0])
        greedy_B1, _ = _choose(rule, target_BPV[:, :1], one, is_random=False)
        np.testing.assert_array_equal(greedy_B1[:, 0], target_BPV[:, 0].argmax(axis=1))


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_equal_laws_accept_every_proposal(rule):
    # 10,000 rows; after the last proposal of each stands a draw of plain decoding.
    rng = np.random.default_rng(65)
    num_rows = 10_000
    target_BPV = rng.normal(scale=2.5, size=(num_rows, PLACES, VOCAB))
    target_BPV[:, :, 6] = -np.inf
    drawn_BP = _draws(target_BPV, purpose=rule.draft_purpose)
    num_B = np.arange(num_rows) % (G + 1)
    proposals = _proposals(drawn_BP[:, :G], num_B, target_BPV[:, :G])
    token_BP, num_accepted_B = _choose(rule, target_BPV, proposals)
    np.testing.assert_array_equal(num_accepted_B, num_B)
    every = np.arange(num_rows)
    np.testing.assert_array_equal(token_BP[every, num_B], _draws(target_BPV)[every, num_B])
    is_accepted_BG = np.arange(G)[None, :] < num_B[:, None]
    np.testing.assert_array_equal(np.where(is_accepted_BG, token_BP[:, :G] - drawn_BP[:, :G], 0), 0)


@pytest.mark.parametrize("with_law", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_tokens_that_the_target_cannot_say_are_never_accepted(rule, with_law: bool):
    # 20,000 rows that propose token 4, which a filter of the target took out. What stands there follows p: q has
    # nothing where p has something. False alarm 1e-4, four times.
    num_rows = 20_000
    target_V = np.log([0.05, 0.2, 0.1, 0.08, 1.0, 0.02, 0.15, 0.12, 0.09, 0.13, 0.06])
    target_V[4] = -np.inf
    law_V = np.full(VOCAB, -np.inf)
    law_V[4] = 0.7
    target_BPV = np.broadcast_to(target_V, (num_rows, PLACES, VOCAB))
    law_BGV = np.broadcast_to(law_V, (num_rows, G, VOCAB)) if with_law else None
    proposals = _proposals(np.full((num_rows, G), 4), np.full(num_rows, G), law_BGV)
    token_BP, num_accepted_B = _choose(rule, target_BPV, proposals, seed=7)
    assert not num_accepted_B.any()
    assert_law(token_BP[:, 0], law(target_V))


def test_what_is_left_of_two_laws():
    # p - q of (.5, .3, .2) and (.3, .2, .5) leaves .2, .1, 0: two thirds and one third. Token 2 is accepted with
    # .2 / .5, token 0 always. 20,000 rows that propose 0 and then 2; false alarm 1e-4, and 4 standard errors 6e-5.
    num_rows = 20_000
    target_BPV = np.broadcast_to(np.log([0.5, 0.3, 0.2]), (num_rows, PLACES, 3))
    law_BGV = np.broadcast_to(np.log([0.3, 0.2, 0.5]), (num_rows, G, 3))
    tokens_BG = np.broadcast_to([0, 2, 1], (num_rows, G))
    token_BP, num_accepted_B = _choose(
        verify.Rejection(), target_BPV, _proposals(tokens_BG, np.full(num_rows, 2), law_BGV), seed=8
    )
    assert set(num_accepted_B.tolist()) == {1, 2}
    is_refused_B = num_accepted_B == 1
    assert abs(is_refused_B.mean() - 0.6) < 4 * np.sqrt(0.6 * 0.4 / num_rows)
    assert_law(token_BP[is_refused_B, 1], np.asarray([2 / 3, 1 / 3, 0.0]))
    # After two accepted ones, nothing is taken off: the third place was not proposed.
    assert_law(token_BP[~is_refused_B, 2], np.asarray([0.5, 0.3, 0.2]))
    assert (token_BP[:, 0] == 0).all() and (token_BP[~is_refused_B, 1] == 2).all()


def test_a_refusal_that_leaves_nothing_draws_from_the_target():
    # In float32 both laws are (1 / 2, 1 / 2, 0), but the draft could say the third, with e^-99. False alarm 1e-4.
    num_rows = 10_000
    target_BPV = np.broadcast_to([0.0, 0.0, -np.inf], (num_rows, PLACES, 3))
    law_BGV = np.broadcast_to([0.0, 0.0, -99.0], (num_rows, G, 3))
    proposals = _proposals(np.full((num_rows, G), 2), np.full(num_rows, G), law_BGV)
    token_BP, num_accepted_B = _choose(verify.Rejection(), target_BPV, proposals, seed=9)
    assert not num_accepted_B.any()
    assert_law(token_BP[:, 0], np.asarray([0.5, 0.5, 0.0]))


@pytest.mark.parametrize("is_random", [False, True])
@pytest.mark.parametrize("broken_place", range(PLACES))
@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_a_broken_place_is_invalid_and_those_before_it_are_not(rule, broken_place: int, is_random: bool):
    # Every other place says the proposal, 9 (V - 2), and nothing else; the last row is whole.
    for broken in (np.nan, np.inf, -np.inf):
        target_BPV = np.full((2, PLACES, VOCAB), -np.inf)
        target_BPV[:, :, 9] = 0.0
        target_BPV[0, broken_place, :] = broken
        for law_BGV in (None, np.broadcast_to(target_BPV[1, :G], (2, G, VOCAB))):
            proposals = _proposals(np.full((2, G), 9), [G, G], law_BGV)
            token_BP, num_accepted_B = _choose(rule, target_BPV, proposals, is_random=is_random)
            assert num_accepted_B.tolist() == [broken_place, G], broken
            assert token_BP[0, : broken_place + 1].tolist() == [9] * broken_place + [INVALID], broken
            assert token_BP[1].tolist() == [9] * PLACES


@pytest.mark.parametrize("rule", RULES, ids=RULE_NAMES)
def test_a_row_depends_on_its_own_key_and_position_alone(rule):
    rng = np.random.default_rng(66)
    num_rows = 7
    target_BPV = jnp.asarray(rng.normal(size=(num_rows, PLACES, VOCAB)), jnp.float32)
    proposals = _proposals(
        rng.integers(0, VOCAB, (num_rows, G)), [3, 0, 2, 1, 3, 3, 2], rng.normal(size=(num_rows, G, VOCAB))
    )
    key_B, position_BP = _keys(12, num_rows), _positions(num_rows)
    always_B = jnp.ones(num_rows, bool)
    token_BP, num_accepted_B = _compiled(rule, target_BPV, proposals, key_B, position_BP, always_B)
    order = jnp.asarray([4, 0, 6, 2, 1, 5, 3])
    moved_proposals = jax.tree.map(lambda leaf: leaf[order], proposals)
    moved = _compiled(rule, target_BPV[order], moved_proposals, key_B[order], position_BP[order], always_B)
    np.testing.assert_array_equal(moved[0], token_BP[order])
    np.testing.assert_array_equal(moved[1], num_accepted_B[order])


def test_rules_are_reached_by_name():
    assert verify.RULES["rejection"] == verify.Rejection() and verify.RULES["coupled"] == verify.Coupled()
    # A draft that shared the noise of the token would make rejection accept by that noise, and be wrong.
    assert verify.Rejection().draft_purpose not in (
        sampling.PURPOSE_TOKEN,
        sampling.PURPOSE_ACCEPT,
        sampling.PURPOSE_RESIDUAL,
    )
    assert verify.Coupled().draft_purpose == sampling.PURPOSE_TOKEN
