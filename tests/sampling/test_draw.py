import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import sampling
from jdecode.sampling import draw

VOCAB = 11


def _keys(*seeds: int) -> jax.Array:
    return sampling.request_keys(seeds, [0] * len(seeds))


def _draw(logits_BV, key_B, position_B, is_random_B) -> np.ndarray:
    return np.asarray(jax.jit(draw.draw)(logits_BV, key_B, jnp.asarray(position_B), jnp.asarray(is_random_B)))


def test_request_key_is_seed_then_sample():
    key_B = sampling.request_keys([42, 0, 42], [0, 3, 1])
    for row, (seed, sample) in enumerate([(42, 0), (0, 3), (42, 1)]):
        expected = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), sample)
        np.testing.assert_array_equal(jax.random.key_data(key_B[row]), jax.random.key_data(expected))


def test_all_bits_of_a_seed_count():
    seeds = [0, 1, 2**31, 2**32, 2**32 + 1, 2**33, 2**62, 2**63 - 1]
    data = np.asarray(jax.random.key_data(_keys(*seeds)))
    assert len({tuple(words) for words in data.tolist()}) == len(seeds)


@pytest.mark.parametrize(
    ("seeds", "idx", "message"),
    [
        ([-1], [0], "seed: expected"),
        ([2**63], [0], "seed: expected"),
        ([1], [-1], "sample_idx"),
        ([1, 2], [0], "2 seeds"),
    ],
)
def test_request_keys_refuse(seeds, idx, message):
    with pytest.raises(ValueError, match=message):
        sampling.request_keys(seeds, idx)


def test_a_row_does_not_depend_on_its_mates_slot_or_order():
    rng = np.random.default_rng(8)
    vocab, batch = 301, 7
    logits_BV = jnp.asarray(rng.normal(size=(batch, vocab)), jnp.float32)
    key_B, position_B = _keys(*range(5, 5 + batch)), jnp.arange(20, 20 + batch)
    is_random_B = jnp.asarray([True, False, True, True, False, True, True])
    together = _draw(logits_BV, key_B, position_B, is_random_B)
    for row in range(batch):
        one = slice(row, row + 1)
        assert _draw(logits_BV[one], key_B[one], position_B[one], is_random_B[one])[0] == together[row]
    order = jnp.asarray(rng.permutation(batch))
    shuffled = _draw(logits_BV[order], key_B[order], position_B[order], is_random_B[order])
    np.testing.assert_array_equal(shuffled, together[order])
    np.testing.assert_array_equal(_draw(logits_BV, key_B, position_B, is_random_B), together)


def test_flat_logits_give_many_tokens_over_the_positions():
    # A key frozen at compile time gave one token for ever (sgl-project/sglang-jax#940). 64 draws of 1,000: 62 distinct
    # ones expected; fewer than 40 has a probability under 1e-20.
    tokens = [int(_draw(jnp.zeros((1, 1000)), _keys(3), [position], [True])[0]) for position in range(64)]
    assert len(set(tokens)) >= 40


def test_seed_sample_position_and_purpose_all_change_the_draw():
    logits_BV = jnp.zeros((1, 100_003))
    position, is_random = jnp.asarray([4]), jnp.asarray([True])
    base = draw.draw(logits_BV, _keys(3), position, is_random)
    others = [
        draw.draw(logits_BV, _keys(4), position, is_random),
        draw.draw(logits_BV, sampling.request_keys([3], [1]), position, is_random),
        draw.draw(logits_BV, _keys(3), position + 1, is_random),
        draw.draw(logits_BV, _keys(3), position, is_random, purpose=sampling.PURPOSE_DRAFT),
    ]
    assert len({int(token[0]) for token in [base, *others]}) == 5
    assert int(draw.draw(logits_BV, _keys(3), position, is_random)[0]) == int(base[0])


