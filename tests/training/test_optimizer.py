"""The schedule at its corners, which parameters decay, and clipping: all by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdecode.training import optimizer, train_config

CONFIG = train_config.OptimizerConfig(learning_rate=0.4, final_share=0.25, warmup_steps=4, weight_decay=0.5)
NUM_STEPS = 12


@pytest.mark.parametrize(
    ("step", "expected"),
    [
        (0, 0.0),
        (1, 0.1),
        (3, 0.3),
        (4, 0.4),  # the peak
        (6, 0.3560660),  # 0.1 + 0.3 (1 + cos(pi / 4)) / 2
        (8, 0.25),  # half way: the mean of 0.4 and 0.1
        (12, 0.1),
    ],
)
def test_schedule(step, expected):
    np.testing.assert_allclose(optimizer.learning_rate(CONFIG, NUM_STEPS)(step), expected, rtol=1e-6, atol=1e-9)


def test_schedule_without_warm_up_starts_at_the_peak():
    config = train_config.OptimizerConfig(learning_rate=0.4, final_share=0.25, warmup_steps=0)
    schedule = optimizer.learning_rate(config, NUM_STEPS)
    np.testing.assert_allclose(np.asarray([schedule(step) for step in (0, 6, 12)]), [0.4, 0.25, 0.1], rtol=1e-6)


PARAMS = {
    "params": {
        "embedding": {"weight": jnp.asarray([[2.0, -4.0]])},
        "norm": {"scale": jnp.asarray([3.0])},
        "query": {"weight": jnp.asarray([[8.0]]), "bias": jnp.asarray([5.0])},
    }
}


def updated(config: train_config.OptimizerConfig, gradient, num_updates: int = 1):
    rule = optimizer.make_optimizer(config, NUM_STEPS)
    params, state = PARAMS, rule.init(PARAMS)
    for _ in range(num_updates):
        updates, state = rule.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_params(got, embedding, scale, weight, bias) -> None:
    params = got["params"]
    np.testing.assert_allclose(params["embedding"]["weight"], [embedding], rtol=1e-6)
    np.testing.assert_allclose(params["norm"]["scale"], [scale], rtol=1e-6)
    np.testing.assert_allclose(params["query"]["weight"], [[weight]], rtol=1e-6)
    np.testing.assert_allclose(params["query"]["bias"], [bias], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_matrices_alone_decay(clip_norm):
    config = train_config.OptimizerConfig(
        learning_rate=0.4, warmup_steps=0, weight_decay=0.5, final_share=1.0, clip_norm=clip_norm
    )
    zero = jax.tree.map(jnp.zeros_like, PARAMS)
    # Each update leaves 1 - 0.4 * 0.5 = 0.8 of a matrix: 0.64 after two. Decay is no part of the gradient.
    assert_params(updated(config, zero, 2), [1.28, -2.56], 3.0, 5.12, 5.0)


# Adam's first update is g / (|g| + epsilon). The gradient has norm sqrt(9 + 16) = 5 over all leaves together.
GRADIENT = {
    "params": {
        "embedding": {"weight": jnp.asarray([[3.0, 0.0]])},
        "norm": {"scale": jnp.asarray([-4.0])},
        "query": {"weight": jnp.asarray([[0.0]]), "bias": jnp.asarray([0.0])},
    }
}


@pytest.mark.parametrize(
    ("clip_norm", "first", "second"),
    [
        (None, 3 / 4, 4 / 5),
        (5.5, 3 / 4, 4 / 5),  # under the limit
        (1.0, 0.6 / 1.6, 0.8 / 1.8),  # all of it divided by 5
    ],
)
def test_clipping(clip_norm, first, second):
    config = train_config.OptimizerConfig(
        learning_rate=0.5, warmup_steps=0, weight_decay=0.0, epsilon=1.0, clip_norm=clip_norm
    )
    assert_params(updated(config, GRADIENT), [2 - 0.5 * first, -4], 3 + 0.5 * second, 8, 5)


def test_moments_by_hand():
    config = train_config.OptimizerConfig(
        learning_rate=0.5, warmup_steps=0, final_share=1.0, weight_decay=0.0, beta1=0.5, beta2=0.75, clip_norm=None
    )
    rule = optimizer.make_optimizer(config, NUM_STEPS)
    params = {"params": {"weight": jnp.asarray([10.0])}}
    state = rule.init(params)
    for gradient in (4.0, -1.0):
        updates, state = rule.update({"params": {"weight": jnp.asarray([gradient])}}, state, params)
        params = jax.tree.map(jnp.add, params, updates)
    # First: m/v unbiased are 4 and 16, so 10 - 0.5 * 4/4. Second: m = (0.5*2 - 0.5*1) / 0.75 = 2/3 and
    # v = (0.75*4 + 0.25*1) / 0.4375 = 7.428571, so 9.5 - 0.5 * 0.6666667 / 2.7255406.
    np.testing.assert_allclose(params["params"]["weight"], [9.5 - 0.1223002], rtol=1e-6)
