"""The pool of pages on the host: which are free, and who holds which.

The memory of a paged cache is a pool of P pages of Z tokens each. A text has a table (``page_table``): its column c
names the page of positions ``c * Z .. c * Z + Z - 1``. The pages' bytes lie on a device; here are only numbers, in
plain Python that knows no jax. One thread owns a pool.

Every page is in one of three states, which follow from two facts about it::

    references   kept by the prefix tree   state
    1 or more    yes or no                 used
    0            yes                       cached: holds keys and values worth keeping, and can be evicted
    0            no                        free

``num_free + num_used + num_cached == num_pages`` after every method. A method that raises has changed nothing.

A reference belongs to a holder: a table, or a match of the prefix tree. A holder counts once for a page, however often
it lists it, and so it does where it lets go. Who holds no reference may neither read nor write a page.

A column without a page holds ``PagePool.unmapped``: the first id past the pool. A gather or scatter of mode ``fill`` or
``drop`` leaves it out; -1 would be the last page.
"""

import numbers
from collections.abc import Iterable, Sequence

import numpy as np

from jdecode import config as config_lib

_MOST_SLOTS = 2**31 - 1  # slots are numbered in int32 on the device


class OutOfPages(RuntimeError):
    """Fewer pages are free than were asked for. Evict cached pages, or free a table, and ask again."""