def test_no_two_draws_share_a_key():
    purposes = [sampling.PURPOSE_TOKEN, sampling.PURPOSE_DRAFT, sampling.PURPOSE_ACCEPT, sampling.PURPOSE_RESIDUAL]
    words = set()
    for position in range(5):
        for purpose in purposes:
            key_B = sampling.keys_at(_keys(0, 9), jnp.asarray([position, position]), purpose)
            words |= {tuple(data) for data in np.asarray(jax.random.key_data(key_B)).tolist()}
    assert len(words) == 5 * 4 * 2


def test_key_reuse_checker_is_content():
    with jax.debug_key_reuse(True):
        key_B = _keys(3, 4)
        draw.draw(jnp.zeros((2, VOCAB)), key_B, jnp.asarray([1, 1]), jnp.asarray([True, True]))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_that_are_not_random_take_the_lowest_argmax(dtype):
    logits_BV = jnp.zeros((3, VOCAB), dtype).at[:, 9].set(2).at[1, 7].set(2).at[:, 10].set(2)
    assert _draw(logits_BV, _keys(1, 2, 3), [5, 5, 5], [False] * 3).tolist() == [9, 7, 9]


@pytest.mark.parametrize("is_random", [False, True])
def test_broken_rows_give_the_invalid_token(is_random: bool):
    # An argmax over NaN, and a categorical draw over nothing, silently give some token.
    row = [0.0] * 9 + [3.0, 0.0]
    broken = [[*row[:3], np.nan, *row[4:]], [-np.inf] * VOCAB, [*row[:3], np.inf, *row[4:]], [np.nan] * VOCAB]
    logits_BV = jnp.asarray([[*[-np.inf] * 9, 3.0, -np.inf], *broken])
    got = _draw(logits_BV, _keys(*range(5)), [3] * 5, [is_random] * 5)
    assert got.tolist() == [9, *[sampling.INVALID_TOKEN] * 4]


def test_tokens_without_probability_are_never_drawn():
    logits_BV = jnp.full((20_000, VOCAB), -jnp.inf).at[:, 9].set(-80.0).at[:, 3].set(-80.0)
    key_B = jnp.broadcast_to(_keys(6), (20_000,))
    got = _draw(logits_BV, key_B, np.arange(20_000), np.full(20_000, True))
    assert set(got.tolist()) == {3, 9}


def test_noise_follows_the_gumbel_law():
    # 2**20 draws, moments of the standard Gumbel law: mean 0.57722, variance 1.64493; fourth central moment 14.6 gives
    # standard errors 0.00125 and 0.0034. Bounds of 4 of them: false alarm 1.3e-4 for the two. P(X > 12) is 6.1e-6:
    # 6.4 expected, no more than 20 (1e-5). All are finite.
    noise = np.asarray(jax.jit(draw._gumbel)(jax.random.bits(jax.random.key(11), (2**20,))), np.float64)
    assert np.isfinite(noise).all()
    assert abs(noise.mean() - 0.57722) < 4 * 0.00125
    assert abs(noise.var() - 1.64493) < 4 * 0.0034
    assert 0 < (noise > 12).sum() <= 20


def test_noise_is_finite_at_both_ends():
    # Infinite noise could hide the only token of a row. -log(-log1p(-v)): v = 2**-33 gives 33 log 2 = 22.874; the last
    # float32 under 1 gives -log(24 log 2) = -2.812.
    noise = draw._gumbel(jnp.asarray([0, 2**32 - 1], jnp.uint32))
    np.testing.assert_allclose(noise, [22.874, -2.812], atol=1e-3)


def test_greatest_noise_of_a_long_vocabulary_is_unique():
    # 64 draws of 262,144 numbers from 32 bits: a tie at the top once in some 16,000 draws, 0.4 % for 64. From 23 bits
    # it is one draw in 30.
    def num_at_top(key: jax.Array) -> jax.Array:
        noise = draw._gumbel(jax.random.bits(key, (262_144,)))
        return jnp.sum(noise == jnp.max(noise))

    counts = jax.jit(lambda keys: jax.lax.map(num_at_top, keys))(jax.random.split(jax.random.key(12), 64))
    assert counts.tolist() == [1] * 64
