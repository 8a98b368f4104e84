"""Backends by name."""

import pytest

from jdecode.attention import blockwise, reference, select


def test_names():
    assert select.backend("reference") is reference.attend
    assert select.backend("blockwise") is blockwise.attend
    assert select.backend("auto") in select.BACKENDS.values()


# A window argument was ignored where another path ran (jax-ml/jax#32300): a backend that does not exist is no default.
def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected auto or one of blockwise, reference, got 'flash'"):
        select.backend("flash")
