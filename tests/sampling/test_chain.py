import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import sampling
from jdecode.sampling import chain as chain_lib
from jdecode.sampling import draw

VOCAB = 11


@dataclasses.dataclass(frozen=True)
class NotTwice:
    """A caller's own transform: the last token cannot come again at once."""

    def init(self, params, batch, vocab):
        return jnp.full((batch,), vocab, jnp.int32)

    def apply(self, logits_BV, state):
        return jnp.where(jnp.arange(logits_BV.shape[1])[None] == state[:, None], -jnp.inf, logits_BV)

    def accept(self, state, token_B, live_B):
        return jnp.where(live_B, token_B, state)


def test_a_transform_of_ten_lines_plugs_in(params_of):
    chain = sampling.standard_chain((NotTwice(),))
    params = params_of({}, vocab=VOCAB)
    state = chain.init(params, 1, VOCAB)
    logits_BV = jnp.zeros((1, VOCAB)).at[0, 9].set(4.0).at[0, 6].set(3.0)
    key_B, tokens = sampling.request_keys([1], [0]), []
    for position in range(4):
        token_B = draw.draw(
            chain.apply(logits_BV, state), key_B, jnp.asarray([position]), sampling.is_random(params.temperature_B)
        )
        state = chain.accept(state, token_B, jnp.asarray([True]))
        tokens.append(int(token_B[0]))
    assert tokens == [9, 6, 9, 6]


def test_chain_applies_from_left_to_right(params_of):
    # Bias 2 then temperature 0.5: (1 + 2, 2) becomes (0, -2). The other way round: (-2 + 2, 0) becomes (0, 0).
    params = params_of({"temperature": 0.5, "logit_bias": ((1, 2.0),)}, vocab=3)
    logits_BV = jnp.asarray([[-7.0, 1.0, 2.0]])

    def apply(*transforms: sampling.Transform) -> list[float]:
        chain = chain_lib.chain(*transforms)
        return chain.apply(logits_BV, chain.init(params, 1, 3))[0].tolist()

    assert apply(sampling.LogitBias(), sampling.Temperature()) == [-20.0, 0.0, -2.0]
    assert apply(sampling.Temperature(), sampling.LogitBias()) == [-18.0, 0.0, 0.0]


def test_chains_nest(params_of):
    params = params_of({"temperature": 0.5, "top_k": 2}, vocab=3)
    logits_BV = jnp.asarray([[1.0, 3.0, 2.0]])
    flat = chain_lib.chain(sampling.Temperature(), sampling.TopK())
    nested = chain_lib.chain(sampling.Temperature(), chain_lib.chain(sampling.TopK()))
    np.testing.assert_array_equal(
        nested.apply(logits_BV, nested.init(params, 1, 3)), flat.apply(logits_BV, flat.init(params, 1, 3))
    )


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_chain_gives_float32_of_any_float_dtype(params_of, dtype):
    chain = sampling.standard_chain()
    out_BV = chain.apply(jnp.ones((2, VOCAB), dtype), chain.init(params_of({}, {}, vocab=VOCAB), 2, VOCAB))
    chex.assert_shape(out_BV, (2, VOCAB))
    assert out_BV.dtype == jnp.float32


def test_no_ban_hides_a_nan(params_of):
    params = params_of({"banned_token_ids": (4,)}, {"banned_token_ids": (4,)}, vocab=VOCAB)
    chain = sampling.standard_chain()
    logits_BV = jnp.ones((2, VOCAB)).at[0, 4].set(jnp.nan)
    out_BV = np.asarray(chain.apply(logits_BV, chain.init(params, 2, VOCAB)))
    assert np.isnan(out_BV[0]).all()
    assert not np.isnan(out_BV[1]).any()


@dataclasses.dataclass(frozen=True)
class _Half(NotTwice):
    def apply(self, logits_BV, state):
        return logits_BV.astype(jnp.bfloat16)


def test_transform_that_changes_the_dtype_is_refused_by_name(params_of):
    chain = chain_lib.chain(_Half())
    with pytest.raises(TypeError, match="transform _Half: expected float32"):
        chain.apply(jnp.ones((1, VOCAB)), chain.init(params_of({}, vocab=VOCAB), 1, VOCAB))


