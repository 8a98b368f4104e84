import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import sampling

DTYPES = [jnp.float32, jnp.bfloat16]
VOCAB = 11
LOGITS = [-2.0, 1.0, 0.5, 3.0, -40.0, 2.0, 6.0, 0.0, 1.5, 7.0, 6.5]  # the argmax at V - 2


def _apply(params_of, logits, temperature: float, dtype=jnp.float32) -> np.ndarray:
    """Temperature as a chain, which casts first."""
    chain = sampling.Chain((sampling.Temperature(),))
    state = chain.init(params_of({"temperature": temperature}, vocab=len(logits)), 1, len(logits))
    return np.asarray(jax.jit(chain.apply)(jnp.asarray([logits], dtype), state)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_no_temperature_is_the_law_of_the_argmax(params_of, temperature: float, dtype):
    # Dividing by 1e-40, which hardware flushes to 0, gives NaN; it has to mean 0.
    got = _apply(params_of, LOGITS, temperature, dtype)
    assert got[9] == 0
    assert np.all(np.delete(got, 9) == -np.inf)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("temperature", [1.2e-38, 1e-30, 1e-4])
def test_tiny_temperature_is_finite_law_of_the_argmax(params_of, temperature: float, dtype):
    got = _apply(params_of, LOGITS, temperature, dtype)
    assert got[9] == 0
    assert not np.isnan(got).any()
    assert np.all(np.exp(np.delete(got, 9)) == 0)


def test_tie_goes_to_the_lowest_id(params_of):
    got = _apply(params_of, [1.0, 2.0, 4.0, 4.0, 4.0], 0.0)
    assert got.tolist() == [-np.inf, -np.inf, 0.0, -np.inf, -np.inf]


def test_maximum_is_subtracted_before_the_division(params_of):
    # (1000 - 1002) / 0.5 = -4, (1001 - 1002) / 0.5 = -2; float16-sized quotients and 1e38 do not overflow either.
    assert _apply(params_of, [1000.0, 1002.0, 1001.0], 0.5).tolist() == [-4.0, 0.0, -2.0]
    got = _apply(params_of, [3e38, 1.0, -np.inf], 1e-4)
    assert got[0] == 0 and np.all(got[1:] == -np.inf)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    "logits", [[1.0, np.nan, 2.0], [-np.inf, -np.inf, -np.inf], [1.0, np.inf, 2.0]], ids=["nan", "empty", "infinite"]
)
def test_row_without_finite_maximum_is_nan(params_of, logits, temperature: float):
    assert np.isnan(_apply(params_of, logits, temperature)).all()


def test_no_temperature_divides_by_zero(params_of):
    with jax.debug_nans(True):
        sampling.Temperature().apply(jnp.asarray([LOGITS]), params_of({}, vocab=VOCAB).temperature_B)


def test_is_random_draws_the_line_at_the_smallest_normal_number():
    got = sampling.is_random(jnp.asarray([0.0, 1e-40, 1.2e-38, 0.7], jnp.float32))
    assert got.tolist() == [False, False, True, True]
