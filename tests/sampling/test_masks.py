import jax
import jax.numpy as jnp
import numpy as np

from jdecode import sampling
from jdecode.sampling import masks

VOCAB = 11
NEG = -np.inf


def _apply(transform, params, logits_BV):
    return np.asarray(jax.jit(transform.apply)(logits_BV, transform.init(params, *logits_BV.shape)))


def test_logit_bias_adds_in_its_row_only(params_of):
    logits_BV = jnp.tile(jnp.arange(VOCAB, dtype=jnp.float32), (3, 1))
    params = params_of({"logit_bias": ((9, 2.5), (4, -1.0))}, {}, {"logit_bias": ((10, 4.0),)}, vocab=VOCAB)
    got = _apply(sampling.LogitBias(), params, logits_BV)
    assert got[0].tolist() == [0, 1, 2, 3, 3, 5, 6, 7, 8, 11.5, 10]
    assert got[1].tolist() == list(range(VOCAB))
    assert got[2].tolist() == [*range(10), 14]


def test_allowed_and_banned_tokens(params_of):
    logits_BV = jnp.ones((4, 5))
    params = params_of(
        {"allowed_token_ids": (1, 3)},
        {"banned_token_ids": (4,)},
        {"allowed_token_ids": (1, 2, 3), "banned_token_ids": (3, 0)},
        {},
        vocab=5,
    )
    got = _apply(sampling.PermittedTokens(), params, logits_BV)
    assert got.tolist() == [[NEG, 1, NEG, 1, NEG], [1, 1, 1, 1, NEG], [NEG, 1, 1, NEG, NEG], [1, 1, 1, 1, 1]]


def test_min_new_tokens_holds_stop_tokens_back_until_so_many_are_out(params_of):
    logits_BV = jnp.ones((3, 5))
    params = params_of({"min_new_tokens": 2}, {}, {"min_new_tokens": 1}, vocab=5, stop_ids=(2, 4))
    transform = sampling.MinNewTokens()
    state = transform.init(params, 3, 5)
    free, held = [1, 1, 1, 1, 1], [1, 1, NEG, 1, NEG]
    assert transform.apply(logits_BV, state).tolist() == [held, free, held]
    state = transform.accept(state, jnp.asarray([3, 3, 3]), jnp.asarray([True, True, False]))
    assert transform.apply(logits_BV, state).tolist() == [held, free, held]
    state = transform.accept(state, jnp.asarray([3, 3, 3]), jnp.asarray([True, True, True]))
    assert transform.apply(logits_BV, state).tolist() == [free, free, free]
    state = transform.accept(state, jnp.asarray([3, 3, 3]), jnp.asarray([True, True, True]))
    assert transform.apply(logits_BV, state).tolist() == [free, free, free]


def test_min_new_tokens_leaves_a_row_that_has_only_stop_tokens(params_of):
    logits_BV = jnp.asarray([[NEG, NEG, 3.0, NEG, 1.0]])
    params = params_of({"min_new_tokens": 2}, vocab=5, stop_ids=(2, 4))
    assert _apply(sampling.MinNewTokens(), params, logits_BV).tolist() == logits_BV.tolist()


def test_mark_ids_drops_what_is_out_of_range():
    # jax counts -1 from the end, which would mark the last token.
    ids_BX = jnp.asarray([[-1, 2, 5, sampling.PADDING_ID], [-5, 3, 3, 4]], jnp.int32)
    got = masks.mark_ids(ids_BX, 2, 5)
    assert got.tolist() == [[False, False, True, False, False], [False, False, False, True, True]]
