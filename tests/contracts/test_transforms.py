"""The contract of ``sampling.Transform``, over every transform of the package and the whole chain."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling

PROMPT = [3, 9, 5, 3]
STOP_IDS = [2, 7]
HISTORY_LEN = 23

# Each transform, with two settings that make it act. A batch is: first setting, nothing, second setting.
CASES = {
    "LogitBias": (sampling.LogitBias(), {"logit_bias": ((9, -1.5), (4, 2.0))}, {"logit_bias": ((1, 0.5),)}),
    "PermittedTokens": (
        sampling.PermittedTokens(),
        {"banned_token_ids": (9, 1)},
        {"allowed_token_ids": (2, 5, 8), "banned_token_ids": (2,)},
    ),
    "TokenPenalties": (
        sampling.TokenPenalties(), {"repetition_penalty": 1.3, "presence_penalty": 0.4}, {"frequency_penalty": -0.7},
    ),
    "NoRepeatNgram": (sampling.NoRepeatNgram(), {"no_repeat_ngram_size": 2}, {"no_repeat_ngram_size": 1}),
    "MinNewTokens": (sampling.MinNewTokens(), {"min_new_tokens": 5}, {"min_new_tokens": 1}),
    "Temperature": (sampling.Temperature(), {"temperature": 0.6}, {"temperature": 1e-4}),
    "TopK": (sampling.TopK(), {"temperature": 1.0, "top_k": 4}, {"temperature": 1.0, "top_k": 1}),
    "TopP": (sampling.TopP(), {"temperature": 1.0, "top_p": 0.7}, {"temperature": 1.0, "top_p": 0.0}),
    "MinP": (sampling.MinP(), {"temperature": 1.0, "min_p": 0.2}, {"temperature": 1.0, "min_p": 1.0}),
    "TypicalP": (sampling.TypicalP(), {"temperature": 1.0, "typical_p": 0.5}, {"temperature": 1.0, "typical_p": 0.0}),
}  # fmt: skip
CASES["standard_chain"] = (
    sampling.standard_chain(),
    {name: value for case in CASES.values() for name, value in case[1].items()},
    {"temperature": 0.9, "top_k": 6, "top_p": 0.8, "repetition_penalty": 1.1},
)
VOCABS = [11, 307]  # 307 is past the head of the search for an edge, and no multiple of any vector width


def _params(rows: list[dict], vocab: int) -> sampling.SamplingParams:
    return sampling.params_from_configs(
        [config.SamplingConfig(**fields) for fields in rows],
        vocab_size=vocab,
        prompts=[PROMPT] * len(rows),
        history_len=HISTORY_LEN,
        stop_ids=[STOP_IDS] * len(rows),
    )


def _logits(vocab: int, batch: int = 3, seed: int = 13) -> jax.Array:
    values = np.random.default_rng(seed).normal(size=(batch, vocab)) * 2
    values[:, vocab - 2] += 3
    return jnp.asarray(values, jnp.float32)


def _setup(name: str, vocab: int):
    """The transform, the rows' configs, and the state of a batch after two accepted tokens."""
    transform, first, second = CASES[name]
    rows = [first, {}, second]
    return transform, rows, _after(transform, rows, vocab)


def _after(transform, rows: list[dict], vocab: int, live=None):
    """The state after every row accepted 9 and 3 (rows outside ``live`` none)."""
    batch = len(rows)
    state = transform.init(_params(rows, vocab), batch, vocab)
    live_B = jnp.ones(batch, bool) if live is None else jnp.asarray(live)
    for token in (9, 3):
        state = transform.accept(state, jnp.full(batch, token, jnp.int32), live_B)
    return state


@pytest.fixture(params=CASES)
def name(request) -> str:
    return request.param


def test_is_static(name: str):
    transform, *_ = CASES[name]
    assert dataclasses.is_dataclass(transform)
    again = type(transform)(**vars(transform))
    assert again == transform and again is not transform and hash(again) == hash(transform)
    with pytest.raises(dataclasses.FrozenInstanceError):
        transform.anything = 3  # type: ignore[attr-defined]
    assert not any(isinstance(leaf, jax.Array) for leaf in vars(transform).values())


@pytest.mark.parametrize("vocab", VOCABS)
def test_keeps_shape_and_float32_and_acts(name: str, vocab: int):
    transform, _, state = _setup(name, vocab)
    logits_BV = _logits(vocab)
    out_BV = transform.apply(logits_BV, state)
    chex.assert_shape(out_BV, (3, vocab))
    assert out_BV.dtype == jnp.float32
    assert not np.array_equal(out_BV[0], logits_BV[0])


@pytest.mark.parametrize("vocab", VOCABS)
def test_jitted_is_eager(name: str, vocab: int):
    transform, _, state = _setup(name, vocab)
    eager, jitted = transform.apply(_logits(vocab), state), jax.jit(transform.apply)(_logits(vocab), state)
    np.testing.assert_array_equal(np.isfinite(eager), np.isfinite(jitted))
    # One rounding more or less where the compiler fuses a product and a sum.
    np.testing.assert_allclose(eager, jitted, rtol=3e-7, atol=3e-7)


