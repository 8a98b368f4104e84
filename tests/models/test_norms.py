"""RMSNorm in both forms, by hand."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.models import norms

# The mean square of (3, 4, 0, -5) is 50 / 4.
X = np.asarray([[3.0, 4.0, 0.0, -5.0]], np.float32)
ROOT = (50 / 4) ** 0.5


def _norm(scale, *, offset: float, epsilon: float = 0.0, x: Any = X):
    module: Any = norms.RMSNorm(epsilon, offset)
    return module.apply({"params": {"scale": jnp.asarray(scale, jnp.float32)}}, jnp.asarray(x))


# The wrong variant of the norm passed tests that had re-implemented it (AI-Hypercomputer/maxtext#2672).
def test_zero_scale_tells_the_forms_apart():
    np.testing.assert_allclose(_norm([0, 0, 0, 0], offset=1.0), X / ROOT, rtol=1e-6)
    np.testing.assert_array_equal(_norm([0, 0, 0, 0], offset=0.0), np.zeros_like(X))


def test_scale_by_hand():
    np.testing.assert_allclose(_norm([1, 2, 3, 0.5], offset=0.0), X / ROOT * [[1, 2, 3, 0.5]], rtol=1e-6)
    np.testing.assert_allclose(_norm([1, 2, 3, -0.5], offset=1.0), X / ROOT * [[2, 3, 4, 0.5]], rtol=1e-6)


def test_epsilon_is_under_the_root():
    got = _norm([1, 1, 1, 1], offset=0.0, epsilon=2.5)
    np.testing.assert_allclose(got, X / 15**0.5, rtol=1e-6)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_fresh_scale_is_one(offset):
    x = jnp.asarray(X)
    module: Any = norms.RMSNorm(0.0, offset)
    got = module.apply(module.init(jax.random.key(0), x), x)
    np.testing.assert_allclose(got, X / ROOT, rtol=1e-6)


def test_half_precision_is_rounded_once():
    # In bfloat16 a sum of squares of 4,000 ones would end at 256.
    x = jnp.full((1, 4000), 3.0, jnp.bfloat16)
    got = _norm(jnp.full(4000, 0.75), offset=0.0, x=x)
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.full((1, 4000), 0.75, np.float32))
