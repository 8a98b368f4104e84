"""Layers with windows: a text is reused only up to where every window's keys are intact (5.8 of test_prefix_tree.py).

A window W = 4 sees the last three tokens beside its own.
"""

import pytest

from jdecode.serving import page_table
from tests.serving.prefix_case import BASE, accounts, add, held, make_tree


@pytest.mark.parametrize("intact_from", range(9))
def test_cut_needs_the_keys_of_its_window(intact_from: int):
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    tree = make_tree(windows=(4,))
    add(tree, text, intact_from={4: intact_from})
    for length in range(9):
        is_intact = max(length - 3, 0) >= intact_from
        assert held(tree, text[:length]) == (length if is_intact else 0)
        assert held(tree, [*text[:length], 99]) == (length if is_intact else 0)


def test_window_of_one_sees_no_key_before_its_own():
    text = [1, 2, 3, 4]
    tree = make_tree(windows=(1,))
    add(tree, text, intact_from={1: 4})
    assert [held(tree, text[:length]) for length in range(5)] == [0, 1, 2, 3, 4]


def test_every_window_must_be_intact_not_one_of_them():
    text = [1, 2, 3, 4, 5, 6, 7, 8]
    for windows, intact_from, cut in (
        ((2, 4), {2: 7, 4: 5}, 8),
        ((2, 4), {2: 8, 4: 5}, 0),  # the smaller is lost, the larger is not
        ((2, 4), {2: 7, 4: 6}, 0),  # and the other way round
        ((1, 4), {1: 8, 4: 5}, 8),  # a window of one sees no key before its own
        ((2, 4), {4: 0}, 8),
        ((2, 4), None, 8),
        ((2, 9), {9: 1}, 0),
        ((2, 9), {2: 7, 9: 0}, 8),
    ):
        tree = make_tree(windows=windows)
        add(tree, text, intact_from=intact_from)
        assert held(tree, text) == cut, (windows, intact_from)


def test_cut_falls_back_to_an_earlier_node_that_is_intact():
    tree = make_tree(windows=(4,))
    add(tree, [1, 2, 3, 4, 5, 6])
    add(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9], intact_from={4: 8})
    add(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9], intact_from={4: 10})
    assert held(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]) == 6
    assert held(tree, [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9, 9, 9]) == 13
    match = tree.match(BASE, [1, 2, 3, 4, 5, 6, 7, 8], keep_last=0)
    assert match.num_tokens == 6 and len(match.pages) == 3  # what lies past the cut is not locked
    assert tree.pool.num_used == 3


def test_run_of_intact_keys_may_cross_nodes():
    tree = make_tree(windows=(4,))
    add(tree, [1, 2, 3, 4], intact_from={4: 3}, free=False)
    add(tree, [1, 2, 3, 4, 5, 6])
    assert held(tree, [1, 2, 3, 4, 5, 6]) == 6 and held(tree, [1, 2, 3, 4, 5]) == 0  # they need 3, 4, 5; and 2, 3, 4


def test_pages_that_are_more_intact_take_the_place_of_unused_ones():  # 5.8: else a lost window would never heal
    tree = make_tree(windows=(4,))
    text = [1, 2, 3, 4, 5, 6]
    add(tree, text, intact_from={4: 6})
    assert held(tree, text) == 0
    table = add(tree, text[:4], free=False)
    assert tree.match(BASE, text, keep_last=2).pages == table.pages and held(tree, text) == 4
    assert accounts(tree) == (1, 2, 10)


def test_pages_in_use_stay_though_others_are_more_intact():
    tree = make_tree(windows=(4,))
    user = add(tree, [1, 2, 3, 4], intact_from={4: 2}, free=False)
    table = add(tree, [1, 2, 3, 4], free=False)
    assert table.pages == user.pages and held(tree, [1, 2, 3, 4]) == 0 and accounts(tree) == (0, 2, 11)


def test_pages_of_a_fork_do_not_take_the_place_of_others():
    tree = make_tree(windows=(4,))
    add(tree, [1, 2])
    add(tree, [1, 2, 3, 4], intact_from={4: 4})
    table = page_table.PageTable(tree.pool, max_pages=2)
    table.append(4)
    fork = table.fork()
    tree.insert(BASE, [1, 2, 3, 4], table)
    table.free()
    tree.check()  # else the fork would hold the second page of the tree, but not the first
    fork.free()
    assert accounts(tree) == (2, 0, 11)


@pytest.mark.parametrize("window", [0, -1, True, 2.5])
def test_window_is_a_count(window):
    with pytest.raises(ValueError, match="window: expected a count of at least 1"):
        make_tree(windows=(4, window))