@dataclasses.dataclass  # not frozen: no hash
class _Mutable:
    def init(self, params, batch, vocab):
        return None

    def apply(self, logits_BV, state):
        return logits_BV

    def accept(self, state, token_B, live_B):
        return state


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (sampling.TopK, "the class TopK"),
        (lambda logits_BV: logits_BV, "an object of class function"),
        (_Mutable(), "_Mutable: expected a hashable object"),
    ],
)
def test_what_is_no_transform_is_refused(wrong, message: str):
    with pytest.raises(TypeError, match=message):
        chain_lib.chain(sampling.Temperature(), wrong)


def test_one_trace_whatever_the_values(params_of):
    @jax.jit
    @chex.assert_max_traces(n=1)
    def step(logits_BV, params, key_B, position_B):
        chain = sampling.standard_chain()
        state = chain.init(params, *logits_BV.shape)
        logits_BV = chain.apply(logits_BV, state)
        token_B = draw.draw(logits_BV, key_B, position_B, sampling.is_random(params.temperature_B))
        return token_B, chain.accept(state, token_B, jnp.asarray([True, False]))

    logits_BV = jnp.asarray(np.random.default_rng(9).normal(size=(2, VOCAB)), jnp.float32)
    everything = {
        "temperature": 0.7, "top_k": 5, "top_p": 0.9, "min_p": 0.02, "typical_p": 0.95, "repetition_penalty": 1.2,
        "presence_penalty": 0.1, "frequency_penalty": 0.2, "no_repeat_ngram_size": 2, "min_new_tokens": 3,
        "logit_bias": ((3, 1.0),), "allowed_token_ids": (1, 2, 3, 9), "banned_token_ids": (2,),
    }  # fmt: skip
    one_by_one = [{"temperature": 0.7, name: value} for name, value in everything.items() if name != "temperature"]
    for seed, fields in enumerate([{}, everything, *one_by_one]):
        for prompt, stop_ids in ([1], ()), ([4, 2, 4], (2, 9)):
            params = params_of(fields, {}, vocab=VOCAB, prompt=prompt, stop_ids=stop_ids)
            step(logits_BV, params, sampling.request_keys([seed, 2**40], [0, seed]), jnp.asarray([seed, 3]))


def test_equal_chains_trace_once(params_of):
    num_traces = 0

    def apply(chain, logits_BV, params):
        nonlocal num_traces
        num_traces += 1
        return chain.apply(logits_BV, chain.init(params, *logits_BV.shape))

    jitted = jax.jit(apply, static_argnums=0)
    params = params_of({}, vocab=VOCAB)
    first, second = sampling.standard_chain((NotTwice(),)), sampling.standard_chain((NotTwice(),))
    assert first == second and first is not second and hash(first) == hash(second)
    jitted(first, jnp.ones((1, VOCAB)), params)
    jitted(second, jnp.ones((1, VOCAB)), params)
    assert num_traces == 1
    assert first != sampling.standard_chain()


def test_each_field_of_the_config_changes_the_law(params_of):
    # Through the whole chain: none is read and forgotten.
    chain = sampling.standard_chain()
    logits_BV = jnp.asarray([[0.1, 1.0, 0.4, 0.7, 0.3, 2.0, 0.5, 0.9, 0.6, 3.0, 0.45]])

    def law(**fields) -> np.ndarray:
        params = params_of({"temperature": 1.0, **fields}, vocab=VOCAB, prompt=[3, 9, 5, 3, 9], stop_ids=(9,))
        state = chain.init(params, 1, VOCAB)
        for token in (3, 9):
            state = chain.accept(state, jnp.asarray([token]), jnp.asarray([True]))
        return np.asarray(jax.nn.softmax(chain.apply(logits_BV, state)[0]))

    plain = law()
    for fields in (
        {"temperature": 0.5}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.2}, {"typical_p": 0.5},
        {"repetition_penalty": 1.5}, {"presence_penalty": 0.5}, {"frequency_penalty": 0.5}, {"no_repeat_ngram_size": 3},
        {"min_new_tokens": 3}, {"logit_bias": ((2, 1.0),)}, {"allowed_token_ids": (1, 9)}, {"banned_token_ids": (9,)},
    ):  # fmt: skip
        assert np.abs(law(**fields) - plain).max() > 1e-3, fields
