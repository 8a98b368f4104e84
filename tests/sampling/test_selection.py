"""The leading set against a plain model of it: sort, then count."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.sampling import selection


def _leading_set(order: np.ndarray, mass: np.ndarray, limit: int) -> set[int]:
    """Sorts by (-order, id) and takes tokens while the mass before them is under the limit."""
    kept, before = set(), 0
    for token in sorted(range(len(order)), key=lambda token: (-order[token], token)):
        if before >= limit:
            break
        kept.add(token)
        before += int(mass[token])
    return kept


@pytest.mark.parametrize("head_width", [0, 3, 256])
@pytest.mark.parametrize("has_mass", [False, True])
def test_keep_leading_is_sort_and_count(head_width: int, has_mass: bool):
    rng = np.random.default_rng(3)
    batch, vocab = 5, 23
    keep = jax.jit(selection.keep_leading, static_argnames="head_width")
    for trial in range(60):
        # Few distinct values, so ties are everywhere; both zeros, both signs, and -inf among them.
        values = np.asarray([-np.inf, -3e38, -1.5, -1e-30, -0.0, 0.0, 1e-30, 2.0, 2.0000002, 3e38], np.float32)
        order = rng.choice(values, (batch, vocab)) if trial % 3 else rng.normal(size=(batch, vocab)).astype(np.float32)
        mass = rng.integers(0, 4, (batch, vocab)) if has_mass else np.ones((batch, vocab), np.int64)
        mass[:, vocab - 2] = 1  # some mass in every row
        limit = rng.integers(1, np.maximum(mass.sum(axis=1), 2))
        got = keep(
            jnp.asarray(order),
            jnp.asarray(mass, jnp.int32) if has_mass else None,
            jnp.asarray(limit, jnp.int32),
            head_width=head_width,
        )
        for row in range(batch):
            expected = _leading_set(order[row], mass[row], limit[row])
            marked = set(np.flatnonzero(got[row]).tolist())
            assert marked == expected, (trial, row, order[row], mass[row], limit[row])


def test_keep_leading_finds_edge_past_the_head():
    # 1,000 equal tokens and a greater one at id 998: the first 698 ids and 998 make 699, far past the head of 256.
    order_BV = jnp.zeros((1, 1000)).at[0, 998].set(5.0)
    kept = selection.keep_leading(order_BV, None, jnp.asarray([699]))
    assert set(np.flatnonzero(kept[0]).tolist()) == {*range(698), 998}


def test_one_row_past_the_head_changes_no_other():
    rng = np.random.default_rng(4)
    order_BV = jnp.asarray(rng.normal(size=(2, 301)), jnp.float32)
    both = selection.keep_leading(order_BV, None, jnp.asarray([290, 7]))
    alone = selection.keep_leading(order_BV[1:], None, jnp.asarray([7]))
    assert both[0].sum() == 290
    np.testing.assert_array_equal(both[1], alone[0])


def test_probability_masses_are_in_proportion():
    # 1/2, 1/4, 1/8, 1/8: powers of two are exact in any fixed point.
    mass_BV, total_B = selection.probability_masses(jnp.log(jnp.asarray([[0.125, 0.25, 0.5, 0.125]])))
    assert int(mass_BV.sum()) == int(total_B[0])
    np.testing.assert_allclose(np.asarray(mass_BV[0]) / int(total_B[0]), [0.125, 0.25, 0.5, 0.125], rtol=2e-7)


@pytest.mark.parametrize("vocab", [1, 7, 262_144])
def test_probability_masses_do_not_overflow(vocab: int):
    mass_BV, total_B = selection.probability_masses(jnp.zeros((1, vocab)))
    assert 2**29 <= int(total_B[0]) <= 2**30
    assert int(mass_BV.min()) * vocab == int(total_B[0])


def test_first_argmax_takes_the_lowest_of_a_tie():
    values_BV = jnp.asarray([[1.0, 5.0, 2.0, 5.0], [-jnp.inf, -jnp.inf, -7.0, -8.0]])
    assert selection.first_argmax(values_BV).tolist() == [1, 2]
