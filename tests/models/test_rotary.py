"""Rotary embedding: the rotated vectors themselves, against hand computation and complex numbers."""

import cmath
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.models import rotary

rotate = jax.jit(rotary.rotate, static_argnames="rope")


def _llama3(factor: float) -> config_lib.RopeConfig:
    return config_lib.RopeConfig(
        theta=500_000.0,
        scaling="llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_positions=8192,
    )


def test_rotation_by_hand():
    # Head width 4, theta 100: pairs (0, 2) and (1, 3) turn by 1 and by 100 ** -(2/4) = 0.1 radians a position.
    x = jnp.asarray([1.0, 2.0, 3.0, 4.0])[None, None, None, :]
    got = rotate(x, jnp.asarray([[2]], jnp.int32), rope=config_lib.RopeConfig(theta=100.0))
    # (1 + 3i) e^2i = (1 cos 2 - 3 sin 2) + (3 cos 2 + 1 sin 2) i, (2 + 4i) e^0.2i likewise.
    expected = [
        math.cos(2) - 3 * math.sin(2),
        2 * math.cos(0.2) - 4 * math.sin(0.2),
        3 * math.cos(2) + math.sin(2),
        4 * math.cos(0.2) + 2 * math.sin(0.2),
    ]
    np.testing.assert_allclose(got[0, 0, 0], expected, rtol=1e-6)


# Tests of cos and sin tables passed while pairs and exponents were wrong (pie-project/pie#603): rotated vectors are
# compared, far out as well (Blaizzy/mlx-vlm#1710).
@pytest.mark.parametrize(
    "rope",
    [
        config_lib.RopeConfig(theta=700.0),
        config_lib.RopeConfig(theta=700.0, scaling="linear", factor=4.0),
        _llama3(8.0),
    ],
    ids=["none", "linear", "llama3"],
)
def test_equals_complex_numbers(rope):
    H, positions = 10, [0, 1, 7, 1000, 8000, 60_000]
    x = np.random.default_rng(9).normal(size=(2, len(positions), 3, H)).astype(np.float32)
    got = rotate(jnp.asarray(x), jnp.asarray([positions, positions[::-1]], jnp.int32), rope=rope)
    expected = np.zeros(x.shape)
    for b, t, n, i in np.ndindex(2, len(positions), 3, H // 2):
        position = (positions, positions[::-1])[b][t]
        turned = complex(x[b, t, n, i], x[b, t, n, i + H // 2]) * cmath.exp(1j * position * _frequency(rope, i, H))
        expected[b, t, n, i], expected[b, t, n, i + H // 2] = turned.real, turned.imag
    # A float32 angle of 60,000 radians is good to 2 ** -8 / 2 = 0.002 (and the frequency's own rounding as much).
    np.testing.assert_allclose(got[:, [0, 1, 2]][0], expected[0, :3], rtol=0, atol=1e-5)
    np.testing.assert_allclose(got, expected, rtol=0, atol=0.005 * np.abs(x).max())


def _frequency(rope: config_lib.RopeConfig, pair: int, head_dim: int) -> float:
    """The published definition, by wavelength (Llama 3.1): long waves slowed, short ones kept, the rest between."""
    frequency = 1 / rope.theta ** (2 * pair / head_dim)
    if rope.scaling == "linear":
        return frequency / rope.factor
    if rope.scaling == "none":
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < rope.original_max_positions / rope.high_freq_factor:
        return frequency
    if wavelength > rope.original_max_positions / rope.low_freq_factor:
        return frequency / rope.factor
    smooth = (rope.original_max_positions / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    return (1 - smooth) * frequency / rope.factor + smooth * frequency


# A factor of 8 was hard-coded where small models have 32 (llama-models#241).
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_by_hand(factor):
    plain = rotary.inverse_frequencies(config_lib.RopeConfig(theta=500_000.0), 128)
    scaled = rotary.inverse_frequencies(_llama3(factor), 128)
    assert plain.shape == scaled.shape == (64,)
    np.testing.assert_array_equal(plain[0], 1.0)
    np.testing.assert_allclose(plain[63], 500_000.0 ** -(126 / 128), rtol=1e-6)
    ratio = plain / scaled
    assert ratio[0] == 1
    assert ratio[63] == factor
    assert (np.diff(ratio) > -1e-6 * factor).all()
    # 500,000 ** (-2i / 128): a wavelength under 2048 up to i = 28 (2 pi e^(0.20504 i) is 1957, then 2402), over 8192
    # from i = 35 on (6702 at 34, then 8227).
    assert 2 * math.pi / plain[28] < 2048 < 2 * math.pi / plain[29]
    assert 2 * math.pi / plain[34] < 8192 < 2 * math.pi / plain[35]
    np.testing.assert_allclose(ratio[:29], 1, rtol=1e-6)
    np.testing.assert_allclose(ratio[35:], factor, rtol=1e-6)
    assert ((ratio[29:35] > 1.01) & (ratio[29:35] < factor * 0.99)).all()


# The score depends on the distance alone (awslabs/keys_values#140).
@pytest.mark.parametrize("offset", [1, 13, 400])
def test_scores_depend_on_the_distance(offset):
    H, rope = 8, config_lib.RopeConfig(theta=100.0)
    q, k = np.random.default_rng(10).normal(size=(2, 1, 1, 1, H)).astype(np.float32)

    def score(query: int, key: int) -> float:
        turned_q = rotate(jnp.asarray(q), jnp.asarray([[query]], jnp.int32), rope=rope)
        turned_k = rotate(jnp.asarray(k), jnp.asarray([[key]], jnp.int32), rope=rope)
        return float((turned_q * turned_k).sum())

    for distance in (0, 1, 5):
        # Angles of 400 radians are good to 3e-5, products are of size 1.
        assert score(distance + offset, offset) == pytest.approx(score(distance, 0), abs=3e-4)
    assert abs(score(5, 0) - score(1, 0)) > 1e-2


def test_position_zero_changes_nothing_and_dtype_is_kept():
    x = jnp.asarray(np.random.default_rng(11).normal(size=(2, 3, 1, 6)), jnp.bfloat16)
    got = rotate(x, jnp.zeros((2, 3), jnp.int32), rope=config_lib.RopeConfig())
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, x)
