"""Forks of tables beside lists of what each row must be able to read and write."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from jdecode.cache import page_forks

B, C, Z, P = 3, 3, 2, 11


def plan(pages, lengths, rows, num_new):
    fork = page_forks.fork(
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(rows, jnp.int32),
        page_len=Z,
        num_old=P,
        num_new=num_new,
    )
    return [np.asarray(array).tolist() for array in (fork.pages_RC, fork.shared_R, fork.source_P)]


# Two forks of row 1, whose third page is half full, and row 0 between them.
def test_by_hand():
    got, shared, source = plan([[4, 2, 9], [7, 0, 5], [1, 3, 6]], [2, 5, 0], [1, 0, 1], 8)
    assert got == [[0, 1, 2], [3, 4, 5], [0, 1, 6]]
    assert shared == [4, 0, 4]
    assert source == [7, 0, 5, 4, P, P, 5, P]  # pages 4 and 5 of row 0 begin as nothing; page 7 is nobody's
    pages_BC, length_B = np.asarray([[4, 2, 9], [7, 0, 5], [1, 3, 6]]), np.asarray([2, 5, 0])
    assert page_forks.least_pages(pages_BC, length_B, np.asarray([1, 0, 1]), Z) == 7


# Forks of forks: what rows hold follows them, nothing that one row may write is another's, and no page is held twice.
@hypothesis.settings(max_examples=40, deadline=None, derandomize=True, database=None)
@hypothesis.given(data=st.data())
def test_rows_keep_what_they_hold_and_write_alone(data):
    pages, lengths = np.arange(B * C).reshape(B, C) + 1, [data.draw(st.integers(0, C * Z)) for _ in range(B)]
    held = {int(page): f"old {page}" for page in pages.ravel()}
    num_old = P
    for _ in range(2):
        rows = data.draw(st.lists(st.integers(0, len(lengths) - 1), min_size=B, max_size=B))
        least = page_forks.least_pages(np.asarray(pages), np.asarray(lengths), np.asarray(rows), Z)
        fork = page_forks.fork(
            jnp.asarray(pages, jnp.int32),
            jnp.asarray(lengths, jnp.int32),
            jnp.asarray(rows, jnp.int32),
            page_len=Z,
            num_old=num_old,
            num_new=B * C,
        )
        new, shared, source = (np.asarray(array) for array in (fork.pages_RC, fork.shared_R, fork.source_P))
        assert new.max() < least  # so a pool of the least size is enough
        assert len(np.unique(new)) == least
        contents = {page: held.get(int(source[page]), "nothing") for page in range(B * C)}
        for row, own in enumerate(rows):
            for column in range(-(-lengths[own] // Z)):
                assert contents[int(new[row, column])] == held[int(pages[own][column])]
            open_pages = new[row, shared[row] // Z :]
            others = np.delete(new, row, axis=0)
            assert not set(open_pages.tolist()) & set(others.ravel().tolist())
            assert shared[row] <= lengths[own] // Z * Z
        pages, lengths, held, num_old = new, [lengths[own] for own in rows], contents, B * C


def test_columns_without_a_page_lie_past_a_pool_that_is_too_small():
    got, _, source = plan([[4, 2, 9], [7, 0, 5], [1, 3, 6]], [2, 5, 0], [1, 1], 3)
    assert got == [[0, 1, 2], [0, 1, 3]] and source == [7, 0, 5]


def test_padded_pages():
    assert [page_forks.padded_pages(count) for count in (1, 15, 17, 33, 100, 128, 129)] == [
        1,
        15,
        18,
        36,
        104,
        128,
        144,
    ]


def test_rollback_into_shared_pages_is_refused():
    page_forks.check_rollback(jnp.asarray([0, 4]), jnp.asarray([0, 4]))
    with pytest.raises(ValueError, match="row 1: expected a length of at least the 4 tokens"):
        page_forks.check_rollback(jnp.asarray([0, 4]), jnp.asarray([0, 3]))
