"""The prefix cache: which pages hold the keys and values of a text that begins as another one did.

It is a ``NodeTree`` over the pages of a pool, with locks, eviction and statistics.

**Locks and accounts.** A match holds references to its pages, and so does a table that is made of it; there are no
other lock counts. Whoever holds a page of the tree holds all pages before it too (``insert`` sees to that), so every
page that the pool counts as cached can be evicted, and *evictable + locked or used + free* is the pool:
``num_cached + num_used + num_free == num_pages``.

**Pages in part.** A match may end inside a page. Whoever goes on from there writes into that page, which others can
read, and so ``PageTable.append`` copies it first.

**Windows.** A layer with a window may have lost early keys of a text (a ring was written over, a page was given up)
while the layers without one still have theirs. ``insert`` is told from which position on each window is intact, and
every node carries its part. A text may be reused up to a cut c, where the next query stands, only if *for every* window
W the keys that this query sees, positions ``c - W + 1 .. c - 1``, are intact along the path. Inside a node it is the
beginning that is lost, so if any cut within a node will do, so will the latest. (Sinks are never lost: a layout that
keeps them keeps them as long as the page.)

Time is a counter of calls: the same calls give the same tree. ``match`` and ``insert`` cost what the text is long;
``evict`` looks at every node, so ask it at once for what a whole step needs.
"""

import dataclasses
import heapq
from collections.abc import Mapping, Sequence

from jdecode import config as config_lib
from jdecode.serving import page_table, prefix_nodes, prefix_snapshot
from jdecode.serving import pages as pages_lib
from jdecode.serving.prefix_namespace import Namespace


@dataclasses.dataclass(frozen=True, kw_only=True)
class Match:
    """The beginning of a text that the tree holds, locked until ``PrefixTree.unlock``.

    Attributes:
      idx: which match of its tree it is.
      num_tokens: how many tokens need not be computed: the cut.
      pages: those that hold them; the last may hold more than that.
    """

    idx: int
    num_tokens: int
    pages: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixStatistics:
    """What a tree was asked and what it gave, since it was made. No count ever falls.

    Attributes:
      hits, misses: matches with and without a token.
      tokens_asked: of all prompts.
      tokens_reused: of them, those that were held; at most ``tokens_asked``.
      pages_evicted: taken by ``evict``.
    """

    hits: int = 0
    misses: int = 0
    tokens_asked: int = 0
    tokens_reused: int = 0
    pages_evicted: int = 0


def _hash(parent_idx: int, tokens: tuple[int, ...]) -> int:
    return hash((parent_idx, tokens))


