"""Objectives against numpy in float64, and what must vanish."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.models import transformer
from jdecode.training import objective
from tests import tiny_models
from tests.training import tiny_run

V, B, T = 13, 3, 5
STUDENT = transformer.Transformer(dataclasses.replace(tiny_run.ARCHITECTURE, vocab_size=V), backend="banded")
TEACHER = transformer.Transformer(
    dataclasses.replace(STUDENT.config, hidden_size=10, num_heads=2, num_kv_heads=1), backend="banded"
)
STUDENT_PARAMS = {"params": tiny_models.random_params(STUDENT.config, seed=1)}
TEACHER_PARAMS = {"params": tiny_models.random_params(TEACHER.config, seed=2)}
TOKENS_BT = jnp.asarray(np.random.default_rng(3).integers(0, V, (B, T + 1)), jnp.int32)

RTOL = 2e-5
"""Means of 15 float32 sums of 13 terms, each good to some 1e-6."""


def logits(model: transformer.Transformer, params) -> np.ndarray:
    """Of all tokens but the last, which nothing follows."""
    return np.asarray(jax.jit(model.apply)(params, TOKENS_BT[:, :-1])[0], np.float64)


def log_softmax(x: np.ndarray) -> np.ndarray:
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def plain_cross_entropy(x: np.ndarray) -> float:
    targets = np.asarray(TOKENS_BT[:, 1:])
    return -float(np.mean([log_softmax(x)[b, t, targets[b, t]] for b, t in np.ndindex(B, T)]))


def plain_divergence(p: np.ndarray, q: np.ndarray) -> float:
    p, q = log_softmax(p), log_softmax(q)
    return float(np.mean((np.exp(p) * (p - q)).sum(axis=-1)))


def test_cross_entropy_by_hand():
    # p = 3/4 and 1/4: log 3 apart. -log(3/4) = 0.287682, -log(1/4) = 1.386294.
    logits_BTV = jnp.asarray([[[np.log(3.0), 0.0], [np.log(3.0), 0.0]]])
    got = objective.cross_entropy(logits_BTV, jnp.asarray([[0, 1]]))
    np.testing.assert_allclose(got, (0.2876821 + 1.3862944) / 2, rtol=1e-6)


def test_kl_divergence_by_hand():
    # p = (3/4, 1/4), q = (1/2, 1/2): 3/4 log(3/2) + 1/4 log(1/2) = 0.130812; the other way 1/2 log(4/3) = 0.143841.
    p, q = jnp.asarray([[[np.log(3.0), 0.0]]]), jnp.zeros((1, 1, 2))
    np.testing.assert_allclose(objective.kl_divergence(p, q), 0.1308120, rtol=1e-5)
    np.testing.assert_allclose(objective.kl_divergence(q, p), 0.1438410, rtol=1e-5)


def test_kl_divergence_of_distant_distributions_is_finite():
    p, q = jnp.asarray([[[0.0, -200.0]]]), jnp.asarray([[[-200.0, 0.0]]])
    np.testing.assert_allclose(objective.kl_divergence(p, q), 200.0, rtol=1e-6)


def test_next_token():
    """Each token but the first is predicted from those before it."""
    loss, scalars = jax.jit(objective.NextToken(STUDENT))(STUDENT_PARAMS, None, TOKENS_BT)
    np.testing.assert_allclose(loss, plain_cross_entropy(logits(STUDENT, STUDENT_PARAMS)), rtol=RTOL)
    assert scalars.keys() == {"next_token"} and scalars["next_token"] == loss
    assert loss.shape == () and loss.dtype == jnp.float32


@pytest.mark.parametrize(("temperature", "share"), [(1.0, 1.0), (2.5, 1.0), (0.5, 0.25), (1.0, 0.0)])
def test_distillation(temperature, share):
    learn = jax.jit(objective.Distillation(STUDENT, TEACHER, temperature, share))
    loss, scalars = learn(STUDENT_PARAMS, TEACHER_PARAMS, TOKENS_BT)
    student, teacher = logits(STUDENT, STUDENT_PARAMS), logits(TEACHER, TEACHER_PARAMS)
    divergence = plain_divergence(teacher / temperature, student / temperature)
    next_token = plain_cross_entropy(student)
    np.testing.assert_allclose(scalars["divergence"], divergence, rtol=RTOL)
    np.testing.assert_allclose(scalars["next_token"], next_token, rtol=RTOL)
    expected = share * temperature**2 * divergence + (1 - share) * next_token
    np.testing.assert_allclose(loss, expected, rtol=RTOL)
    assert scalars.keys() == {"divergence", "next_token"}


def test_a_student_that_is_its_teacher_has_nothing_to_learn():
    learn = objective.Distillation(STUDENT, STUDENT, temperature=1.5)
    value_and_gradient = jax.jit(jax.value_and_grad(learn, has_aux=True))
    (loss, _), gradient = value_and_gradient(STUDENT_PARAMS, STUDENT_PARAMS, TOKENS_BT)
    assert abs(float(loss)) < 1e-6
    another = {"params": tiny_models.random_params(STUDENT.config, seed=7)}
    _, other = value_and_gradient(another, STUDENT_PARAMS, TOKENS_BT)
    zeros = jax.tree.map(jnp.zeros_like, gradient)
    assert tiny_run.max_difference(gradient, zeros) < 1e-5 * tiny_run.max_difference(other, zeros)


def test_the_teacher_learns_nothing():
    learn = objective.Distillation(STUDENT, TEACHER, 2.0, 0.5)
    gradient = jax.jit(jax.grad(lambda teacher: learn(STUDENT_PARAMS, teacher, TOKENS_BT)[0]))(TEACHER_PARAMS)
    assert all(not np.asarray(leaf).any() for leaf in jax.tree.leaves(gradient))


def test_the_gradient_keeps_its_size_at_any_temperature():
    """What the square is for: at a great temperature the loss is the squared distance of centred logits / 2V."""
    student, teacher = logits(STUDENT, STUDENT_PARAMS), logits(TEACHER, TEACHER_PARAMS)
    centred = (student - student.mean(-1, keepdims=True)) - (teacher - teacher.mean(-1, keepdims=True))
    expected = (centred**2).mean() / 2  # a mean over V
    learn = jax.jit(objective.Distillation(STUDENT, TEACHER, temperature=100.0))
    loss, _ = learn(STUDENT_PARAMS, TEACHER_PARAMS, TOKENS_BT)
    np.testing.assert_allclose(loss, expected, rtol=0.05)  # terms of higher order: some logits over the temperature


def test_another_vocabulary_is_refused():
    other = dataclasses.replace(TEACHER, config=dataclasses.replace(TEACHER.config, vocab_size=V + 1))
    with pytest.raises(ValueError) as refused:
        objective.Distillation(STUDENT, other)
    assert str(refused.value) == (
        "distillation: expected a teacher with the student's vocabulary of 13, got one of 14; give the student the "
        "vocab_size of the teacher, whose tokenizer it takes"
    )


def test_objectives_are_static():
    """Two of the same are equal and hash alike, so that neither compiles a second program."""
    again = transformer.Transformer(dataclasses.replace(STUDENT.config), backend="banded")
    assert hash(objective.NextToken(STUDENT)) == hash(objective.NextToken(again))
    assert objective.NextToken(STUDENT) == objective.NextToken(again)
    learn = objective.Distillation(STUDENT, TEACHER, 2.0)
    assert learn == objective.Distillation(again, TEACHER, 2.0) != objective.Distillation(STUDENT, TEACHER, 2.5)
