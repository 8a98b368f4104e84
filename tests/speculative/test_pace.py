"""How many tokens are proposed: by what was accepted lately, without a clock, row by row."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from jdecode.speculative import pace

G = 4
# A proposal costs a tenth of a plain step, a block of five 1.4 of them, and choosing tokens nothing.
COSTS = pace.Costs(draft=0.1, block=1.0, place=0.1, greedy=0.0, random=0.0, is_drawn=True)


def rows(num: int, costs: pace.Costs | None = COSTS) -> pace.Pace:
    return pace.begin(jnp.zeros(num, bool), costs, G)


def after(
    now: pace.Pace, accepted: list[int], tested: list[int], *, nothing: list[bool] | None = None, rounds: int = 1
) -> pace.Pace:
    is_nothing = nothing or [False] * len(tested)
    for _ in range(rounds):
        now = pace.update(now, jnp.asarray(accepted), jnp.asarray(tested), jnp.asarray(is_nothing))
    return now


def test_the_cost_of_a_round_is_that_of_its_parts():
    # n proposals: (n * (c + d) + v + d * 5) / (1 + d), v = 1 + 0.1 * 4, d = 0.5 where a row draws and 0.25 where not.
    costs = pace.Costs(draft=0.2, block=1.0, place=0.1, greedy=0.25, random=0.5, is_drawn=True)
    now = pace.begin(jnp.asarray([False, True]), costs, G)
    greedy = [(n * 0.45 + 1.4 + 0.25 * 5) / 1.25 for n in (1, 2, 3, 4)]
    drawn = [(n * 0.7 + 1.4 + 0.5 * 5) / 1.5 for n in (1, 2, 3, 4)]
    np.testing.assert_allclose(now.round_cost_BG, [greedy, drawn], rtol=1e-6)


def test_the_expected_speed_is_that_of_leviathan():
    # Nothing tested: alpha is the prior's 0.75. With alpha 0.75 and n = 2: 1 + 0.75 + 0.5625 = 2.3125 tokens for
    # 1.4 + 0.2 steps.
    speed_BG = np.asarray(pace.expected_speed(rows(1)))
    np.testing.assert_allclose(speed_BG[0, 1], 2.3125 / 1.6, rtol=1e-6)
    np.testing.assert_allclose(speed_BG[0, 3], (2.3125 + 0.421875 + 0.31640625) / 1.8, rtol=1e-6)


def test_all_accepted_proposes_all_and_none_accepted_pauses():
    now = after(rows(2), [4, 0], [4, 1], rounds=10)
    assert pace.want(now).tolist() == [4, 0]


def test_the_length_follows_the_acceptance():
    costs = pace.Costs(draft=0.3, block=1.0, place=0.0, greedy=0.0, random=0.0, is_drawn=True)
    now = pace.begin(jnp.zeros(3, bool), costs, G)
    # alpha about 1, 0.7 and 0.5, c = 0.3, v = 1: the best n are 4; 2 (1.7 / 1.3 < 2.19 / 1.6 > 2.53 / 1.9); 1.
    now = after(now, [40, 28, 20], [40, 40, 40], rounds=20)
    assert pace.want(now).tolist() == [4, 2, 1]


def test_pauses_double_up_to_a_bound_and_end_with_success():
    now, lengths = rows(1), []
    for _ in range(8):
        while pace.want(now).tolist() != [0]:
            now = after(now, [0], [1])
        length = 0
        while pace.want(now).tolist() == [0]:
            now, length = after(now, [0], [0]), length + 1
        lengths.append(length)
    first, most = pace.LEAST_PAUSE, pace.MOST_PAUSE
    assert lengths == [min(first * 2**turn, most) for turn in range(8)]
    assert lengths[-1] == lengths[-2] == most
    now = after(now, [4], [4], rounds=8)
    assert pace.want(now).tolist() == [4]
    assert now.next_pause_B.tolist() == [first]


def test_a_round_that_tested_nothing_changes_no_verdict():
    now = after(rows(1), [2], [3], rounds=3)
    same = after(now, [0], [0], rounds=5)
    np.testing.assert_array_equal(pace.expected_speed(same), pace.expected_speed(now))


def test_a_draft_that_proposes_nothing_pauses_like_one_that_is_refused():
    refused, nothing = rows(1), rows(1)
    for _ in range(100):
        is_asked = pace.want(nothing).tolist() != [0]
        refused = after(refused, [0], [int(is_asked)])
        nothing = after(nothing, [0], [0], nothing=[is_asked])
        assert pace.want(nothing).tolist() == pace.want(refused).tolist()
    assert nothing.next_pause_B.tolist() == [pace.MOST_PAUSE]


def test_a_look_up_that_finds_nothing_is_asked_again():
    now = rows(1, dataclasses.replace(COSTS, is_look_up=True))
    same = after(now, [0], [0], nothing=[True], rounds=100)
    assert pace.want(same).tolist() == pace.want(now).tolist() != [0]


def test_rows_that_are_not_adaptive_always_propose_all():
    now = after(rows(2, None), [0, 4], [4, 4], rounds=20)
    assert pace.want(now).tolist() == [G, G]


def test_a_row_depends_on_itself_alone():
    together = after(rows(3), [0, 2, 4], [1, 3, 4], rounds=6)
    for row, (accepted, tested) in enumerate([(0, 1), (2, 3), (4, 4)]):
        alone = after(rows(1), [accepted], [tested], rounds=6)
        assert pace.want(alone).tolist() == [pace.want(together).tolist()[row]]
        assert alone.pause_B.tolist() == [together.pause_B.tolist()[row]]


def test_larger_targets_make_choices_cheap_and_accelerators_make_blocks_so():
    small = pace.estimate("cpu", target_bytes=20_000_000, draft_share=0.1, is_drawn=True)
    large = pace.estimate("cpu", target_bytes=2_000_000_000, draft_share=0.1, is_drawn=True)
    assert small.random > 50 * large.random > 0 and small.random > small.greedy
    device = pace.estimate("tpu", target_bytes=2_000_000_000, draft_share=0.1, is_drawn=True)
    assert device.place == 0 < small.place