class PrefixTree:
    """Finds, keeps and evicts the pages of texts. See the module.

    Args:
      pool: whose pages it keeps. A pool has one tree.
      windows: of the model's layers, in tokens: those for which ``insert`` may say that keys are lost.
      page_hash: of a node's number and the tokens of a page. Any function is right, since what it finds is compared; a
        good one is fast.
    """

    def __init__(
        self, pool: pages_lib.PagePool, *, windows: Sequence[int] = (), page_hash: prefix_nodes.PageHash = _hash
    ) -> None:
        for window in windows:
            config_lib.check_count("window", window, 1)
        self.pool = pool
        self.statistics = PrefixStatistics()
        self._windows = tuple(sorted(set(windows)))
        self._tree = prefix_nodes.NodeTree(page_len=pool.page_len, page_hash=page_hash)
        self._matches: dict[int, Match] = {}
        self._clock = 0

    @property
    def num_pages(self) -> int:
        """Pages that the tree keeps, evictable or locked. Looks at every node."""
        return sum(len(node.pages) for node in self._tree.nodes())

    @property
    def num_evictable(self) -> int:
        """Pages that ``evict`` can free."""
        return self.pool.num_cached

    @property
    def num_locks(self) -> int:
        """Matches that were not unlocked yet."""
        return len(self._matches)

    def match(self, namespace: Namespace, tokens: Sequence[int], *, keep_last: int = 1, record: bool = True) -> Match:
        """Finds the longest beginning of a text that can be reused, and locks its pages.

        Args:
          tokens: ids of the whole text.
          keep_last: how many of the latest tokens must be computed whatever is held. The logits after the text come
            from its last token, so a text that is about to be continued needs at least 1.
          record: count it in the statistics. False where a request that was counted asks again.

        Returns:
          A match, perhaps of no token. Make a table of it, which takes references of its own, then ``unlock`` it.

        Raises:
          ValueError: a token is no id, or ``keep_last`` no count.
        """
        ids = prefix_nodes.token_ids(tokens)
        config_lib.check_count("keep_last", keep_last, 0)
        self._clock += 1
        cut, path = self._reusable(self._tree.walk(namespace, ids[: max(len(ids) - keep_last, 0)]))
        pages: list[int] = []
        for node, num_tokens in path:
            # What the match does not use becomes a node of its own: it is neither locked nor renewed.
            used = self._tree.split(node, pages_lib.pages_for(num_tokens, self.pool.page_len))
            used.last_use = self._clock
            pages.extend(used.pages)
        self.pool.share(pages)
        found = Match(idx=self._clock, num_tokens=cut, pages=tuple(pages))
        self._matches[found.idx] = found
        if record:
            self._count(hits=int(cut > 0), misses=int(cut == 0), tokens_asked=len(ids), tokens_reused=cut)
        return found

    def unlock(self, match: Match) -> None:
        """Lets the pages of a match go; whoever made a table of it still holds them.

        Raises:
          ValueError: the match was unlocked before, or is another tree's.
        """
        is_locked = self._matches.get(match.idx) is match
        config_lib.check(is_locked, "match: expected one that this tree has locked, got another (unlocked before?)")
        del self._matches[match.idx]
        self.pool.release(match.pages)

    def insert(
        self,
        namespace: Namespace,
        tokens: Sequence[int],
        table: page_table.PageTable,
        *,
        intact_from: Mapping[int, int] | None = None,
    ) -> int:
        """Keeps the pages of a text for others; its table stays in use, or may be freed.

        What the tree holds already is not kept twice: the table is pointed at the tree's pages instead and lets its own
        go (equal tokens of one namespace have equal keys and values), so a table that is used on has to be sent to the
        device again. Pages that another table holds as well (a fork) are not taken, nor those after them. The last page
        is taken though it be not full, in place of a shorter beginning of it (also where that was more intact); a table
        that goes on after that copies it first, so give whole pages while a text still grows.

        Args:
          tokens: ids of the text, as many as have keys and values in the table's pages.
          table: of this text.
          intact_from: for each window, the position from which on its layers' keys are intact in the table's own pages;
            0 where none is given.

        Returns:
          How many tokens of the text the tree holds now.

        Raises:
          ValueError: a token is no id, the table is shorter or of another pool, a window is unknown or its position
            outside the text.
        """
        ids = prefix_nodes.token_ids(tokens)
        config_lib.check(table.pool is self.pool, "table: expected one of the tree's pool, got another pool's")
        config_lib.check(
            len(ids) <= table.length, f"tokens: expected at most the {table.length} of the table, got {len(ids)}"
        )
        intact_from = self._checked_intact(intact_from or {}, len(ids))
        self._clock += 1
        node = self._tree.root(namespace)
        while (child := self._tree.full_child(node, ids)) is not None:
            node = self._tree.split(child, self._tree.common_len(child, ids) // self.pool.page_len)
            self._settle(node, table, intact_from)
            node.last_use = self._clock
        end = self._adopt(node, ids, table, intact_from)
        if end == 0:
            self._tree.drop_empty_roots()
        return end

    def evict(self, num_pages: int) -> int:
        """Frees pages that nobody refers to: ends of texts first, of these the one whose last use is longest ago.

        Args:
          num_pages: how many more pages shall be free.

        Returns:
          How many are: ``num_pages``, or ``num_evictable`` if that is less.

        Raises:
          ValueError: ``num_pages`` is no count.
        """
        config_lib.check_count("num_pages", num_pages, 0)
        leaves = [node for node in self._tree.nodes() if not node.children and self._num_idle(node)]
        heap = [(leaf.last_use, leaf.idx, leaf) for leaf in leaves]
        heapq.heapify(heap)
        num_freed = 0
        while heap and num_freed < num_pages:
            _, _, leaf = heapq.heappop(heap)
            num_taken = min(self._num_idle(leaf), num_pages - num_freed)
            self._tree.split(leaf, len(leaf.pages) - num_taken)  # leaves the end of it in `leaf`
            parent = leaf.parent
            self._remove(leaf)
            num_freed += num_taken
            if parent is not None and not parent.children and self._num_idle(parent):
                heapq.heappush(heap, (parent.last_use, parent.idx, parent))
        self._tree.drop_empty_roots()
        self._count(pages_evicted=num_freed)
        return num_freed

    def saved(self) -> list[prefix_snapshot.SavedNode]:
        """Returns every node, parents first."""
        return prefix_snapshot.take(self._tree)

    def plant(self, saved: Sequence[prefix_snapshot.SavedNode]) -> None:
        """Puts back what ``saved`` gave, into a tree that was never used. Nothing is locked then.

        The pages are those that the saved nodes name. They must be the caller's alone, who lets them go by this.

        Raises:
          ValueError: the tree was used, or no tree has such nodes; it is then of no use.
        """
        config_lib.check(self._clock == 0, "tree: expected a new one to plant, got one that was used")
        prefix_snapshot.plant(self._tree, saved, windows=self._windows)
        self._clock = max((node.last_use for node in saved), default=0)
        for node in saved:
            self.pool.keep(node.pages)
        for node in saved:
            self.pool.release(node.pages)

    def check(self) -> None:
        """Asserts the invariants of the module. For tests: it looks at every node."""
        self.pool.check()
        self._tree.check()
        kept = [page for node in self._tree.nodes() for page in node.pages]
        assert len(kept) == len(set(kept)) == sum(map(self.pool.is_kept, range(self.pool.num_pages)))
        for node in self._tree.nodes():
            assert set(node.intact_from) == set(self._windows)
            before = node.parent.pages[-1:] if node.parent else ()
            is_held = [self.pool.references(page) > 0 for page in (*before, *node.pages)]
            assert is_held == sorted(is_held, reverse=True), "a page is held without those before it"

    def _reusable(self, path: prefix_nodes.Path) -> tuple[int, prefix_nodes.Path]:
        """Returns the latest cut on a path at which every window is intact, and the path up to it."""
        cut, num_nodes = 0, 0
        run_start = dict.fromkeys(self._windows, 0)  # where the intact run begins that reaches the end of the node
        for count, (node, num_tokens) in enumerate(path, start=1):
            end = node.start + num_tokens
            for window in self._windows:
                if node.intact_from[window] > node.start:
                    run_start[window] = node.intact_from[window]
            if all(min(run_start[window], end) <= max(end - window + 1, 0) for window in self._windows):
                cut, num_nodes = end, count
        return cut, path[:num_nodes]

    def _settle(self, node: prefix_nodes.Node, table: page_table.PageTable, intact_from: Mapping[int, int]) -> None:
        """Makes tree and table hold the same pages for the tokens of a node, all of which the text has.

        The tree's stay, unless nobody uses them and the table's are intact where they are not.
        """
        column = node.start // self.pool.page_len
        own = table.pages[column : column + len(node.pages)]
        offered = prefix_nodes.within(intact_from, node.start, node.end)
        is_better = offered != node.intact_from and all(offered[w] <= node.intact_from[w] for w in self._windows)
        if is_better and self._num_idle(node) == len(node.pages) and all(map(self._is_exclusive, own)):
            self.pool.keep(own)
            self.pool.forget(node.pages)
            node.pages, node.intact_from = own, offered
        elif own != node.pages:
            table.rebind(column, node.pages)

    def _adopt(
        self,
        parent: prefix_nodes.Node,
        ids: tuple[int, ...],
        table: page_table.PageTable,
        intact_from: Mapping[int, int],
    ) -> int:
        """Keeps the pages of a text after ``parent``, none of whose children has its next page whole."""
        start, page_len = parent.end, self.pool.page_len
        nearest, common_len = self._tree.nearest_child(parent, ids)
        if nearest is not None and start + common_len == len(ids):  # its first page holds the rest, and perhaps more
            self._tree.split(nearest, 1).last_use = self._clock
            return len(ids)
        pages: list[int] = []
        for page in table.pages[start // page_len : pages_lib.pages_for(len(ids), page_len)]:
            if not self._is_exclusive(page):  # another holder may not hold what is before it in the tree
                break
            pages.append(page)
        end = min(start + len(pages) * page_len, len(ids))
        last_full = end - end % page_len
        for first, last in ((start, last_full), (last_full, end)):
            if first < last:
                own = tuple(pages[(first - start) // page_len : pages_lib.pages_for(last - start, page_len)])
                self.pool.keep(own)
                parent = self._tree.add(parent, ids[first:last], own, intact_from=intact_from, last_use=self._clock)
        if pages and nearest is not None and common_len == len(nearest.tokens):
            self._remove(nearest)  # its page, not full, is a beginning of the new one
        return end

    def _remove(self, leaf: prefix_nodes.Node) -> None:
        self._tree.remove(leaf)
        self.pool.forget(leaf.pages)

    def _num_idle(self, node: prefix_nodes.Node) -> int:
        """Returns how many pages at the end of a node nobody refers to."""
        for count, page in enumerate(reversed(node.pages)):
            if self.pool.references(page):
                return count
        return len(node.pages)

    def _is_exclusive(self, page: int) -> bool:
        """Says whether a page in use has one holder, and the tree does not keep it."""
        return not self.pool.is_shared(page)

    def _checked_intact(self, intact_from: Mapping[int, int], length: int) -> dict[int, int]:
        known = ", ".join(map(str, self._windows)) or "none"
        for window, position in intact_from.items():
            config_lib.check(window in self._windows, f"intact_from: expected windows of {known}, got {window!r}")
            config_lib.check_count(f"intact_from of window {window}", position, 0)
            config_lib.check(
                position <= length, f"intact_from of window {window}: expected at most {length} tokens, got {position}"
            )
        return {window: intact_from.get(window, 0) for window in self._windows}

    def _count(self, **counts: int) -> None:
        old = self.statistics
        new = {name: getattr(old, name) + count for name, count in counts.items()}
        self.statistics = dataclasses.replace(old, **new)
