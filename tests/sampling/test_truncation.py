import fractions

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import sampling

DTYPES = [jnp.float32, jnp.bfloat16]


def _kept(params_of, transform, law, dtype=jnp.float32, **fields) -> dict[int, float]:
    """The tokens that the transform keeps of a law, with their renormalised probabilities."""
    chain = sampling.Chain((transform,))
    params = params_of({"temperature": 1.0, **fields}, vocab=len(law))
    logits_BV = jnp.log(jnp.asarray([law], jnp.float32)).astype(dtype)
    out = np.asarray(jax.nn.softmax(jax.jit(chain.apply)(logits_BV, chain.init(params, 1, len(law)))[0]))
    return {token: float(out[token]) for token in np.flatnonzero(out).tolist()}


def _assert_law(got: dict[int, float], expected: dict[int, float], rtol: float = 1e-5):
    assert got.keys() == expected.keys()
    np.testing.assert_allclose([got[token] for token in expected], list(expected.values()), rtol=rtol)


def test_top_k_worked_example(params_of):
    # .35 + .25 + .18 = .78
    got = _kept(params_of, sampling.TopK(), [0.05, 0.18, 0.07, 0.25, 0.35, 0.10], top_k=3)
    _assert_law(got, {4: 0.35 / 0.78, 3: 0.25 / 0.78, 1: 0.18 / 0.78})


def test_top_p_worked_examples(params_of):
    # .45 + .30 = .75 < .85 <= .90: three
    got = _kept(params_of, sampling.TopP(), [0.10, 0.30, 0.15, 0.45], top_p=0.85)
    _assert_law(got, {3: 0.45 / 0.90, 1: 0.30 / 0.90, 2: 0.15 / 0.90})
    # .85 reaches .8 alone
    _assert_law(_kept(params_of, sampling.TopP(), [0.03, 0.08, 0.85, 0.04], top_p=0.8), {2: 1.0})
    # an exact partial sum keeps no extra
    got = _kept(params_of, sampling.TopP(), [0.125, 0.25, 0.5, 0.125], top_p=0.75)
    _assert_law(got, {2: 2 / 3, 1: 1 / 3})
    # .4 + .3 = .7 < .8: three (an inclusive cumulative test keeps two)
    assert _kept(params_of, sampling.TopP(), [0.1, 0.4, 0.3, 0.2], top_p=0.8).keys() == {1, 2, 3}


def test_top_p_at_exact_partial_sums_of_any_law(params_of):
    # Whole weights over their sum, p the partial sum of the first n: n tokens, by rational arithmetic. Wrong for a
    # comparison without slack, since float32 holds neither the logarithms nor p exactly.
    rng = np.random.default_rng(5)
    vocab, num_laws = 29, 400
    weights = np.sort(rng.choice(np.arange(1, 200), (num_laws, vocab)), axis=-1)
    weights += np.arange(vocab)  # strictly rising: no ties, and the argmax is the last id
    num_kept = rng.integers(1, vocab, num_laws)
    sums = weights.sum(axis=-1)
    parts = [fractions.Fraction(int(w[-n:].sum()), int(s)) for w, n, s in zip(weights, num_kept, sums, strict=True)]
    params = params_of(*[{"temperature": 1.0, "top_p": float(part)} for part in parts], vocab=vocab)
    logits_BV = jnp.asarray(np.log(weights / sums[:, None]), jnp.float32)
    out_BV = jax.jit(sampling.TopP().apply)(logits_BV, params.top_p_B)
    np.testing.assert_array_equal(np.isfinite(out_BV).sum(axis=-1), num_kept)


LAW = [0.02, 0.10, 0.04, 0.07, 0.03, 0.20, 0.05, 0.09, 0.06, 0.30, 0.04]  # the argmax at V - 2


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_p", [0.0, 1e-45, 1e-8, 1e-4, 1e-3])
def test_tiny_top_p_keeps_the_argmax(params_of, top_p: float, dtype):
    # An empty set gave token 0 or NaN; 1 - p rounded to 1 let everything or nothing through.
    _assert_law(_kept(params_of, sampling.TopP(), LAW, dtype, top_p=top_p), {9: 1.0})


@pytest.mark.parametrize("dtype", DTYPES)
def test_filters_that_are_off_keep_all(params_of, dtype):
    vocab = len(LAW)
    for top_k in (0, -1, vocab, vocab + 5):
        assert len(_kept(params_of, sampling.TopK(), LAW, dtype, top_k=top_k)) == vocab
        direct = sampling.TopK().apply(jnp.log(jnp.asarray([LAW], dtype)).astype(jnp.float32), jnp.asarray([top_k]))
        assert np.isfinite(direct).all()
    assert len(_kept(params_of, sampling.TopP(), LAW, dtype, top_p=1.0)) == vocab
    assert len(_kept(params_of, sampling.MinP(), LAW, dtype, min_p=0.0)) == vocab
    assert len(_kept(params_of, sampling.TypicalP(), LAW, dtype, typical_p=1.0)) == vocab


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", range(1, 11))
def test_top_k_keeps_exactly_k_even_in_a_tie(params_of, top_k: int, dtype):
    # One greater token at V - 2, ten equal ones: the k - 1 lowest ids of these.
    law = [1 / 12] * 9 + [2 / 12] + [1 / 12]
    got = _kept(params_of, sampling.TopK(), law, dtype, top_k=top_k)
    others = [token for token in range(11) if token != 9][: top_k - 1]
    assert got.keys() == {9, *others}


