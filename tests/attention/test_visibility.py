"""The rule of visibility, and the soft cap."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import visibility

EMPTY = int(visibility.EMPTY)


def _rows(mask) -> list[str]:
    return ["".join("x" if seen else "." for seen in row) for row in np.asarray(mask)[0]]


# Drawn by hand: queries down, keys across. Keys at 0 .. 7, then an empty slot.
@pytest.mark.parametrize(
    ("window", "num_sinks", "expected"),
    [
        (None, 0, ["x........", "xxxxx....", "xxxxxxxx."]),
        (None, 2, ["x........", "xxxxx....", "xxxxxxxx."]),
        (1, 0, ["x........", "....x....", ".......x."]),
        (3, 0, ["x........", "..xxx....", ".....xxx."]),
        (3, 2, ["x........", "xxxxx....", "xx...xxx."]),
        (8, 0, ["x........", "xxxxx....", "xxxxxxxx."]),
    ],
)
def test_visible(window, num_sinks, expected):
    query = jnp.asarray([[0, 4, 7]], jnp.int32)
    key = jnp.asarray([[*range(8), EMPTY]], jnp.int32)
    assert _rows(visibility.visible(query, key, window=window, num_sinks=num_sinks)) == expected


def test_rows_of_a_batch_are_apart():
    mask = visibility.visible(jnp.asarray([[2], [5]]), jnp.asarray([[1, 2, 3], [6, 5, 4]]), window=2, num_sinks=0)
    np.testing.assert_array_equal(mask, [[[True, True, False]], [[False, True, True]]])


def test_empty_is_later_than_every_query():
    last = jnp.asarray([[EMPTY - 1]], jnp.int32)
    for window in (None, 4, EMPTY):
        assert not visibility.visible(last, jnp.asarray([[EMPTY]], jnp.int32), window=window, num_sinks=3).any()
    np.testing.assert_array_equal(visibility.held(jnp.asarray([[0, EMPTY, 7]])), [[True, False, True]])


def test_soft_cap_by_hand():
    # 5 tanh(0.2) = 0.98687..., 5 tanh(12) = 5 - 4e-10
    got = visibility.soft_capped(jnp.asarray([0.0, 1.0, -1.0, 60.0, -60.0]), 5.0)
    np.testing.assert_allclose(got, [0, 0.9868766, -0.9868766, 5, -5], rtol=1e-6)
    np.testing.assert_array_equal(visibility.soft_capped(jnp.asarray([60.0]), None), [60.0])


# Groups of 4, settled when 2 tokens came after them: 0 .. 3 from position 5 on, 4 .. 7 from position 9 on.
@pytest.mark.parametrize(("query", "num_settled"), [(0, 0), (3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8), (13, 12)])
def test_settling_by_hand(query, num_settled):
    settling = visibility.Settling(group_len=4, lag=2)
    assert int(settling.end(jnp.int32(query + 1))) == num_settled
    key = jnp.asarray([[*range(14), EMPTY]], jnp.int32)
    for is_settled in (True, False):
        share = visibility.Share(settling=settling, is_settled=is_settled)
        covered = np.asarray(share.covers(jnp.asarray([[query]], jnp.int32), key))[0, 0]
        np.testing.assert_array_equal(covered, (np.arange(15) < num_settled) == is_settled)