@pytest.mark.parametrize("vocab", VOCABS)
def test_row_alone_is_row_in_batch(name: str, vocab: int):
    transform, rows, state = _setup(name, vocab)
    apply = jax.jit(transform.apply)
    logits_BV = _logits(vocab)
    together = apply(logits_BV, state)
    for row in range(3):
        alone = apply(logits_BV[row : row + 1], _after(transform, [rows[row]], vocab))
        np.testing.assert_array_equal(alone[0], together[row])


# A row always has a temperature.
@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(
    "name", [name for name in CASES if name not in ("Temperature", "standard_chain")], indirect=True
)
def test_row_that_does_not_use_it_is_untouched(name: str, vocab: int):
    transform, _, state = _setup(name, vocab)
    logits_BV = _logits(vocab)
    np.testing.assert_array_equal(transform.apply(logits_BV, state)[1], logits_BV[1])


SKIPPABLE = [name for name, case in CASES.items() if isinstance(case[0], sampling.SkippableTransform)]


def test_all_but_the_temperature_can_be_skipped():
    assert set(CASES) - set(SKIPPABLE) == {"Temperature", "standard_chain"}


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("name", SKIPPABLE, indirect=True)
def test_a_row_that_it_changes_is_used(name: str, vocab: int):
    transform, first, second = CASES[name]
    rows = [first, {}, second, first, {}]
    state = _after(transform, rows, vocab)
    logits_BV = _logits(vocab, batch=len(rows))
    changed = np.any(np.asarray(transform.apply(logits_BV, state)) != np.asarray(logits_BV), axis=-1)
    used = np.asarray(transform.used(state))
    assert used.shape == (len(rows),) and used.dtype == bool
    assert not (changed & ~used).any()
    assert changed[0] and not used[[1, 4]].any()  # and it is no excuse to say that every row is


@pytest.mark.parametrize("number", range(3))
def test_the_chain_skips_nothing_that_is_used(name: str, number: int):
    # One row at a time: the first setting, none, the second setting.
    transform = sampling.standard_chain()
    row = (CASES[name][1], {}, CASES[name][2])[number]
    state, logits_BV = _after(transform, [row], 307), _logits(307, batch=1)
    expected_BV = logits_BV
    for one, own in zip(transform.transforms, state, strict=True):
        expected_BV = one.apply(expected_BV, own)
    np.testing.assert_array_equal(transform.apply(logits_BV, state), expected_BV)


def test_state_depends_on_shapes_alone(name: str):
    transform, first, second = CASES[name]
    states = [transform.init(_params([fields, {}], 11), 2, 11) for fields in (first, second, {})]
    chex.assert_trees_all_equal_shapes_and_dtypes(*states)
    accepted = transform.accept(states[0], jnp.asarray([9, 3], jnp.int32), jnp.asarray([True, False]))
    chex.assert_trees_all_equal_shapes_and_dtypes(states[0], accepted)
    assert all(leaf.shape[0] == 2 for leaf in jax.tree.leaves(states[0]))


def test_dead_rows_keep_their_state(name: str):
    transform, first, second = CASES[name]
    rows = [first, second, first]
    before = transform.init(_params(rows, 11), 3, 11)
    after = _after(transform, rows, 11, live=[True, False, True])
    all_live = _after(transform, rows, 11)
    for old, new, live in zip(*map(jax.tree.leaves, (before, after, all_live)), strict=True):
        np.testing.assert_array_equal(new[1], old[1])
        np.testing.assert_array_equal(new[0], live[0])
        np.testing.assert_array_equal(new[2], live[2])


def test_the_invalid_token_is_not_accepted(name: str):
    # jax counts index -1 from the end: it would be the last token.
    transform, first, second = CASES[name]
    before = transform.init(_params([first, second], 11), 2, 11)
    after = transform.accept(before, jnp.full(2, sampling.INVALID_TOKEN, jnp.int32), jnp.asarray([True, True]))
    chex.assert_trees_all_equal(before, after)


def test_rows_with_a_finite_logit_keep_one(name: str):
    transform, first, second = CASES[name]
    vocab, rng = 11, np.random.default_rng(14)
    one = np.full(vocab, -np.inf)
    one[9] = -5.0
    if name in ("PermittedTokens", "standard_chain"):
        one[:] = -40.0  # these may forbid what the row has
    logits = np.stack(
        [
            one,
            np.zeros(vocab),
            np.full(vocab, -3e38),
            np.linspace(-3e38, 3e38, vocab),
            np.linspace(-1e-38, 1e-38, vocab),
        ]
        + [rng.normal(size=vocab) * scale for scale in (1e-6, 1.0, 30.0, 1e4)]
    )
    logits_BV = jnp.asarray(logits, jnp.float32)
    for fields in (first, second):
        state = _after(transform, [fields] * len(logits), vocab)
        out_BV = np.asarray(jax.jit(transform.apply)(logits_BV, state))
        assert np.isfinite(out_BV).any(axis=-1).all()
        assert not np.isnan(out_BV).any()


def test_sharded_rows_and_vocabulary_change_nothing(name: str):
    transform, first, second = CASES[name]
    rows, vocab = [first, {}, second, first], 24
    mesh = jax.make_mesh((2, 4), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    state, logits_BV = _after(transform, rows, vocab), _logits(vocab, batch=4)
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    by_both = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data", "model"))
    sharded = jax.jit(transform.apply)(jax.device_put(logits_BV, by_both), jax.device_put(state, by_row))
    np.testing.assert_array_equal(sharded, jax.jit(transform.apply)(logits_BV, state))