def test_top_p_keeps_the_lowest_ids_of_a_tie(params_of):
    # 2/12 + 3 * 1/12 = 5/12 < 0.45 <= 6/12
    law = [1 / 12] * 9 + [2 / 12] + [1 / 12]
    assert _kept(params_of, sampling.TopP(), law, top_p=0.45).keys() == {0, 1, 2, 3, 9}


def test_min_p_is_relative_to_the_likeliest(params_of):
    # 0.3 * 0.30 = 0.09, which token 7 has exactly; 0.69 = 0.30 + 0.20 + 0.10 + 0.09
    got = _kept(params_of, sampling.MinP(), LAW, min_p=0.3)
    _assert_law(got, {1: 0.10 / 0.69, 5: 0.20 / 0.69, 7: 0.09 / 0.69, 9: 0.30 / 0.69})
    _assert_law(_kept(params_of, sampling.MinP(), LAW, min_p=1.0), {9: 1.0})


def test_typical_p_takes_the_nearest_to_the_entropy(params_of):
    # The entropy is 2.0757 nats. Distances of -log p: .10 at .227, .09 at .332, .20 at .466, .07 at .584, .06 at .738,
    # .30 at .872. Sums .10, .19, .39, .46: four for 0.4. The likeliest token is not among them.
    got = _kept(params_of, sampling.TypicalP(), LAW, typical_p=0.4)
    _assert_law(got, {1: 0.10 / 0.46, 3: 0.07 / 0.46, 5: 0.20 / 0.46, 7: 0.09 / 0.46})
    _assert_law(_kept(params_of, sampling.TypicalP(), LAW, typical_p=0.0), {1: 1.0})


def test_typical_p_after_another_filter_sees_the_renormalised_law(params_of):
    # Of .45/.30/.15/.10 top-k 3 leaves .5/.3333/.1667, entropy 1.0114: distances .318, .087, .780. For 0.8: .3333,
    # .8333. On the whole law (entropy 1.2354) it would be .0314, .437 (id 3), .662 (id 2): .30, .75, .90.
    law = [0.10, 0.30, 0.15, 0.45]
    chain = sampling.Chain((sampling.TopK(), sampling.TypicalP()))
    params = params_of({"temperature": 1.0, "top_k": 3, "typical_p": 0.8}, vocab=4)
    out = np.asarray(chain.apply(jnp.log(jnp.asarray([law])), chain.init(params, 1, 4))[0])
    assert np.flatnonzero(np.isfinite(out)).tolist() == [1, 3]


def test_temperature_comes_before_top_p(params_of):
    # [3, 2, 1] at 0.5: .867 reaches .8 alone. Without it .665 + .245: two.
    chain = sampling.standard_chain()
    logits_BV = jnp.asarray([[1.0, 3.0, 2.0]])

    def kept(temperature: float) -> list[int]:
        params = params_of({"temperature": temperature, "top_p": 0.8}, vocab=3)
        return np.flatnonzero(np.isfinite(chain.apply(logits_BV, chain.init(params, 1, 3))[0])).tolist()

    assert kept(0.5) == [1]
    assert kept(1.0) == [1, 2]


def test_top_p_after_top_k_sees_the_renormalised_law(params_of):
    # .35/.25/.18/.10/.07/.05 with k = 3: .449/.321/.231, so .7 takes two. Without top-k: .35, .60, .78, three.
    chain = sampling.standard_chain()
    logits_BV = jnp.log(jnp.asarray([[0.05, 0.18, 0.07, 0.25, 0.35, 0.10]]))

    def kept(top_k: int) -> list[int]:
        params = params_of({"temperature": 1.0, "top_k": top_k, "top_p": 0.7}, vocab=6)
        return np.flatnonzero(np.isfinite(chain.apply(logits_BV, chain.init(params, 1, 6))[0])).tolist()

    assert kept(3) == [3, 4]
    assert kept(0) == [1, 3, 4]


def test_top_p_over_a_long_vocabulary(params_of):
    # 100,003 equal tokens: 0.25 of them is 25,000.75, so 25,001, the lowest ids. A bfloat16 running sum cannot count
    # them; nor does the head of the search reach so far.
    vocab = 100_003
    out = np.asarray(jax.jit(sampling.TopP().apply)(jnp.zeros((1, vocab)), jnp.asarray([0.25]))[0])
    kept = np.flatnonzero(np.isfinite(out))
    assert abs(len(kept) - 25_001) <= 1
    assert kept[-1] == len(kept) - 1
