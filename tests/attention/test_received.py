"""The attention that slots get, beside a plain loop over queries, heads and slots in float64."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import received, segment, visibility

EMPTY = int(visibility.EMPTY)
B, T, N, K, H, S = 2, 3, 4, 2, 6, 11


def expected(q, query_position, real, k, position, *, scale, soft_cap):
    total = np.zeros((B, S))
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(S) if position[b, s] <= query_position[b, t]]
            if not real[b, t] or not seen:
                continue
            for n in range(N):
                scores = [scale * float(np.dot(q[b, t, n], k[b, s, n // (N // K)])) for s in seen]
                scores = [score if soft_cap is None else soft_cap * math.tanh(score / soft_cap) for score in scores]
                weights = [math.exp(score) for score in scores]
                for s, weight in zip(seen, weights, strict=True):
                    total[b, s] += weight / sum(weights)
    return total


@pytest.mark.parametrize(("block_size", "soft_cap"), [(256, None), (4, 1.5)])
def test_sums_of_weights(block_size, soft_cap):
    rng = np.random.default_rng(5)
    q, k = (rng.normal(size=(B, size, heads, H)) for size, heads in ((T, N), (S, K)))
    # Slots in no order; some are empty, and what they hold is no number.
    position = np.stack([rng.permutation(S), rng.permutation(S)]).astype(np.int32)
    position[0, 3], position[1, 5:8] = EMPTY, EMPTY
    k_poisoned = np.where((position == EMPTY)[:, :, None, None], np.nan, k)
    query_position = np.asarray([[4, 5, 6], [8, 9, 10]], np.int32)
    real = np.asarray([[True, True, False], [True, True, True]])
    want = expected(q, query_position, real, k, position, scale=0.7, soft_cap=soft_cap)
    part = segment.Segment(
        keys=segment.ArrayRows(data_BSKH=jnp.asarray(k_poisoned, jnp.float32)),
        values=segment.ArrayRows(data_BSKH=jnp.full((B, S, K, H), jnp.nan)),
        position_BS=jnp.asarray(position),
        first_slot=jnp.int32(0),
        end_slot=jnp.int32(S),
    )
    got = received.received(
        jnp.asarray(q, jnp.float32),
        jnp.asarray(query_position),
        jnp.asarray(real),
        part,
        scale=0.7,
        soft_cap=soft_cap,
        block_size=block_size,
    )
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-6)
    # Each head of each query that counts has a weight of 1 to give: 4 heads, 2 and 3 queries.
    np.testing.assert_allclose(np.asarray(got).sum(axis=1), [8, 12], rtol=1e-5)


def test_queries_that_see_nothing_or_do_not_count_give_nothing():
    k = jnp.ones((1, 3, 1, 2))
    part = segment.whole_segment(k, k, jnp.asarray([[5, EMPTY, 7]], jnp.int32))
    query_position = jnp.asarray([[4, 6]], jnp.int32)
    got = received.received(jnp.ones((1, 2, 1, 2)), query_position, jnp.asarray([[True, True]]), part, scale=1.0)
    np.testing.assert_array_equal(got, [[1, 0, 0]])