class PagePool:
    """Counts the references to P pages of Z tokens. See the module.

    Args:
      num_pages: P.
      page_len: Z, in tokens.

    Raises:
      ValueError: a count is under 1, or the slots, those of the unmapped id included, cannot be numbered in int32.
    """

    def __init__(self, *, num_pages: int, page_len: int) -> None:
        config_lib.check_count("num_pages", num_pages, 1)
        config_lib.check_count("page_len", page_len, 1)
        config_lib.check(
            (num_pages + 1) * page_len <= _MOST_SLOTS,
            f"num_pages: expected (num_pages + 1) * page_len of at most {_MOST_SLOTS} (slots are int32), "
            f"got {num_pages} pages of {page_len}; use fewer",
        )
        self.num_pages = num_pages
        self.page_len = page_len
        self._references = [0] * num_pages
        self._kept = [False] * num_pages
        self._free = list(reversed(range(num_pages)))  # a stack: the page that was freed last is taken first
        self._num_used = 0
        self._num_cached = 0

    @property
    def unmapped(self) -> int:
        """The id of no page, for columns that have none: P, the first past the pool."""
        return self.num_pages

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages with a reference, each counted once."""
        return self._num_used

    @property
    def num_cached(self) -> int:
        """Pages without a reference that the prefix tree keeps."""
        return self._num_cached

    def references(self, page: int) -> int:
        """Returns how many holders a page has. Raises ``ValueError`` for an id outside the pool."""
        return self._references[self._checked(page)]

    def is_kept(self, page: int) -> bool:
        """Says whether the prefix tree keeps a page. Raises ``ValueError`` for an id outside the pool."""
        return self._kept[self._checked(page)]

    def is_shared(self, page: int) -> bool:
        """Says whether somebody beside one holder can read a page, so that it must be copied before it is written."""
        return self.references(page) > 1 or self._kept[page]

    def allocate(self, num_pages: int) -> tuple[int, ...]:
        """Takes free pages, with one reference each; all or none.

        Raises:
          OutOfPages: fewer are free.
          ValueError: ``num_pages`` is no count.
        """
        config_lib.check_count("num_pages", num_pages, 0)
        if num_pages > len(self._free):
            raise OutOfPages(
                f"pages: expected {num_pages} free ones, got {self.num_free} (and {self.num_used} used, "
                f"{self.num_cached} cached, of {self.num_pages}); evict cached pages or free a table first"
            )
        pages = tuple(self._free.pop() for _ in range(num_pages))
        for page in pages:
            self._references[page] = 1
        self._num_used += num_pages
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Adds a holder: one reference to each distinct page.

        Raises:
          ValueError: an id is outside the pool, or a page is free (it may already be somebody else's).
        """
        distinct = self._distinct(pages)
        for page in distinct:
            is_held = self._references[page] > 0 or self._kept[page]
            config_lib.check(is_held, f"page {page}: expected a used or cached page to share, got a free one")
        for page in distinct:
            if self._references[page] == 0:
                self._num_cached -= 1
                self._num_used += 1
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        """Takes a holder away: one reference from each distinct page. A page without any is cached if kept, else free.

        Raises:
          ValueError: an id is outside the pool, or a page has no reference (a double free).
        """
        distinct = self._distinct(pages)
        for page in distinct:
            has_reference = self._references[page] > 0
            config_lib.check(has_reference, f"page {page}: expected a page in use, got one without references (freed?)")
        for page in distinct:
            self._references[page] -= 1
            if self._references[page] == 0:
                self._num_used -= 1
                self._put_down(page)

    def keep(self, pages: Iterable[int]) -> None:
        """Marks pages as kept by the prefix tree. They stay used; ``release`` will leave them cached.

        Raises:
          ValueError: an id is outside the pool, a page has no reference (nothing vouches for what it holds), or is kept
            already.
        """
        distinct = self._distinct(pages)
        for page in distinct:
            has_reference = self._references[page] > 0
            config_lib.check(has_reference, f"page {page}: expected a page in use to keep, got one without references")
            config_lib.check(not self._kept[page], f"page {page}: expected a page that is not kept, got one that is")
        for page in distinct:
            self._kept[page] = True

    def forget(self, pages: Iterable[int]) -> None:
        """Takes back ``keep``: pages without references become free, the others are their holders' alone.

        Raises:
          ValueError: an id is outside the pool, or a page is not kept.
        """
        distinct = self._distinct(pages)
        for page in distinct:
            config_lib.check(self._kept[page], f"page {page}: expected a page that is kept, got one that is not")
        for page in distinct:
            self._kept[page] = False
            if self._references[page] == 0:
                self._num_cached -= 1
                self._put_down(page)

    def check_table(self, ids: Sequence[int] | np.ndarray, length: int) -> None:
        """Checks a row of a device's table before anything is launched with it.

        Args:
          ids: one page id a column.
          length: tokens that the row's text holds, or will hold after the launch.

        Raises:
          ValueError: ``length`` is over the columns' slots; a column that it needs holds no page of the pool, or a free
            one; a later column is not ``unmapped``.
        """
        check_length(length, len(ids), self.page_len)
        num_mapped = pages_for(length, self.page_len)
        for column, page in enumerate(ids):
            if column < num_mapped:
                is_held = self.references(page) > 0
                config_lib.check(is_held, f"column {column}: expected a page in use, got page {page} without reference")
            else:
                config_lib.check(
                    page == self.unmapped,
                    f"column {column}: expected {self.unmapped} (unmapped) past {length} tokens, got {page}",
                )

    def check(self) -> None:
        """Asserts what the class guarantees, from the pages themselves. For tests: it looks at every page."""
        num_used = sum(count > 0 for count in self._references)
        num_cached = sum(kept and not count for kept, count in zip(self._kept, self._references, strict=True))
        assert (self.num_used, self.num_cached) == (num_used, num_cached)
        assert self.num_free + self.num_used + self.num_cached == self.num_pages
        assert len(set(self._free)) == len(self._free), "a page is free twice"
        assert not any(self._references[page] or self._kept[page] for page in self._free)
        assert min(self._references) >= 0

    def _put_down(self, page: int) -> None:
        """Files a page that has just lost its last reference, or the tree's interest."""
        if self._kept[page]:
            self._num_cached += 1
        else:
            self._free.append(page)

    def _checked(self, page: int) -> int:
        is_id = isinstance(page, numbers.Integral) and not isinstance(page, bool) and 0 <= page < self.num_pages
        config_lib.check(is_id, f"page: expected an id from 0 to {self.num_pages - 1}, got {page!r}")
        return int(page)

    def _distinct(self, pages: Iterable[int]) -> list[int]:
        return list(dict.fromkeys([self._checked(page) for page in pages]))


def pages_for(length: int, page_len: int) -> int:
    """Returns how many pages hold ``length`` tokens: the last may be full in part, and none is ever taken ahead."""
    return -(-length // page_len)


def check_length(length: int, num_columns: int, page_len: int) -> None:
    """Raises ``ValueError`` unless ``length`` is a count of tokens for which a table of so many columns has slots."""
    config_lib.check_count("length", length, 0)
    config_lib.check(
        length <= num_columns * page_len,
        f"length: expected at most {num_columns * page_len} tokens ({num_columns} pages of {page_len}), got {length}; "
        "make the table wider or the text shorter",
    )
