"""Linear maps between axes."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from jdecode.models import linear


def _random(*shape: int) -> np.ndarray:
    return np.random.default_rng(12).normal(size=shape).astype(np.float32)


def test_to_heads_and_back():
    x, weight, bias = _random(2, 3, 5), _random(4, 6, 5), _random(4, 6)
    module: Any = linear.Linear((4, 6), (5,), ("heads", "head_dim", "embed"), has_bias=True)
    got = module.apply({"params": {"weight": jnp.asarray(weight), "bias": jnp.asarray(bias)}}, jnp.asarray(x))
    expected = np.zeros((2, 3, 4, 6))
    for b, t, n, h in np.ndindex(expected.shape):
        expected[b, t, n, h] = bias[n, h] + sum(float(x[b, t, d]) * float(weight[n, h, d]) for d in range(5))
    np.testing.assert_allclose(got, expected, rtol=0, atol=1e-5)

    out = _random(5, 4, 6)
    module = linear.Linear((5,), (4, 6), ("embed", "heads", "head_dim"))
    got = module.apply({"params": {"weight": jnp.asarray(out)}}, jnp.asarray(expected, jnp.float32))
    back = np.zeros((2, 3, 5))
    for b, t, d in np.ndindex(back.shape):
        back[b, t, d] = sum(expected[b, t, n, h] * float(out[d, n, h]) for n in range(4) for h in range(6))
    np.testing.assert_allclose(got, back, rtol=0, atol=1e-4)


def test_dtypes():
    x, weight = jnp.asarray(_random(2, 5)), jnp.asarray(_random(3, 5))
    assert linear.product(x, weight, 1, "bfloat16").dtype == jnp.bfloat16
    scores = linear.product(x, weight, 1, "bfloat16", out_dtype="float32")
    assert scores.dtype == jnp.float32
    rounded = (np.asarray(array.astype(jnp.bfloat16), np.float64) for array in (x, weight))
    expected = next(rounded) @ next(rounded).T
    # Products of rounded numbers, summed in float32: not rounded to bfloat16 (which would be off by 1e-2).
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
