"""The lists of ids that end a text."""

import pytest

from jdecode.decode import state, stopping


def test_union_of_the_models_and_the_callers():
    assert stopping.stop_ids((7, 2), (5, 7), ignore_eos=False, vocab_size=11) == (2, 5, 7)
    assert stopping.stop_ids((7, 2), (), ignore_eos=False, vocab_size=11) == (2, 7)
    assert stopping.stop_ids((7, 2), (5,), ignore_eos=True, vocab_size=11) == (5,)
    # An end token that the caller names is the caller's.
    assert stopping.stop_ids((7, 2), (5, 7), ignore_eos=True, vocab_size=11) == (5, 7)
    assert stopping.stop_ids((), (0, 10), ignore_eos=False, vocab_size=11) == (0, 10)


@pytest.mark.parametrize("token_id", [-1, 11])
def test_ids_outside_the_vocabulary_are_refused(token_id):
    with pytest.raises(ValueError, match=f"^stop_token_ids: expected ids from 0 to 10, got {token_id}$"):
        stopping.stop_ids((), (3, token_id), ignore_eos=False, vocab_size=11)


def test_padded_lists_have_few_widths():
    ids_BX = stopping.padded([(5,), (), (3, 4, 7)])
    assert ids_BX.shape == (3, 8) and str(ids_BX.dtype) == "int32"
    assert [[token for token in row if token != state.NO_STOP_ID] for row in ids_BX.tolist()] == [[5], [], [3, 4, 7]]
    assert stopping.padded([range(8)]).shape == (1, 8)
    assert stopping.padded([range(9), (1,)]).shape == (2, 16)
    # The filler is no token.
    assert state.NO_STOP_ID < 0
