"""What only the blockwise backend promises: any block size, only the promised slots, and no T x S array."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

from jdecode.attention import blockwise, reference, segment, visibility

S = 11
OPTIONS = ("scale", "window", "num_sinks", "soft_cap")
attend = jax.jit(blockwise.attend, static_argnames=(*OPTIONS, "block_size"))
attend_reference = jax.jit(reference.attend, static_argnames=OPTIONS)


def _inputs(B: int = 2, T: int = 3, N: int = 4, K: int = 2, H: int = 6, num_slots: int = S):
    rng = np.random.default_rng(6)
    shapes = ((B, T, N, H), (B, num_slots, K, H), (B, num_slots, K, H))
    return tuple(jnp.asarray(rng.normal(size=shape) * 2, jnp.float32) for shape in shapes)


def _segment(k, v, position, first: int = 0, end: int = S) -> segment.Segment:
    return segment.Segment(
        keys=segment.ArrayRows(data_BSKH=k),
        values=segment.ArrayRows(data_BSKH=v),
        position_BS=jnp.asarray(position, jnp.int32),
        first_slot=jnp.int32(first),
        end_slot=jnp.int32(end),
    )


# 11 slots: blocks of 1; of 3 (the last one moved back over slots that are counted already); one; a size over S.
@pytest.mark.parametrize("block_size", [1, 3, S, S + 5])
@pytest.mark.parametrize("window", [None, 4])
def test_any_block_size_gives_the_reference(block_size, window):
    q, k, v = _inputs()
    # Row 0 is a text of 11 tokens, row 1 a wrapped ring with two holes.
    empty = int(visibility.EMPTY)
    position = [list(range(S)), [11, 12, 13, empty, 4, 5, 6, 7, 8, 9, empty]]
    query_position = jnp.asarray([[8, 9, 10], [12, 13, 14]], jnp.int32)
    options = {"scale": 0.4, "window": window, "num_sinks": 2, "soft_cap": 5.0}
    whole = _segment(k, v, position)
    got = attend(q, query_position, (whole,), block_size=block_size, **options)
    expected = attend_reference(q, query_position, (whole,), **options)
    # See FLOAT32_ATOL of the contract: values here are twice as great.
    np.testing.assert_allclose(got, expected, rtol=0, atol=6e-6)
    # Two segments of different lengths, both no multiple of the block.
    parts = tuple(_segment(k[:, a:b], v[:, a:b], np.asarray(position)[:, a:b], 0, b - a) for a, b in [(0, 4), (4, S)])
    np.testing.assert_allclose(
        attend(q, query_position, parts, block_size=block_size, **options), expected, rtol=0, atol=6e-6
    )


@pytest.mark.parametrize(
    ("first", "end", "read"), [(3, 6, (3, 6)), (4, 7, (3, 9)), (0, 1, (0, 3)), (9, S, (9, S)), (6, 6, (6, 6))]
)
def test_slots_outside_the_bounds_are_not_read(first, end, read):
    """Blocks of 3 that hold no promised slot are not touched: here every slot looks visible, so reading one shows."""
    q, k, v = _inputs()
    position = np.broadcast_to(np.arange(S), (2, S))
    query_position = jnp.full((2, 3), S - 1, jnp.int32)
    got = attend(q, query_position, (_segment(k, v, position, first, end),), scale=0.4, block_size=3)
    inside = np.zeros(S, bool)
    inside[slice(*read)] = True
    only = np.where(inside, position, int(visibility.EMPTY))
    expected = attend_reference(q, query_position, (_segment(k, v, only),), scale=0.4)
    np.testing.assert_allclose(got, expected, rtol=0, atol=6e-6)
    everything = attend_reference(q, query_position, (_segment(k, v, position),), scale=0.4)
    assert np.abs(np.asarray(got) - np.asarray(everything)).max() > 0.1


def test_bounds_are_traced():
    q, k, v = _inputs()
    position = np.broadcast_to(np.arange(S), (2, S))
    query_position = jnp.full((2, 3), S - 1, jnp.int32)

    @chex.assert_max_traces(n=1)
    def read(whole):
        return blockwise.attend(q, query_position, (whole,), scale=0.4, block_size=3)

    once = jax.jit(read)
    for end in range(S + 1):
        once(_segment(k, v, position, 0, end))


def _largest_array(jaxpr) -> int:
    """The most elements that any value inside a program has, loops and branches included."""
    largest = 0
    for equation in jaxpr.eqns:
        largest = max([largest, *(int(np.prod(var.aval.shape)) for var in equation.outvars)])
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else [value]:
                if isinstance(inner, core.ClosedJaxpr | core.Jaxpr):
                    largest = max(largest, _largest_array(getattr(inner, "jaxpr", inner)))
    return largest


def test_no_array_of_queries_by_slots():
    T, num_slots, block_size = 64, 1024, 32
    q, k, v = _inputs(B=1, T=T, N=2, K=1, H=4, num_slots=num_slots)
    position = jnp.arange(num_slots, dtype=jnp.int32)[None, :]
    whole, query_position = _segment(k, v, position, 0, num_slots), position[:, -T:]
    program = jax.make_jaxpr(functools.partial(blockwise.attend, scale=0.4, block_size=block_size))
    largest = _largest_array(program(q, query_position, (whole,)).jaxpr)
    # N * T * block scores, or the keys themselves; T * S is 65,536.
    assert 2 * T * block_size == 4096
    assert largest == 4096
    plain = jax.make_jaxpr(functools.partial(reference.attend, scale=0.4))
    assert _largest_array(plain(q, query_position, (whole,)).jaxpr) >= T * num_slots
    compiled = (
        jax.jit(functools.partial(blockwise.attend, scale=0.4, block_size=block_size))
        .lower(q, query_position, (whole,))
        .compile()
    )
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < T * num_slots * 4 / 2
