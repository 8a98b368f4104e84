"""One step of the optimiser: accumulation, counters, the learning rate that it records, and how often it is traced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.models import transformer
from jdecode.training import objective, optimizer, train_config, train_state
from tests.training import tiny_run

V = 17
NUM_STEPS = 9
MODEL = transformer.Transformer(
    dataclasses.replace(tiny_run.ARCHITECTURE, vocab_size=V, layers=tiny_run.ARCHITECTURE.layers[:1]), backend="banded"
)
NEXT_TOKEN = objective.NextToken(MODEL)
CONFIG = dataclasses.replace(tiny_run.CONFIG, architecture=MODEL.config, num_steps=NUM_STEPS)
SMOOTH = train_config.OptimizerConfig(learning_rate=0.1, warmup_steps=0, epsilon=1e-2)
"""With the least epsilon a gradient of nearly nothing makes a whole step, in a direction that rounding decides."""


def state_of(optimizer_config: train_config.OptimizerConfig, seed: int = 5) -> train_state.TrainState:
    return train_state.init_state(MODEL, dataclasses.replace(CONFIG, optimizer=optimizer_config, seed=seed))


def tokens(shape: tuple[int, ...], seed: int = 3) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, V, shape), jnp.int32)


def step(optimizer_config: train_config.OptimizerConfig, state: train_state.TrainState, tokens_ABT: jax.Array):
    return train_state.train_step(NEXT_TOKEN, optimizer_config, NUM_STEPS, state, None, tokens_ABT)


def copied(tree):
    return jax.tree.map(np.array, tree)


def test_two_micro_batches_are_one_batch_of_both():
    both = tokens((6, 8))
    halves, halves_scalars = step(SMOOTH, state_of(SMOOTH), both.reshape(2, 3, 8))
    whole, whole_scalars = step(SMOOTH, state_of(SMOOTH), both.reshape(1, 6, 8))
    # One rounding of gradients of about 0.1, times the rate over epsilon; the step itself moves by up to 0.1.
    assert tiny_run.max_difference(halves.params, whole.params) < 1e-5
    assert tiny_run.max_difference(halves.params, state_of(SMOOTH).params) > 1e-2
    for name in ("loss", "gradient_norm", "next_token"):
        np.testing.assert_allclose(halves_scalars[name], whole_scalars[name], rtol=1e-5)
    # A half alone does otherwise: neither of the two is left out.
    for half in both.reshape(2, 1, 3, 8):
        twice = jnp.concatenate([half, half])
        assert tiny_run.max_difference(step(SMOOTH, state_of(SMOOTH), twice)[0].params, whole.params) > 1e-3


def test_the_step_is_that_of_the_gradient():
    both, config = tokens((6, 8)), SMOOTH
    state = state_of(config)
    (loss, _), gradient = jax.jit(jax.value_and_grad(NEXT_TOKEN, has_aux=True))(state.params, None, both)
    norm = np.sqrt(sum((np.asarray(leaf, np.float64) ** 2).sum() for leaf in jax.tree.leaves(gradient)))
    updates, _ = optimizer.make_optimizer(config, NUM_STEPS).update(gradient, state.opt_state, state.params)
    expected = jax.tree.map(jnp.add, state.params, updates)
    after, scalars = step(config, state, both.reshape(2, 3, 8))
    assert tiny_run.max_difference(after.params, expected) < 1e-5
    np.testing.assert_allclose(scalars["loss"], loss, rtol=1e-5)
    assert norm > 0.1
    np.testing.assert_allclose(scalars["gradient_norm"], norm, rtol=1e-5)


def test_counters():
    state = state_of(SMOOTH)
    assert (int(state.step), int(state.num_sequences)) == (0, 0)
    key = np.asarray(jax.random.key_data(state.key))
    for done in (1, 2, 3):
        state, _ = step(SMOOTH, state, tokens((2, 3, 8)))
        assert (int(state.step), int(state.num_sequences)) == (done, 6 * done)
        np.testing.assert_array_equal(jax.random.key_data(state.key), key)  # the order's key is addressed


def test_the_first_step_of_a_warm_up_moves_nothing():
    config = dataclasses.replace(SMOOTH, warmup_steps=4)
    before = copied(state_of(config).params)
    state, scalars = step(config, state_of(config), tokens((2, 3, 8)))
    assert scalars["learning_rate"] == 0
    tiny_run.assert_equal(copied(state.params), before)
    state, scalars = step(config, state, tokens((2, 3, 8)))
    np.testing.assert_allclose(scalars["learning_rate"], 0.1 / 4, rtol=1e-6)
    assert tiny_run.max_difference(state.params, before) > 1e-3


def test_the_recorded_learning_rate_is_the_one_used():
    # Without moments an update is the sign of the gradient times the rate, and scales do not decay.
    config = train_config.OptimizerConfig(
        learning_rate=0.5, final_share=0.2, warmup_steps=2, beta1=0.0, beta2=0.0, epsilon=1e-20
    )
    state = state_of(config)
    rates = []
    for _ in range(4):
        before = copied(state.params)["params"]["final_norm"]["scale"]
        state, scalars = step(config, state, tokens((2, 3, 8)))
        moved = np.abs(np.asarray(state.params["params"]["final_norm"]["scale"]) - before)
        np.testing.assert_allclose(moved, np.full_like(moved, scalars["learning_rate"]), rtol=1e-5, atol=1e-7)
        rates.append(float(scalars["learning_rate"]))
    # The peak 0.5 after two steps; then one of seven parts of the cosine to 0.1: 0.1 + 0.4 (1 + cos(pi / 7)) / 2.
    np.testing.assert_allclose(rates, [0.0, 0.25, 0.5, 0.4801938], rtol=1e-6)


def test_the_loss_falls():
    config = train_config.OptimizerConfig(learning_rate=0.03, warmup_steps=0, final_share=1.0, weight_decay=0.0)
    state, few = state_of(config), tokens((2, 3, 8))
    losses = []
    for _ in range(60):
        state, scalars = step(config, state, few)
        losses.append(float(scalars["loss"]))
    assert abs(losses[0] - np.log(V)) < 0.1  # fresh weights know nothing
    assert losses[-1] < 0.2 * losses[0]


def test_after_the_first_step_nothing_is_traced():
    """Whatever the tokens, and with objective and config made anew for every step, as equal values."""
    traced = []

    def listen(event: str, duration_secs: float, **kwargs) -> None:
        del duration_secs
        if event == "/jax/core/compile/jaxpr_trace_duration":
            traced.append(kwargs.get("fun_name"))

    state = state_of(SMOOTH)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for seed in range(4):
            model = transformer.Transformer(dataclasses.replace(MODEL.config), backend="banded")
            learn, config, tokens_ABT = objective.NextToken(model), dataclasses.replace(SMOOTH), tokens((3, 2, 9), seed)
            if seed == 1:
                assert traced  # what is counted is seen at all
                traced.clear()
            state, _ = train_state.train_step(learn, config, NUM_STEPS, state, None, tokens_ABT)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert int(state.step) == 4
    assert traced == []


def test_seeds_and_given_weights():
    first, again, other = state_of(SMOOTH), state_of(SMOOTH), state_of(SMOOTH, seed=6)
    tiny_run.assert_equal(first, again)
    assert tiny_run.max_difference(first.params, other.params) > 1e-3
    assert (jax.random.key_data(first.key) != jax.random.key_data(other.key)).any()
    given = train_state.init_state(MODEL, CONFIG, params=other.params)
    tiny_run.assert_equal(given.params, other.params)
    tiny_run.assert_equal(given.key, first.key)


def test_fresh_weights_are_plain_float32_arrays():
    params = train_state.init_params(MODEL, jax.random.key(0))
    assert params.keys() == {"params"}
    assert all(isinstance(leaf, jax.Array) and leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(params))
    # Projections are drawn with a standard deviation of 0.02 and norm scales are one.
    weights = np.concatenate([np.ravel(leaf) for path, leaf in jax.tree.leaves_with_path(params) if leaf.ndim > 1])
    assert 0.018 < weights.std() < 0.022 and abs(weights.mean()) < 0.002
    assert (np.asarray(params["params"]["final_norm"]["scale"]) == 1).all()
