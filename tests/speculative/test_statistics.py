"""What rounds count, by scripts whose sums are done by hand."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.decode import state as state_lib
from jdecode.speculative import statistics, verify
from tests.speculative import table_round
from tests.speculative.table_round import VOCAB

STEP = table_round.rounds(verify.Rejection(), table_round.PointDraft(), table_round.PLAIN_CHAIN)
NEXT = table_round.table(10.0 * np.roll(np.eye(VOCAB), 1, axis=1))
"""After each token comes the next one; after 10, 0."""

STOP = [0, *[state_lib.NO_STOP_ID] * 7]
NO_STOP = [state_lib.NO_STOP_ID] * 8


def _begin(latest: list[int], max_new: list[int], stop_ids: list[list[int]], status: list[int] | None = None):
    state = table_round.begin(STEP, len(latest), {}, seed=0, output_len=9)
    decode = dataclasses.replace(
        state.decode,
        token_B=jnp.asarray(latest, jnp.int32),
        max_new_B=jnp.asarray(max_new, jnp.int32),
        stop_ids_BX=jnp.asarray(stop_ids, jnp.int32),
        status_B=jnp.asarray(status or [state_lib.RUNNING] * len(latest), jnp.int32),
    )
    return dataclasses.replace(state, decode=decode)


def _round(state, proposal: list[int]):
    return table_round.run(STEP, NEXT, jnp.asarray(proposal, jnp.int32), state, jnp.int32(1))


def test_two_of_three_and_then_one_at_which_the_row_ends():
    # 8 9 (10 instead of 5); then 0, a stop token, after which 5, which is wrong, was never tested.
    state = _round(_begin([7], [9], [STOP]), [8, 9, 5])
    assert state.decode.tokens_BM[0, :4].tolist() == [8, 9, 10, 0]
    state = _round(state, [0, 5, 2])
    assert state.decode.status_B.tolist() == [state_lib.STOPPED]
    assert state.decode.num_new_B.tolist() == [4]
    counts = state.drafting.counts
    assert counts.tested_BG.tolist() == [[2, 1, 1]]
    assert counts.accepted_BG.tolist() == [[2, 1, 0]]
    assert statistics.summary(counts) == {
        "drafted": 6,
        "accepted": 3,
        "target_calls": 2,
        "target_places": 8,
        "acceptance_rate": 0.5,
        "acceptance_by_place": [1.0, 1.0, 0.0],
        "tested": 4,
        "tested_by_place": [2, 1, 1],
    }


def test_rows_are_counted_apart():
    # Row 0 as above. Row 1 has no stop token: 8 9 (10), 0 1 2 (3). Row 2 does not run. Row 3 has room for 5: 8 9 (10),
    # then one proposal, 0, and (1). Row 4 says (4), then (5): nothing is accepted.
    running, done = state_lib.RUNNING, state_lib.FULL
    state = _begin(
        [7, 7, 7, 7, 3],
        [9, 9, 9, 5, 9],
        [STOP, NO_STOP, NO_STOP, NO_STOP, STOP],
        [running, running, done, running, running],
    )
    state = _round(_round(state, [8, 9, 5]), [0, 1, 2])
    assert state.decode.num_new_B.tolist() == [4, 7, 0, 5, 2]
    counts = state.drafting.counts
    assert counts.rounds_B.tolist() == [2, 2, 0, 2, 2]
    assert counts.drafted_B.tolist() == [6, 6, 0, 4, 6]
    assert counts.tested_BG.tolist() == [[2, 1, 1], [2, 2, 2], [0, 0, 0], [2, 1, 1], [2, 0, 0]]
    assert counts.accepted_BG.tolist() == [[2, 1, 0], [2, 2, 1], [0, 0, 0], [2, 1, 0], [0, 0, 0]]
    # A row that has ended counts nothing more, though the target is called for the others.
    after = _round(state, [6, 4, 5])
    assert after.drafting.counts.rounds_B.tolist() == [2, 3, 0, 2, 3]
    assert after.drafting.counts.drafted_B.tolist() == [6, 7, 0, 4, 9]  # row 1 has room for 2
    assert after.drafting.counts.tested_BG[:, 0].tolist() == [2, 3, 0, 2, 3]
    assert after.drafting.counts.accepted_BG[:, 0].tolist() == [2, 2, 0, 2, 1]
    assert int(after.drafting.counts.target_calls) == 3 and int(after.drafting.counts.target_places) == 12


def test_a_stop_token_at_the_last_proposal_keeps_the_targets_own_back():
    # Of 9 10 0 all three are tested and accepted; the token after them is not said.
    state = _round(_begin([8], [9], [STOP]), [9, 10, 0])
    assert state.decode.num_new_B.tolist() == [3] and state.decode.status_B.tolist() == [state_lib.STOPPED]
    assert state.drafting.counts.tested_BG.tolist() == state.drafting.counts.accepted_BG.tolist() == [[1, 1, 1]]


def test_a_refused_place_counts_as_tested_though_the_row_ends_there():
    # The target's own token in place of the second proposal is the stop token.
    state = _round(_begin([9], [9], [STOP]), [10, 4, 5])
    assert state.decode.tokens_BM[0, :2].tolist() == [10, 0] and state.decode.num_new_B.tolist() == [2]
    assert state.drafting.counts.tested_BG.tolist() == [[1, 1, 0]]
    assert state.drafting.counts.accepted_BG.tolist() == [[1, 0, 0]]


def test_no_drafts_is_a_rate_of_zero():
    # Room for one token each: nothing can be proposed, and the block is one place.
    state = _round(_begin([7, 4], [1, 1], [NO_STOP, NO_STOP]), [8, 9, 10])
    assert state.decode.num_new_B.tolist() == [1, 1] and state.decode.tokens_BM[:, 0].tolist() == [8, 5]
    nothing = {"drafted": 0, "accepted": 0, "acceptance_rate": 0.0, "acceptance_by_place": [None, None, None]}
    nothing |= {"tested": 0, "tested_by_place": [0, 0, 0]}
    assert statistics.summary(state.drafting.counts) == {**nothing, "target_calls": 1, "target_places": 1}
    assert statistics.summary(statistics.no_counts(2, 3)) == {**nothing, "target_calls": 0, "target_places": 0}


def test_rounds_add_up():
    counts = statistics.no_counts(2, 4)
    rounds = [([True, True], [4, 2], [3, 0], [2, 0]), ([True, False], [3, 0], [3, 0], [3, 0])]
    for num_places, (is_live, drafted, tested, accepted) in zip((5, 1), rounds, strict=True):
        counts = statistics.add_round(
            counts,
            jnp.asarray(is_live),
            num_places,
            drafted_B=jnp.asarray(drafted),
            tested_B=jnp.asarray(tested),
            accepted_B=jnp.asarray(accepted),
        )
    assert counts.rounds_B.tolist() == [2, 1] and counts.drafted_B.tolist() == [7, 2]
    assert counts.tested_BG.tolist() == [[2, 2, 2, 0], [0, 0, 0, 0]]
    assert counts.accepted_BG.tolist() == [[2, 2, 1, 0], [0, 0, 0, 0]]
    summed = statistics.summary(counts)
    assert summed["target_calls"] == 2 and summed["target_places"] == 6
    assert summed["drafted"] == 9 and summed["accepted"] == 5
    assert summed["acceptance_rate"] == pytest.approx(5 / 9)
    assert summed["acceptance_by_place"] == [1.0, 1.0, 0.5, None]
