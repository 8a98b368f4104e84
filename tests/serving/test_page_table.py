"""Tables against lists: every count after every step, and every text read back from a simulated memory.

Numbers such as 4.1 name the fault, seen in other engines, that a test would catch:

4.1 a page that a table lists twice is counted twice; 4.2 a page is free twice; 4.5 a length past the table; 4.6 a page
is taken before a token needs it; 4.8 the id of an unmapped page wraps to the last page; 4.12 a page changes its state
before it was claimed.
"""

import collections

import hypothesis
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st

from jdecode.serving import page_table, pages
from tests.serving import page_memory

NUM_PAGES, PAGE_LEN, MAX_PAGES = 11, 3, 5


@pytest.fixture
def pool() -> pages.PagePool:
    return pages.PagePool(num_pages=NUM_PAGES, page_len=PAGE_LEN)


def _counts(pool: pages.PagePool) -> tuple[int, int, int]:
    pool.check()
    return pool.num_free, pool.num_used, pool.num_cached


def _table(pool: pages.PagePool, length: int = 0, max_pages: int = MAX_PAGES) -> page_table.PageTable:
    table = page_table.PageTable(pool, max_pages=max_pages)
    if length:
        table.append(length)
    return table


@pytest.mark.parametrize("length", range(1, 3 * PAGE_LEN + 2))
def test_table_holds_the_pages_of_its_tokens_and_no_more(pool: pages.PagePool, length: int):
    num_pages = len(range(0, length, PAGE_LEN))
    table = _table(pool, length)
    ids = table.padded_ids()
    assert ids.dtype == np.int32 and ids.shape == (MAX_PAGES,)
    assert ids[:num_pages].tolist() == list(table.pages) and len(set(table.pages)) == num_pages
    assert (ids[num_pages:] == NUM_PAGES).all() and pool.unmapped == NUM_PAGES
    assert _counts(pool) == (NUM_PAGES - num_pages, num_pages, 0)
    pool.check_table(ids, length)


def test_text_longer_than_its_columns_is_refused_first(pool: pages.PagePool):
    table = _table(pool, max_pages=2)
    with pytest.raises(ValueError, match=r"length: expected at most 6 tokens \(2 pages of 3\), got 7"):
        table.append(7)
    table.append(6)
    for method in (table.append, table.pages_needed):
        with pytest.raises(ValueError, match="got 7; make the table wider or the text shorter"):
            method(1)
    assert (table.length, *_counts(pool)) == (6, 9, 2, 0)
    with pytest.raises(ValueError, match="expected at most 6 tokens"):
        page_table.PageTable(pool, max_pages=2, pages=(0, 1, 0), length=7)


def test_append_is_all_or_nothing(pool: pages.PagePool):
    table = _table(pool, 4)
    pool.allocate(8)
    before = table.pages
    assert table.pages_needed(2) == 0 and table.pages_needed(3) == 1 and table.pages_needed(6) == 2
    with pytest.raises(pages.OutOfPages):
        table.append(6)
    assert (table.length, table.pages, *_counts(pool)) == (4, before, 1, 10, 0)
    fork = table.fork()
    assert fork.pages_needed(3) == 2  # one to copy to
    with pytest.raises(pages.OutOfPages):
        fork.append(3)
    assert (fork.length, fork.pages, *_counts(pool)) == (4, before, 1, 10, 0)
    assert fork.append(1).copies == ((before[1], fork.pages[1]),)


def test_shared_page_is_copied_before_it_is_written(pool: pages.PagePool):
    table = _table(pool, 4)
    first, second = table.pages
    fork = table.fork()
    assert [pool.references(page) for page in (first, second)] == [2, 2]
    plan = fork.append(3)
    assert plan == page_table.Append(start=4, end=7, copies=((second, fork.pages[1]),), new_pages=fork.pages[1:])
    assert fork.pages[0] == first and table.pages == (first, second)
    assert [pool.references(page) for page in (first, second, *fork.pages[1:])] == [2, 1, 1, 1]
    assert table.append(1).copies == ()  # alone again


def test_full_page_is_never_copied(pool: pages.PagePool):
    table = _table(pool, 2 * PAGE_LEN)
    fork = table.fork()
    assert fork.append(1).copies == () and fork.pages[:2] == table.pages


