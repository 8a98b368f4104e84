"""The table of one text: which page each of its columns has, and what a device must do before tokens are written.

A page may be written by a table only where nobody else can read it: one reference, not kept by the prefix tree, listed
once. Otherwise ``append`` takes a new page and asks for a copy (copy on write). The page that is copied from is let go
in the same moment, so **copies must reach the device in the order in which they were planned, each before the writes of
its own plan and before anything that was planned later**.

A page is taken when a token needs it, never ahead: a table of n tokens has as many pages as n tokens fill.
"""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from jdecode import config as config_lib
from jdecode.serving import pages as pages_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Append:
    """What a device has to do for tokens that are about to be written.

    Attributes:
      start: the position of the first of them.
      end: the position after the last: the text's length when they are written.
      copies: pairs (from, to) of pages to copy, all layers of them, before the tokens are written.
      new_pages: pages that the table did not hold before, those copied to included. What they hold is garbage.
    """

    start: int
    end: int
    copies: tuple[tuple[int, int], ...]
    new_pages: tuple[int, ...]


class PageTable:
    """The pages of one text, and the changes to them: a holder of references.

    Room for tokens that are yet to be computed is taken by ``append`` and given back by ``truncate``.

    Args:
      pool: where the pages come from.
      max_pages: columns of the table on the device: the text can have ``max_pages * page_len`` tokens.
      pages: pages that already hold the first ``length`` tokens, as a match of the prefix tree gives them; the table
        takes references of its own.
      length: in tokens; the last page may be full in part.

    Raises:
      ValueError: a count is out of range, the pages are not those of ``length`` tokens, or one of them is free.
    """

    def __init__(self, pool: pages_lib.PagePool, *, max_pages: int, pages: Sequence[int] = (), length: int = 0) -> None:
        config_lib.check_count("max_pages", max_pages, 1)
        pages_lib.check_length(length, max_pages, pool.page_len)
        num_pages = pages_lib.pages_for(length, pool.page_len)
        config_lib.check(
            len(pages) == num_pages, f"pages: expected {num_pages} for a length of {length} tokens, got {len(pages)}"
        )
        pool.share(pages)
        self.pool = pool
        self.max_pages = max_pages
        self._pages = [int(page) for page in pages]
        self._has_repeats = len(set(self._pages)) < len(self._pages)
        self._length = length
        self._is_freed = False

    @property
    def length(self) -> int:
        """Tokens that the table has room for and that are, or are about to be, written."""
        return self._length

    @property
    def pages(self) -> tuple[int, ...]:
        """The page of each column in use."""
        return tuple(self._pages)

    def padded_ids(self) -> np.ndarray:
        """Returns the device's row: int32, ``max_pages`` long, ``pool.unmapped`` where there is no page."""
        ids = np.full(self.max_pages, self.pool.unmapped, np.int32)
        ids[: len(self._pages)] = self._pages
        return ids

    def pages_needed(self, num_tokens: int) -> int:
        """Returns how many free pages ``append(num_tokens)`` will take, the one to copy to included.

        Raises:
          ValueError: ``num_tokens`` is under 1, the text would be too long for its columns, or the table was freed.
        """
        self._check_alive()
        config_lib.check_count("num_tokens", num_tokens, 1)
        pages_lib.check_length(self._length + num_tokens, self.max_pages, self.pool.page_len)
        num_new = pages_lib.pages_for(self._length + num_tokens, self.pool.page_len) - len(self._pages)
        return num_new + self._must_copy()

    def append(self, num_tokens: int) -> Append:
        """Makes room for tokens at the end of the text, so that their slots can be written.

        Args:
          num_tokens: at least 1.

        Raises:
          OutOfPages: fewer than ``pages_needed(num_tokens)`` pages are free.
          ValueError: as ``pages_needed``.
        """
        must_copy = self._must_copy()
        new_pages = self.pool.allocate(self.pages_needed(num_tokens))
        copies: tuple[tuple[int, int], ...] = ()
        if must_copy:
            source, self._pages[-1] = self._pages[-1], new_pages[0]
            copies = ((source, new_pages[0]),)
            self._let_go([source])
        self._pages.extend(new_pages[len(copies) :])
        start, self._length = self._length, self._length + num_tokens
        return Append(start=start, end=self._length, copies=copies, new_pages=new_pages)

    def truncate(self, length: int) -> None:
        """Takes back the latest tokens (rollback), and lets go the pages that no token is left in.

        Raises:
          ValueError: ``length`` is not from 0 to the table's own, or the table was freed.
        """
        self._check_alive()
        config_lib.check_count("length", length, 0)
        config_lib.check(
            length <= self._length, f"length: expected at most the {self._length} tokens of the text, got {length}"
        )
        num_pages = pages_lib.pages_for(length, self.pool.page_len)
        dropped, self._pages = self._pages[num_pages:], self._pages[:num_pages]
        self._length = length
        self._let_go(dropped)

    def fork(self) -> "PageTable":
        """Returns a second table of the same text. Both may go on: whoever writes into a shared page copies it first.

        Raises:
          ValueError: the table was freed.
        """
        self._check_alive()
        return PageTable(self.pool, max_pages=self.max_pages, pages=self._pages, length=self._length)

    def rebind(self, first_column: int, pages: Sequence[int]) -> None:
        """Points columns from ``first_column`` on at other pages with the same tokens of the same text; copies nothing.

        Raises:
          ValueError: a column is not in use, a page is free or no page, or the table was freed.
        """
        self._check_alive()
        end = first_column + len(pages)
        config_lib.check(
            0 <= first_column <= end <= len(self._pages),
            f"columns: expected some of the {len(self._pages)} in use, got {first_column} to {end - 1}",
        )
        old = self._pages
        self.pool.share(set(pages).difference(old))  # claimed before the old ones go
        self._pages = [*old[:first_column], *map(int, pages), *old[end:]]
        self._has_repeats = len(set(self._pages)) < len(self._pages)
        self._let_go(old[first_column:end])

    def free(self) -> None:
        """Lets every page go. The table cannot be used again.

        Raises:
          ValueError: the table was freed before.
        """
        self._check_alive()
        self._is_freed = True
        dropped, self._pages, self._length = self._pages, [], 0
        self._let_go(dropped)

    def _must_copy(self) -> bool:
        """Says whether the next token goes into a page that already holds some and that others can read."""
        if self._length % self.pool.page_len == 0:
            return False
        is_repeated = self._has_repeats and self._pages[-1] in self._pages[:-1]
        return is_repeated or self.pool.is_shared(self._pages[-1])

    def _let_go(self, dropped: Iterable[int]) -> None:
        """Releases pages that were taken out of columns, but for those that still stand in another column."""
        remaining = set(self._pages)
        self.pool.release([page for page in dropped if page not in remaining])

    def _check_alive(self) -> None:
        config_lib.check(not self._is_freed, "table: expected one in use, got one that was freed; make a new one")
