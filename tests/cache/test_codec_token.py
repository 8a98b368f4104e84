"""8 bits a number and a scale a token and head: what is stored, what it stands for, and that attention reads it so."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import blockwise, reference, rotation, segment, visibility
from jdecode.cache import codec_token

B, S, K, H = 2, 7, 3, 16
MOST = {"int8": 127, "fp8": 448}


def _codec(name: str, rotates: bool = False) -> codec_token.TokenCodec:
    return codec_token.TokenCodec(name=name, rotates=rotates, dtype="float32")


def _decoded(name: str, x, rotates: bool = False) -> np.ndarray:
    """What is read of heads, (T, H), after they are encoded."""
    rows = _codec(name, rotates).encode(jnp.asarray(x, jnp.float32)[None, :, None, :])
    return np.asarray(rows.block(0, rows.num_slots))[0, :, 0]


# Scales floored at 1 turned values under 1 into 0 or 1, and texts into loops (lablup/mlxcel#717, #635).
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e4, 1e30])
def test_int8_is_off_by_half_a_step(size):
    x = np.array([[0.5, -0.25, 0.1, 0.0], [0.0, 0.0, 0.0, 0.0], [-1.0, 1.0, 0.004, 0.0039]], np.float32) * size
    got = _decoded("int8", x)
    assert np.isfinite(got).all()
    assert (np.abs(got - x).max(axis=1) <= np.abs(x).max(axis=1) / 254 * (1 + 1e-5)).all()
    np.testing.assert_array_equal(got[1], 0)  # exactly
    np.testing.assert_allclose(np.abs(got).max(axis=1), np.abs(x).max(axis=1), rtol=1e-6)


# From 465 on a cast to e4m3 gives NaN (jax-ml/ml_dtypes#260); reductions over float8 did, too (jax-ml/jax#19011).
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e3, 1e30])
def test_fp8_saturates_and_keeps_its_precision(size):
    x = np.array([[1.0, -1.0, 0.465, 0.448], [1e-3, 3e-3, 0.99, -0.7], [0.0, 0.0, 0.0, 0.0]], np.float32) * size
    got = _decoded("fp8", x)
    assert np.isfinite(got).all()
    # Three bits of mantissa: half of 1/8, relative, down to numbers that are subnormal beside the greatest.
    np.testing.assert_allclose(got, x, rtol=1 / 16, atol=size * 2.0**-10 / 448)
    np.testing.assert_allclose(got[0, :2], x[0, :2], rtol=1e-6)
    np.testing.assert_array_equal(got[2], 0)


# A maximum over float8 was NaN (jax-ml/jax#19011): the greatest magnitude is sought before the cast.
def test_float8_is_read_and_written_and_nothing_else():
    def run(x_BTKH, q_BKGTH):
        block = _codec("fp8").encode(x_BTKH).stored(0, 5).only(jnp.ones((B, 5), bool))
        return block.scores(q_BKGTH), block.weighted(jnp.ones((B, K, 1, 2, 5))), block.widened().scores(q_BKGTH)

    program = str(jax.make_jaxpr(run)(jnp.ones((B, 5, K, H)), jnp.ones((B, K, 1, 2, H))))
    made_by = set(re.findall(r"f8_e4m3fn\[[\d,]*\] = (\w+)", program))
    moves = {"bitcast_convert_type", "broadcast_in_dim", "convert_element_type", "jit", "reshape", "select_n"}
    assert {"bitcast_convert_type", "convert_element_type"} <= made_by <= moves


@pytest.mark.parametrize("rotates", [False, True])
@pytest.mark.parametrize("name", MOST)
def test_a_block_of_half_precision_is_quantised_in_float32(name, rotates):
    codec, x = _codec(name, rotates), jnp.asarray(np.random.default_rng(7).normal(size=(B, 5, K, H)), jnp.bfloat16)
    half, wide = codec.encode(x), codec.encode(x.astype(jnp.float32))
    jax.tree.map(np.testing.assert_array_equal, half, wide)
    assert half.scale_BKS.dtype == jnp.float32


@pytest.mark.parametrize("name", MOST)
def test_what_is_stored(name):
    rows = _codec(name).encode(jnp.asarray(np.random.default_rng(5).normal(size=(B, 4, K, H)), jnp.float32))
    assert rows.data_BSX.shape == (B, 4, K * H) and rows.data_BSX.dtype == jnp.int8
    assert rows.scale_BKS.shape == (B, K, 4) and rows.scale_BKS.dtype == jnp.float32
    data = np.asarray(rows.data_BSX).view(codec_token.STORED[name][0]).astype(np.float32).reshape(B, 4, K, H)
    np.testing.assert_array_equal(np.abs(data).max(axis=-1), MOST[name])  # every step is used


@pytest.mark.parametrize("name", MOST)
def test_nothing_that_is_not_finite_is_read_as_a_number(name):
    for bad in (np.nan, np.inf, -np.inf):
        x = np.ones((3, H), np.float32)
        x[1, 5] = bad
        got = _decoded(name, x)
        assert not np.isfinite(got[1]).all()
        np.testing.assert_allclose(got[[0, 2]], 1, rtol=1e-6)


# The outlier channel: without a rotation it takes all the steps. (huggingface/transformers#35185 is the 4-bit case.)
def test_a_rotation_makes_room_for_the_other_channels():
    rng = np.random.default_rng(11)
    x = rng.normal(size=(64, 64)).astype(np.float32)
    x[:, 9] += 50
    q = rng.normal(size=(64, 64)).astype(np.float32)
    q[:, 9] *= 0.02  # as in models: large where the other is small
    error = {rotates: np.abs(q @ (_decoded("int8", x, rotates) - x).T).mean() for rotates in (False, True)}
    assert error[True] < 0.75 * error[False], error


@pytest.mark.parametrize("size", [2, 8, 64, 256])
def test_hadamard_is_orthonormal_and_its_own_inverse(size):
    matrix = rotation.hadamard(size).astype(np.float64)
    np.testing.assert_allclose(matrix @ matrix, np.eye(size), atol=1e-6)
    np.testing.assert_array_equal(matrix, matrix.T)
    np.testing.assert_allclose(np.abs(matrix), size**-0.5, rtol=1e-6)


@pytest.mark.parametrize(("width", "run"), [(96, 32), (80, 16), (6, 2), (48, 16)])
def test_a_width_that_is_no_power_of_two_is_rotated_in_runs(width, run):
    x = np.zeros((1, 1, 1, width), np.float32)
    x[..., run] = 1  # the first of the second run
    got = np.asarray(rotation.rotate(jnp.asarray(x)))[0, 0, 0]
    np.testing.assert_array_equal(np.flatnonzero(got), np.arange(run, 2 * run))
    np.testing.assert_allclose(rotation.rotate(jnp.asarray(got)[None, None, None]), x, atol=1e-6)


# Slots past the last are dropped: dynamic_update_slice clamps, and index -1 wraps (jax-ml/jax#9083, #34257).
@pytest.mark.parametrize("name", MOST)
def test_write_then_read(name):
    codec = _codec(name, rotates=True)
    x = jnp.asarray(np.random.default_rng(3).normal(size=(B, 3, K, H)), jnp.float32)
    new, slots = codec.encode(x), jnp.asarray([[6, 0, S], [2, 2**31 - 1, 5]], jnp.int32)
    rows = jax.jit(codec.write)(codec.init(B, S, K, H, None), slots, new)
    expected = np.zeros((B, S, K, H), np.float32)
    decoded = np.asarray(new.block(0, 3))
    expected[0, [6, 0]], expected[1, [2, 5]] = decoded[0, :2], decoded[1, [0, 2]]
    np.testing.assert_allclose(rows.block(0, S), expected, atol=1e-6)
    np.testing.assert_allclose(rows.block(jnp.int32(4), 3), expected[:, 4:], atol=1e-6)


@pytest.mark.parametrize("name", MOST)
@pytest.mark.parametrize("backend", [reference, blockwise])
@pytest.mark.parametrize("poison", [0.0, np.nan])
def test_attention_over_what_is_stored_is_attention_over_what_it_stands_for(name, backend, poison):
    rng = np.random.default_rng(17)
    q, k, v = (jnp.asarray(rng.normal(size=(B, n, m, H)), jnp.float32) for n, m in ((2, 6), (S, K), (S, K)))
    position_BS = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    position_BS[1, 3:] = visibility.EMPTY
    keys, values = _codec(name, rotates=True).encode(k), _codec(name).encode(v)
    held_BS = position_BS != visibility.EMPTY
    clean = segment.whole_segment(keys.block(0, S), values.block(0, S), jnp.asarray(position_BS))
    keys, values = (
        codec_token.TokenRows(
            data_BSX=rows.data_BSX,
            scale_BKS=jnp.where(held_BS[:, None, :], rows.scale_BKS, poison),
            name=rows.name,
            is_rotated=rows.is_rotated,
            dtype=rows.dtype,
        )
        for rows in (keys, values)
    )
    stored = segment.Segment(
        keys=keys,
        values=values,
        position_BS=jnp.asarray(position_BS),
        first_slot=jnp.int32(0),
        end_slot=jnp.int32(S),
    )
    query_BT = jnp.asarray([[5, 6], [1, 2]], jnp.int32)
    got = backend.attend(q, query_BT, [stored], scale=0.3, soft_cap=5.0)
    expected = reference.attend(q, query_BT, [clean], scale=0.3, soft_cap=5.0)
    np.testing.assert_allclose(got, expected, atol=2e-6)
    exact = reference.attend(
        q, query_BT, [segment.whole_segment(k, v, jnp.asarray(position_BS))], scale=0.3, soft_cap=5.0
    )
    assert 1e-4 < np.abs(np.asarray(got) - np.asarray(exact)).max() < (0.03 if name == "int8" else 0.2)
