"""Rows as they are: written where they should be, nowhere else, and read back."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.cache import codec_plain

B, S, K, H = 2, 7, 3, 4


def _block(T: int) -> np.ndarray:
    return 1 + np.arange(B * T * K * H, dtype=np.float32).reshape(B, T, K, H)


@pytest.mark.parametrize("holds_bits", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_write_then_read(dtype, holds_bits):
    codec = codec_plain.PlainCodec(dtype=dtype, holds_bits=holds_bits)
    x = _block(2)
    rows = codec.write(codec.init(B, S, K, H, None), jnp.asarray([[6, 0], [2, 5]]), codec.encode(jnp.asarray(x)))
    assert (rows.num_slots, rows.num_heads) == (S, K)
    assert rows.data_BSX.dtype == ("uint16" if holds_bits and dtype != "float32" else dtype)
    got = rows.block(0, S)
    assert got.dtype == dtype
    assert got.shape == (B, S, K, H)
    expected = np.zeros((B, S, K, H), np.float32)
    expected[0, [6, 0]], expected[1, [2, 5]] = x[0], x[1]
    # Whole numbers up to 48 are exact in each dtype.
    np.testing.assert_array_equal(np.asarray(got, np.float32), expected)
    np.testing.assert_array_equal(rows.block(jnp.int32(4), 3), got[:, 4:])


# dynamic_update_slice clamps, and index -1 wraps, to the last slot (jax-ml/jax#9083, #34257).
def test_slots_past_the_last_are_dropped():
    codec = codec_plain.PlainCodec(dtype="float32")
    held = codec.write(
        codec.init(B, S, K, H, None), jnp.tile(jnp.arange(S), (B, 1)), codec.encode(jnp.asarray(_block(S)))
    )
    slots = jnp.asarray([[S, S + 1], [3, 2**31 - 1]], jnp.int32)
    for write in (codec.write, jax.jit(codec.write)):
        got = np.array(write(held, slots, codec.encode(jnp.full((B, 2, K, H), -9.0))).block(0, S))
        assert (got[1, 3] == -9).all()
        got[1, 3] = _block(S)[1, 3]
        np.testing.assert_array_equal(got, _block(S))


@pytest.mark.parametrize("holds_bits", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_encoded_block_reads_as_written(dtype, holds_bits):
    """A block that attends to itself before it is stored sees what later blocks will see of it."""
    codec = codec_plain.PlainCodec(dtype=dtype, holds_bits=holds_bits)
    x = jnp.asarray(np.random.default_rng(7).normal(size=(B, 5, K, H)), jnp.float32)
    written = codec.write(codec.init(B, S, K, H, None), jnp.tile(jnp.arange(5), (B, 1)), codec.encode(x))
    fresh = codec.encode(x)
    assert (fresh.num_slots, fresh.num_heads) == (5, K)
    np.testing.assert_array_equal(fresh.block(0, 5), written.block(0, 5))
    if dtype != "float32":
        assert np.abs(np.asarray(fresh.block(0, 5), np.float32) - np.asarray(x)).max() > 0
