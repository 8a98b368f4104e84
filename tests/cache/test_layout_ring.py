"""The slots of a ring buffer, counted by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.cache import layout_full, layout_ring


def test_slots_by_hand():
    ring = layout_ring.RingLayout(window=3, slack=1, num_sinks=2)
    # Sinks 0 and 1 keep slots 0 and 1; from 2 on, four slots are used again and again.
    assert ring.capacity == 6
    np.testing.assert_array_equal(ring.slot(jnp.arange(12)), [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2, 3])
    no_sinks = layout_ring.RingLayout(window=4)
    assert no_sinks.capacity == 4
    np.testing.assert_array_equal(no_sinks.slot(jnp.arange(9)), [0, 1, 2, 3, 0, 1, 2, 3, 0])


def test_survivors_by_hand():
    ring = layout_ring.RingLayout(window=3, slack=1, num_sinks=2)
    # Of a text of 9 tokens: both sinks, and 5, 6, 7, 8.
    survives = ring.survives(jnp.arange(9), jnp.int32(9))
    np.testing.assert_array_equal(np.flatnonzero(survives), [0, 1, 5, 6, 7, 8])
    np.testing.assert_array_equal(ring.survives(jnp.arange(4), jnp.int32(4)), [True] * 4)


@pytest.mark.parametrize("slack", [0, 1, 4])
def test_what_a_ring_may_do(slack):
    ring = layout_ring.RingLayout(window=5, slack=slack, num_sinks=1)
    assert (ring.max_len, ring.max_block_len, ring.max_rollback) == (None, slack + 1, slack + 1)


def test_equal_layouts_are_one():
    assert layout_ring.RingLayout(window=4) == layout_ring.RingLayout(window=4)
    assert len({layout_ring.RingLayout(window=4), layout_ring.RingLayout(window=4, slack=1)}) == 2


def test_full_layout():
    full = layout_full.FullLayout(capacity=7)
    assert (full.capacity, full.max_len, full.max_block_len) == (7, 7, 7) and full.max_rollback >= 2**30
    np.testing.assert_array_equal(full.slot(jnp.asarray([0, 6, 7, 90])), [0, 6, 7, 90])
    np.testing.assert_array_equal(full.survives(jnp.asarray([0, 3]), jnp.int32(99)), [True, True])
