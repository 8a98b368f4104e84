"""Scales by channel over groups of tokens, and 4 bits: what is stored, what it stands for, how attention reads it."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.attention import blockwise, reference, segment, visibility
from jdecode.cache import codec_channel, codec_int4, codec_token, nibbles

B, Z, K, H = 2, 4, 3, 6
KEYS = {name: codec_channel.ChannelCodec(name=name, group_len=Z, dtype="float32") for name in codec_channel.NAMES}
VALUES = codec_int4.Int4Codec(dtype="float32")
LEVELS = 15


def _decoded(codec, x) -> np.ndarray:
    """What is read of (T, H) after it is encoded."""
    rows = codec.encode(jnp.asarray(x, jnp.float32)[None, :, None, :])
    return np.asarray(rows.block(0, rows.num_slots))[0, :, 0]


def _random(*shape: int, seed: int = 5) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def test_two_numbers_a_byte():
    low, high = (x.ravel() for x in np.meshgrid(np.arange(-8, 8), np.arange(-8, 8)))
    codes = np.stack([low, high, high, low], axis=1).astype(np.int8)
    packed = nibbles.pack(jnp.asarray(codes))
    assert packed.dtype == jnp.uint8 and packed.shape == (256, 2)
    # Number 0 in the low half of byte 0, and number 2 in its high half; 1 and 3 in byte 1.
    np.testing.assert_array_equal(packed, np.stack([(low + 8) + 16 * (high + 8), (high + 8) + 16 * (low + 8)], axis=1))
    np.testing.assert_array_equal(nibbles.unpack(packed), codes)


# Zeros of padded lanes stretched the range where a head's width is no power of two (InternLM/lmdeploy#4849).
@pytest.mark.parametrize("width", [48, 80, 96])
def test_the_range_is_that_of_the_numbers_alone(width):
    x = 5 + np.random.default_rng(3).random((Z, width)).astype(np.float32)
    x[0], x[1] = 5, 6  # every channel reaches both ends
    keys = KEYS["int4"].encode(jnp.asarray(x)[None, :, None])
    np.testing.assert_array_equal(keys.scale_BUX, np.full((1, 1, width), np.float32(1) / np.float32(LEVELS)))
    assert np.abs(_decoded(KEYS["int4"], x) - x).max() <= 0.5 / LEVELS * 1.0001
    x[:, ::6], x[:, 1::6] = 5, 6  # and every run of channels
    values = VALUES.encode(jnp.asarray(x)[None, :, None])
    runs = {48: 2, 80: 4, 96: 3}[width]  # of 24, 20 and 32 channels
    scales = jax.lax.bitcast_convert_type(values.scale_BXS, jnp.float16)
    np.testing.assert_array_equal(scales, np.full((1, runs, Z), np.float16(1 / LEVELS)))
    # The offset, about 5.5, is rounded to 11 bits: by 2^-9 at the most, and the scale's rounding moves 8 steps.
    assert np.abs(_decoded(VALUES, x) - x).max() <= 0.5 / LEVELS + 2**-9 + 8 * 2**-16


# A channel 50 times larger took the range of all others (huggingface/transformers#35185).
@pytest.mark.parametrize(("name", "steps"), [("int8", 254), ("int4", LEVELS)])
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_an_outlier_channel_harms_no_other(name, steps, size):
    x = np.random.default_rng(11).normal(size=(4 * Z, 16)).astype(np.float32)
    x[:, 9] = 50 * (1 + 0.1 * x[:, 9])
    x *= np.float32(size)
    error = np.abs(_decoded(KEYS[name], x) - x).reshape(4, Z, 16).max(axis=1)
    groups = x.reshape(4, Z, 16)
    spread = 2 * np.abs(groups).max(axis=1) if name == "int8" else groups.max(axis=1) - groups.min(axis=1)
    rounding = 2e-7 * np.abs(groups).max(axis=1)
    assert (error <= 0.5 * spread / steps * 1.0001 + rounding).all()
    assert (error[:, :9] < 0.1 * 50 * size / steps).all()


@pytest.mark.parametrize("value", [0.0, 5.03, -1e-3, 3e4])
def test_a_channel_that_never_changes_is_exact(value):
    x = np.full((Z, H), value, np.float32)
    np.testing.assert_array_equal(_decoded(KEYS["int4"], x), x)
    np.testing.assert_allclose(_decoded(KEYS["int8"], x), x, rtol=2e-7)
    np.testing.assert_array_equal(_decoded(VALUES, x), np.float16(value).astype(np.float32))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e4])
def test_values_are_off_by_half_a_step(size):
    x = (np.random.default_rng(7).normal(size=(9, 64)) + 1).astype(np.float32) * np.float32(size)
    runs = x.reshape(9, 2, 32)
    step = (runs.max(axis=2) - runs.min(axis=2)) / LEVELS
    error = np.abs(_decoded(VALUES, x) - x).reshape(9, 2, 32).max(axis=2)
    assert (error <= 0.5 * step + 2**-11 * np.abs(runs).max(axis=2) + 2**-24).all()
    assert (error > 0.2 * step).any()


@pytest.mark.parametrize("name", KEYS)
def test_what_is_not_finite_stays_in_its_group_and_row(name):
    x = np.array(_random(B, 3 * Z, K, H))
    clean = np.asarray(KEYS[name].encode(jnp.asarray(x)).block(0, 3 * Z))
    x[1, Z + 2, 1, 4] = np.nan
    got = np.array(KEYS[name].encode(jnp.asarray(x)).block(0, 3 * Z))
    assert np.isnan(got[1, Z : 2 * Z, 1, 4]).all()
    got[1, Z : 2 * Z, 1, 4] = clean[1, Z : 2 * Z, 1, 4]
    np.testing.assert_array_equal(got, clean)


def test_values_that_float16_does_not_hold_are_not_finite():
    got = np.asarray(VALUES.cast(jnp.asarray([65_504.0, -65_504.0, 65_505.0, -1e9, jnp.nan, 0.0]).reshape(1, 1, 1, 6)))
    np.testing.assert_array_equal(got.ravel(), [65_504, -65_504, np.inf, -np.inf, np.nan, 0])


# Scales that never reached the product (vllm-project/vllm#11664, NVIDIA/Model-Optimizer#20).
@pytest.mark.parametrize("array", ["scale_BUX", "offset_BUX"])
def test_scales_and_offsets_reach_numbers_and_scores(array):
    rows = KEYS["int4"].encode(_random(B, 2 * Z, K, H))
    other = dataclasses.replace(rows, **{array: getattr(rows, array).at[:, 1].add(0.5)})
    q = _random(B, K, 1, 2, H, seed=9)
    before, after = (np.asarray(own.stored(0, 2 * Z).scores(q)) for own in (rows, other))
    np.testing.assert_array_equal(before[..., :Z], after[..., :Z])
    number = np.asarray(other.block(0, 2 * Z) - rows.block(0, 2 * Z))
    codes = np.asarray(nibbles.unpack(rows.data_BSX.reshape(B, 2 * Z, K, -1)))
    np.testing.assert_allclose(number[:, Z:], 0.5 * codes[:, Z:] if array == "scale_BUX" else 0.5, atol=1e-5)
    np.testing.assert_allclose(after - before, np.einsum("BKGTH,BCKH->BKGTC", q, number), atol=1e-5)


@pytest.mark.parametrize("codec", [*KEYS.values(), VALUES], ids=["int8", "int4", "values"])
def test_write_then_read(codec):
    new, S = codec.encode(_random(B, 2 * Z, K, H)), 3 * Z
    group = np.arange(Z)
    # Past the last slot nothing is written: dynamic_update_slice clamps, and index -1 wraps (jax-ml/jax#9083).
    slots = np.asarray([[*(2 * Z + group), *(S + group)], [*(S + Z + group), *group]], np.int32)
    rows = jax.jit(codec.write)(codec.init(B, S, K, H, None), jnp.asarray(slots), new)
    expected, decoded = np.zeros((B, S, K, H), np.float32), np.asarray(new.block(0, 2 * Z))
    expected[0, 2 * Z :], expected[1, :Z] = decoded[0, :Z], decoded[1, Z:]
    np.testing.assert_array_equal(rows.block(0, S), expected)
    np.testing.assert_array_equal(rows.block(jnp.int32(Z), 2 * Z), expected[:, Z:])
    assert rows.num_slots == S


def test_half_a_group_is_refused():
    rows = KEYS["int4"].init(B, 2 * Z, K, H, None)
    for start, size in ((0, Z - 1), (1, Z)):
        with pytest.raises(ValueError, match=f"expected whole groups of 4, got {size} from {start}"):
            rows.block(start, size)


PAIRS = {
    "int8_channel": (KEYS["int8"], codec_token.TokenCodec(name="int8", rotates=False, dtype="float32"), 0.03),
    "int4": (KEYS["int4"], VALUES, 0.5),
    # Each kind of block can be keys or values.
    "exchanged": (VALUES, KEYS["int4"], 0.5),
}


@pytest.mark.parametrize("pair", PAIRS)
@pytest.mark.parametrize("backend", [reference, blockwise])
@pytest.mark.parametrize("poison", [0.0, np.nan])
def test_attention_over_what_is_stored_is_attention_over_what_it_stands_for(pair, backend, poison):
    keys, values, tolerance = PAIRS[pair]
    S = 5 * Z
    q, k, v = _random(B, 2, 2 * K, H, seed=1), _random(B, S, K, H, seed=2), _random(B, S, K, H, seed=3)
    position_BS = np.tile(np.arange(S, dtype=np.int32), (B, 1))
    position_BS[1, 3 * Z :] = visibility.EMPTY
    held_BS = jnp.asarray(position_BS != visibility.EMPTY)

    def poisoned(rows):
        def leaf(array):
            held = held_BS[:, None, :] if array.shape[2] == S else held_BS[:, ::Z, None]  # one a slot, or a group
            if jnp.issubdtype(array.dtype, jnp.floating):
                return jnp.where(held, array, poison)
            if array.dtype == jnp.int16:  # the bits of a float16
                return jnp.where(held, array, jax.lax.bitcast_convert_type(jnp.float16(poison), jnp.int16))
            return array

        return jax.tree.map(leaf, rows)

    stored_k, stored_v = keys.encode(k), values.encode(v)
    arguments: dict[str, Any] = {"scale": 0.3, "soft_cap": 5.0}
    query_BT = jnp.asarray([[S - 2, S - 1], [1, 2 * Z]], jnp.int32)
    clean = segment.whole_segment(stored_k.block(0, S), stored_v.block(0, S), jnp.asarray(position_BS))
    exact = segment.whole_segment(k, v, jnp.asarray(position_BS))
    stored = dataclasses.replace(clean, keys=poisoned(stored_k), values=poisoned(stored_v))
    options: dict[str, Any] = {"block_size": 2 * Z} if backend is blockwise else {}  # the last block is moved back
    got = backend.attend(q, query_BT, [stored], **arguments, **options)
    np.testing.assert_allclose(got, reference.attend(q, query_BT, [clean], **arguments), atol=3e-6)
    off = np.abs(np.asarray(got - reference.attend(q, query_BT, [exact], **arguments))).max()
    assert 1e-4 < off < tolerance
