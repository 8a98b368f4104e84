"""The radix tree of the prefix cache: texts that begin alike share nodes. It knows no pool, no clock and no policy.

::

    root --- [a b | c d] --- [e f]          pages of Z = 2 tokens: the texts `a b c d e f`
                        \\-- [e g | h]       and `a b c d e g h`, whose last page holds one token

* A node starts where a page starts. It holds one or more full pages, or one page that is not full; the latter is a
  leaf. So each page belongs to one node, and a split moves pages but copies none.
* The first pages of siblings differ, and none is a prefix of another.

A child is found by its parent **and** its tokens. A hash of both says where to look, and nothing else: what is found
there is compared. Where no child has the next page whole, the one with the longest common beginning is taken in part.
"""

import bisect
import dataclasses
import itertools
import numbers
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from jdecode import config as config_lib
from jdecode.serving import pages as pages_lib

PageHash = Callable[[int, tuple[int, ...]], int]
Path = list[tuple["Node", int]]
"""Nodes along a text, and how many of its tokens each has: all of them, but perhaps of the last."""


@dataclasses.dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """Some tokens of a text, those before being its parent's, and so on to the root.

    Attributes:
      idx: which node it is; never given again.
      parent: ``None`` for a root, which holds nothing.
      start: the position of the first token.
      tokens, pages: what it holds.
      intact_from: for each window, from which position on (``start .. end``) the keys of its layers are intact.
      last_use: a time; at most that of the parent.
      children: in the order of their first pages' tokens.
    """

    idx: int
    parent: "Node | None" = None
    start: int = 0
    tokens: tuple[int, ...] = ()
    pages: tuple[int, ...] = ()
    intact_from: Mapping[int, int] = dataclasses.field(default_factory=dict)
    last_use: int = 0
    children: list["Node"] = dataclasses.field(default_factory=list)

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.tokens)