def test_page_that_the_prefix_tree_keeps_is_copied(pool: pages.PagePool):
    table = _table(pool, 2)
    (page,) = table.pages
    pool.keep([page])
    assert table.append(1).copies == ((page, *table.pages),)
    assert _counts(pool) == (9, 1, 1) and pool.references(page) == 0


def test_rollback_lets_go_of_pages_without_tokens(pool: pages.PagePool):
    table = _table(pool, 8)
    first, second, _ = table.pages
    table.truncate(6)
    assert (table.pages, *_counts(pool)) == ((first, second), 9, 2, 0)
    table.truncate(6)
    fork = table.fork()
    table.truncate(5)
    assert table.append(1).copies == ((second, table.pages[1]),)  # the fork still reads what was cut
    for length in (7, -1, True):
        with pytest.raises(ValueError, match="length: expected"):
            fork.truncate(length)
    fork.truncate(0)
    assert (fork.length, fork.pages, *_counts(pool)) == (0, (), 9, 2, 0)


def test_fork_of_a_table_with_a_repeated_page(pool: pages.PagePool):
    (page, other) = pool.allocate(2)
    table = page_table.PageTable(pool, max_pages=4, pages=(page, other, page), length=8)
    pool.release([page, other])
    fork = table.fork()
    assert (pool.references(page), pool.references(other)) == (2, 2)
    fork.truncate(6)  # the page still stands in column 0
    assert pool.references(page) == 2
    plan = table.append(1)  # the page's other column must not change
    assert plan.copies == ((page, table.pages[2]),) and table.pages[0] == page and pool.references(page) == 2
    table.free()
    assert (pool.references(page), pool.references(other)) == (1, 1)
    fork.free()
    assert _counts(pool) == (NUM_PAGES, 0, 0)


def test_freed_table_is_refused(pool: pages.PagePool):
    table = _table(pool, 4)
    fork = table.fork()
    table.free()
    uses = (table.free, table.fork, lambda: table.append(1), lambda: table.truncate(0), lambda: table.rebind(0, [0]))
    for use in uses:
        with pytest.raises(ValueError, match="table: expected one in use, got one that was freed"):
            use()
    assert _counts(pool) == (9, 2, 0)
    fork.free()
    assert _counts(pool) == (NUM_PAGES, 0, 0)


