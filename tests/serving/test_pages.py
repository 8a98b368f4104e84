"""The pool's counts, against counts worked out by hand; random work on it is in test_page_table.py.

Numbers such as 4.1 name the fault, seen in other engines, that a test would catch:

4.1 a page that is listed twice is counted twice; 4.2 a page is free twice; 4.5 a length or an id past the table; 4.8
the id of an unmapped page wraps to the last page; 4.12 a page changes its state before it was claimed.
"""

import numpy as np
import pytest

from jdecode.serving import page_table, pages

NUM_PAGES, PAGE_LEN = 11, 3


@pytest.fixture
def pool() -> pages.PagePool:
    return pages.PagePool(num_pages=NUM_PAGES, page_len=PAGE_LEN)


def _counts(pool: pages.PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def test_allocates_all_or_nothing(pool: pages.PagePool):
    assert len(set(pool.allocate(8))) == 8
    with pytest.raises(pages.OutOfPages, match=r"expected 4 free ones, got 3 \(and 8 used, 0 cached, of 11\); evict"):
        pool.allocate(4)
    assert _counts(pool) == (3, 8, 0)
    assert len(pool.allocate(3)) == 3 and pool.allocate(0) == ()
    assert _counts(pool) == (0, 11, 0)


def test_page_listed_twice_is_counted_once(pool: pages.PagePool):
    (page, other) = pool.allocate(2)
    pool.share([page, page, other])
    assert (pool.references(page), pool.references(other)) == (2, 2)
    pool.release([page, page])
    assert pool.references(page) == 1
    pool.release([page, page, page])
    assert _counts(pool) == (10, 1, 0)
    assert sorted(pool.allocate(10)) == sorted(set(range(NUM_PAGES)) - {other})


def test_double_free_raises_and_changes_nothing(pool: pages.PagePool):
    first, second = pool.allocate(2)
    pool.release([first])
    for batch in ([first], [second, first]):
        with pytest.raises(ValueError, match=f"page {first}: expected a page in use, got one without references"):
            pool.release(batch)
        assert _counts(pool) == (10, 1, 0)
    pool.keep([second])
    pool.release([second])
    with pytest.raises(ValueError, match="without references"):
        pool.release([second])
    assert _counts(pool) == (10, 0, 1)


def test_page_is_claimed_before_it_changes_its_state(pool: pages.PagePool):
    used, cached, free = pool.allocate(3)
    pool.release([free])
    pool.keep([cached])
    assert _counts(pool) == (9, 2, 0)  # kept, and still in use
    pool.release([cached])
    assert _counts(pool) == (9, 1, 1)
    for page, message in ((free, "got one without references"), (cached, "got one without references")):
        with pytest.raises(ValueError, match=message):
            pool.keep([used, page])
    with pytest.raises(ValueError, match="to share, got a free one"):
        pool.share([used, cached, free])
    with pytest.raises(ValueError, match=f"page {used}: expected a page that is kept"):
        pool.forget([cached, used])
    assert _counts(pool) == (9, 1, 1) and not pool.is_kept(used)
    pool.share([cached])
    assert _counts(pool) == (9, 2, 0)
    with pytest.raises(ValueError, match="not kept, got one that is"):
        pool.keep([used, cached])
    pool.forget([cached])  # in use: its holder's alone now
    assert _counts(pool) == (9, 2, 0) and not pool.is_shared(cached)
    pool.keep([cached])
    pool.release([cached])
    pool.forget([cached])
    assert _counts(pool) == (10, 1, 0)


@pytest.mark.parametrize("page", [-1, NUM_PAGES, 2**31, True, 1.0, None])
@pytest.mark.parametrize("method", ["references", "is_kept", "is_shared", "share", "release", "keep", "forget"])
def test_ids_outside_the_pool_are_refused(pool: pages.PagePool, method: str, page):
    pool.allocate(NUM_PAGES)
    with pytest.raises(ValueError, match=f"page: expected an id from 0 to 10, got {page}"):
        getattr(pool, method)(page if method.startswith(("references", "is_")) else [3, page])
    assert _counts(pool) == (0, NUM_PAGES, 0) and pool.references(3) == 1


def test_ids_of_numpy_are_ids(pool: pages.PagePool):
    pool.allocate(4)
    pool.share(np.arange(2, dtype=np.int32))
    assert [pool.references(page) for page in range(3)] == [2, 2, 1]


@pytest.mark.parametrize("sizes", [(0, 3), (3, 0), (-1, 3), (True, 3), (2.0, 3)])
def test_sizes_of_a_pool_are_counts(sizes):
    name, got = ("page_len", sizes[1]) if sizes[0] == 3 else ("num_pages", sizes[0])
    with pytest.raises(ValueError, match=f"^{name}: expected a count of at least 1, got {got}$"):
        pages.PagePool(num_pages=sizes[0], page_len=sizes[1])


def test_slot_of_the_unmapped_id_fits_int32():
    with pytest.raises(ValueError, match="slots are int32"):
        pages.PagePool(num_pages=2**12 - 1, page_len=2**19)  # 2**12 * 2**19 == 2**31: the last slot's end wraps
    pool = pages.PagePool(num_pages=2**12 - 2, page_len=2**19)
    assert np.int32(pool.unmapped) * np.int32(pool.page_len) + np.int32(pool.page_len - 1) > 0


def test_rows_are_checked_before_a_launch(pool: pages.PagePool):
    table = page_table.PageTable(pool, max_pages=3)
    table.append(4)
    ids = table.padded_ids()
    pool.check_table(ids, 6)  # as far as its pages reach
    for length, message in (
        (10, r"at most 9 tokens"),
        (7, f"from 0 to 10, got .*{NUM_PAGES}"),
        (3, "column 1: expected 11"),
    ):
        with pytest.raises(ValueError, match=message):
            pool.check_table(ids, length)
    for page, message in ((-1, "got .*-1"), (NUM_PAGES, "from 0 to 10"), (9, "column 1: expected a page in use")):
        with pytest.raises(ValueError, match=message):
            pool.check_table([ids[0], page, ids[2]], 4)
    with pytest.raises(ValueError, match="column 2: expected 11"):
        pool.check_table([ids[0], ids[1], -1], 4)