class NodeTree:
    """The nodes, one root for each namespace.

    Args:
      page_len: Z, in tokens.
      page_hash: of a node's number and the tokens of a page.
    """

    def __init__(self, *, page_len: int, page_hash: PageHash) -> None:
        self.page_len = page_len
        self._page_hash = page_hash
        self._roots: dict[Hashable, Node] = {}
        self._index: dict[int, list[Node]] = {}  # nodes with a full page, by the hash of their parent and that page
        self._num_made = 0

    def nodes(self) -> Iterator[Node]:
        """Yields every node but the roots, parents first."""
        waiting = [child for root in self._roots.values() for child in root.children]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children)

    def roots(self) -> list[tuple[Hashable, Node]]:
        """Returns the namespaces, each with its root."""
        return list(self._roots.items())

    def root(self, namespace: Hashable) -> Node:
        """Returns the root of a namespace, made where there is none; ``drop_empty_roots`` takes it back if unused."""
        if namespace not in self._roots:
            self._roots[namespace] = self._make()
        return self._roots[namespace]

    def drop_empty_roots(self) -> None:
        """Forgets the namespaces without a node."""
        self._roots = {namespace: root for namespace, root in self._roots.items() if root.children}

    def full_child(self, parent: Node, ids: tuple[int, ...]) -> Node | None:
        """Returns the child that starts with the whole next page of a text, if there is one."""
        page = ids[parent.end : parent.end + self.page_len]
        if len(page) < self.page_len:
            return None
        for node in self._index.get(self._page_hash(parent.idx, page), ()):
            if node.parent is parent and self._first_page(node) == page:
                return node
        return None

    def nearest_child(self, parent: Node, ids: tuple[int, ...]) -> tuple[Node | None, int]:
        """Returns the child whose first page has the longest common beginning with a text's next page, and its length.

        In the order of tokens it is a neighbour of the place where the page would stand; of two, the one before.
        """
        page = ids[parent.end : parent.end + self.page_len]
        place = bisect.bisect_left(parent.children, page, key=self._first_page)
        best, best_len = None, 0
        for child in parent.children[max(place - 1, 0) : place + 1]:
            if (length := common_len(self._first_page(child), page)) > best_len:
                best, best_len = child, length
        return best, best_len

    def common_len(self, node: Node, ids: tuple[int, ...]) -> int:
        """Returns with how many of its tokens a node goes along with a text that its parent goes along with."""
        return common_len(node.tokens, ids[node.start : node.end])

    def walk(self, namespace: Hashable, ids: tuple[int, ...]) -> Path:
        """Returns the path along a text, as far as there is one."""
        path: Path = []
        node = self._roots.get(namespace)
        while node is not None and node.end < len(ids):
            child = self.full_child(node, ids)
            if child is not None:
                num_tokens = self.common_len(child, ids)
            else:
                child, num_tokens = self.nearest_child(node, ids)
            if child is None:
                break
            path.append((child, num_tokens))
            node = child if num_tokens == len(child.tokens) else None
        return path

    def add(
        self,
        parent: Node,
        tokens: tuple[int, ...],
        pages: tuple[int, ...],
        *,
        intact_from: Mapping[int, int],
        last_use: int,
    ) -> Node:
        """Makes a child of ``parent``, none of whose children starts with the same page, and returns it."""
        node = self._make(parent.end)
        node.tokens, node.pages, node.last_use = tokens, pages, last_use
        node.intact_from = within(intact_from, node.start, node.end)
        self._attach(node, parent)
        return node

    def remove(self, leaf: Node) -> None:
        """Takes a node without children out."""
        assert not leaf.children
        self._detach(leaf)

    def split(self, node: Node, num_pages: int) -> Node:
        """Makes a node end after its first pages; the others become its child. Returns the node with the first.

        The child is the old object, so that its own children stay where they are. A node that needs no split, for
        ``num_pages`` of none or all, is returned as it is.
        """
        if not 0 < num_pages < len(node.pages):
            return node
        parent = node.parent
        assert parent is not None
        self._detach(node)
        num_tokens = num_pages * self.page_len
        intact_from, tokens, pages = node.intact_from, node.tokens, node.pages
        head = self.add(parent, tokens[:num_tokens], pages[:num_pages], intact_from=intact_from, last_use=node.last_use)
        node.start, node.tokens, node.pages = head.end, tokens[num_tokens:], pages[num_pages:]
        node.intact_from = within(intact_from, node.start, node.end)
        self._attach(node, head)
        return head

    def check(self) -> None:
        """Asserts what the module says. For tests: it looks at every node."""
        for node in self.nodes():
            assert node.parent is not None and node in node.parent.children and node.start == node.parent.end
            assert len(node.pages) == pages_lib.pages_for(len(node.tokens), self.page_len) > 0
            assert node.start % self.page_len == 0
            assert len(node.tokens) % self.page_len == 0 or (len(node.pages) == 1 and not node.children)
            assert all(node.start <= position <= node.end for position in node.intact_from.values())
            assert all(child.last_use <= node.last_use for child in node.children)
            firsts = [self._first_page(child) for child in node.children]
            assert firsts == sorted(firsts)
            assert not any(after[: len(before)] == before for before, after in itertools.pairwise(firsts))
        indexed = [node for bucket in self._index.values() for node in bucket]
        full = [node for node in self.nodes() if len(self._first_page(node)) == self.page_len]
        assert len(indexed) == len(full) and set(indexed) == set(full)
        assert all(self._index.values())

    def _make(self, start: int = 0) -> Node:
        self._num_made += 1
        return Node(idx=self._num_made, start=start)

    def _first_page(self, node: Node) -> tuple[int, ...]:
        return node.tokens[: self.page_len]

    def _attach(self, node: Node, parent: Node) -> None:
        node.parent = parent
        bisect.insort(parent.children, node, key=self._first_page)
        if len(first_page := self._first_page(node)) == self.page_len:
            self._index.setdefault(self._page_hash(parent.idx, first_page), []).append(node)

    def _detach(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children.remove(node)
        if len(first_page := self._first_page(node)) == self.page_len:
            place = self._page_hash(node.parent.idx, first_page)
            self._index[place].remove(node)
            if not self._index[place]:
                del self._index[place]


def within(intact_from: Mapping[int, int], start: int, end: int) -> dict[int, int]:
    """Returns the part of ``Node.intact_from`` that falls to positions ``start .. end``."""
    return {window: min(max(position, start), end) for window, position in intact_from.items()}


def common_len(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common at their beginning."""
    if first == second:
        return len(first)
    pairs = enumerate(zip(first, second, strict=False))
    return next((idx for idx, (one, other) in pairs if one != other), min(len(first), len(second)))


def token_ids(tokens: Sequence[int]) -> tuple[int, ...]:
    """Returns whole, plain ints: what is compared is all of each id. Raises ``ValueError`` for what is no id."""
    ids = tuple(tokens)
    for token in ids:
        if type(token) is not int or token < 0:
            is_id = isinstance(token, numbers.Integral) and not isinstance(token, bool) and token >= 0
            config_lib.check(is_id, f"tokens: expected token ids of at least 0, got {token!r}")
    return tuple(map(int, ids))