def test_rebound_column_is_claimed_before_the_old_page_goes(pool: pages.PagePool):
    table, other = _table(pool, 4), _table(pool, 3)
    own, (page,) = table.pages[0], other.pages
    table.rebind(0, [page])
    assert (pool.references(page), pool.references(own)) == (2, 0) and table.pages[0] == page
    table.rebind(0, table.pages)
    table.rebind(2, [])
    assert pool.references(page) == 2
    for column, targets, message in (
        (2, [page], "columns: expected some of the 2 in use, got 2 to 2"),
        (1, [page, page], "got 1 to 2"),
        (-1, [page], "got -1 to -1"),
        (1, [own], "free one"),
        (1, [11], "from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            table.rebind(column, targets)
    assert _counts(pool) == (9, 2, 0)
    other.free()
    table.rebind(1, [page])  # listed twice now: nothing is written in place
    assert pool.references(page) == 1 and table.append(1).copies == ((page, table.pages[1]),)


@pytest.mark.parametrize(
    ("ids", "length", "message"),
    [
        ((0,), 4, "pages: expected 2 for a length of 4 tokens, got 1"),
        ((0, 1), 3, "pages: expected 1 for a length of 3 tokens, got 2"),
        ((), 1, "pages: expected 1 for a length of 1 tokens, got 0"),
        ((0, 5), 4, "page 5: expected a used or cached page to share, got a free one"),
        ((0, 11), 4, "page: expected an id from 0 to 10, got 11"),
    ],
)
def test_table_of_given_pages_has_just_those_and_none_that_is_free(pool: pages.PagePool, ids, length, message):
    pool.allocate(3)
    with pytest.raises(ValueError, match=f"^{message}$"):
        page_table.PageTable(pool, max_pages=4, pages=ids, length=length)
    assert _counts(pool) == (8, 3, 0) and pool.references(0) == 1


@hypothesis.settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which a busy machine would fail
)
class PageMachine(stateful.RuleBasedStateMachine):
    """Random work on a small pool beside plain lists: the texts, and the pages that somebody keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = pages.PagePool(num_pages=NUM_PAGES, page_len=PAGE_LEN)
        self.memory = page_memory.PageMemory(self.pool)
        self.texts: list[tuple[page_table.PageTable, list[int]]] = []
        self.kept: dict[int, list[int]] = {}  # what a kept page held when it was kept
        self.num_written = 0

    def _pick(self, data: st.DataObject) -> tuple[page_table.PageTable, list[int]]:
        return self.texts[data.draw(st.integers(0, len(self.texts) - 1))]

    def _held(self) -> collections.Counter[int]:
        return collections.Counter(page for table, _ in self.texts for page in set(table.pages))

    @stateful.precondition(lambda self: len(self.texts) < 5)
    @stateful.rule()
    def make(self) -> None:
        self.texts.append((page_table.PageTable(self.pool, max_pages=MAX_PAGES), []))

    @stateful.precondition(lambda self: self.texts)
    @stateful.rule(data=st.data(), num_tokens=st.integers(1, 7))
    def append(self, data: st.DataObject, num_tokens: int) -> None:
        table, text = self._pick(data)
        new_text = text + list(range(self.num_written, self.num_written + num_tokens))
        self.num_written += num_tokens
        before = (table.pages, self.pool.num_free)
        if len(new_text) > MAX_PAGES * PAGE_LEN:
            with pytest.raises(ValueError, match="expected at most 15 tokens"):
                table.append(num_tokens)
            assert before == (table.pages, self.pool.num_free)
            return
        is_torn = len(text) % PAGE_LEN > 0 and (self._held()[table.pages[-1]] > 1 or table.pages[-1] in self.kept)
        num_needed = -(-len(new_text) // PAGE_LEN) - -(-len(text) // PAGE_LEN) + is_torn
        assert table.pages_needed(num_tokens) == num_needed
        if num_needed > self.pool.num_free:
            with pytest.raises(pages.OutOfPages):
                table.append(num_tokens)
            assert before == (table.pages, self.pool.num_free) and table.length == len(text)
            return
        plan = table.append(num_tokens)
        assert (plan.start, plan.end) == (len(text), len(new_text)) and len(plan.copies) == is_torn
        assert before[1] - self.pool.num_free == len(plan.new_pages) == num_needed
        self.memory.write(table, plan, new_text[len(text) :])
        text[:] = new_text

    @stateful.precondition(lambda self: self.texts)
    @stateful.rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        table, text = self._pick(data)
        del text[data.draw(st.integers(0, len(text))) :]
        table.truncate(len(text))

    @stateful.precondition(lambda self: 0 < len(self.texts) < 5)
    @stateful.rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        table, text = self._pick(data)
        self.texts.append((table.fork(), list(text)))

    @stateful.precondition(lambda self: self.texts)
    @stateful.rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        table, text = self._pick(data)
        self.texts = [pair for pair in self.texts if pair[0] is not table]
        table.free()
        del text[:]

    @stateful.precondition(lambda self: any(text for _, text in self.texts))
    @stateful.rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        table, text = data.draw(st.sampled_from([pair for pair in self.texts if pair[1]]))
        column = data.draw(st.integers(0, len(table.pages) - 1))
        if (page := table.pages[column]) not in self.kept:
            self.pool.keep([page])
            self.kept[page] = text[column * PAGE_LEN : (column + 1) * PAGE_LEN]

    @stateful.precondition(lambda self: self.kept)
    @stateful.rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.kept)))
        self.pool.forget([page])
        del self.kept[page]

    @stateful.invariant()
    def counts_are_those_of_the_lists(self) -> None:
        self.pool.check()
        held = self._held()
        assert [self.pool.references(page) for page in range(NUM_PAGES)] == [held[page] for page in range(NUM_PAGES)]
        assert self.pool.num_used == len(held)
        assert self.pool.num_cached == len(set(self.kept) - set(held))
        assert self.pool.num_free == NUM_PAGES - len(set(self.kept) | set(held))

    @stateful.invariant()
    def memory_holds_every_text(self) -> None:
        self.memory.poison_free_pages()
        for table, text in self.texts:
            assert table.length == len(text) and len(table.pages) == -(-len(text) // PAGE_LEN)
            self.pool.check_table(table.padded_ids(), table.length)
            assert self.memory.read(table.pages, table.length) == text
        for page, contents in self.kept.items():
            assert self.memory.slots[page][: len(contents)] == contents

    def teardown(self) -> None:
        for table, _ in self.texts:
            table.free()
        self.pool.forget(self.kept)
        assert _counts(self.pool) == (NUM_PAGES, 0, 0)


TestPageMachine = PageMachine.TestCase
