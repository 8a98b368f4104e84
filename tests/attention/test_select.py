"""Backends by name."""

import pytest

from jdecode.attention import banded, blockwise, reference, select


def test_names():
    assert select.backend("reference") is reference.attend
    assert select.backend("blockwise") is blockwise.attend
    assert select.backend("banded") is banded.attend


def test_auto_reads_a_cache():
    assert select.backend("auto") in (blockwise.attend, reference.attend)


# A window argument was ignored where another path ran (jax-ml/jax#32300): a backend that does not exist is no default.
def test_unknown_name_is_refused():
    with pytest.raises(ValueError, match="expected auto or one of banded, blockwise, reference, got 'flash'"):
        select.backend("flash")
