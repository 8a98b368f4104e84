"""The nodes of a prefix tree as plain values, to be written down and planted again."""

import dataclasses
from collections.abc import Hashable, Mapping, Sequence

from jdecode import config as config_lib
from jdecode.serving import pages as pages_lib
from jdecode.serving import prefix_nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class SavedNode:
    """A node as it is written down.

    Attributes:
      namespace: of its root.
      parent: its parent's place among the saved nodes, before its own; ``None`` below the root.
      The others are those of ``prefix_nodes.Node``.
    """

    namespace: Hashable
    parent: int | None
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    intact_from: Mapping[int, int]
    last_use: int


def take(tree: prefix_nodes.NodeTree) -> list[SavedNode]:
    """Returns every node, parents first."""
    saved: list[SavedNode] = []
    for namespace, root in tree.roots():
        waiting: list[tuple[prefix_nodes.Node, int | None]] = [(child, None) for child in reversed(root.children)]
        while waiting:
            node, parent = waiting.pop()
            waiting.extend((child, len(saved)) for child in reversed(node.children))
            saved.append(
                SavedNode(
                    namespace=namespace,
                    parent=parent,
                    tokens=node.tokens,
                    pages=node.pages,
                    intact_from=dict(node.intact_from),
                    last_use=node.last_use,
                )
            )
    return saved


def plant(tree: prefix_nodes.NodeTree, saved: Sequence[SavedNode], *, windows: Sequence[int]) -> None:
    """Puts nodes into an empty tree.

    Args:
      windows: those that each node must know.

    Raises:
      ValueError: no tree has such nodes; the tree is then of no use.
    """
    nodes: list[prefix_nodes.Node] = []
    for place, new in enumerate(saved):
        if new.parent is None:
            parent = tree.root(new.namespace)
        else:
            is_before = type(new.parent) is int and 0 <= new.parent < place
            config_lib.check(is_before, f"node {place}: expected its parent before it, got {new.parent!r}")
            parent = nodes[new.parent]
            is_like = saved[new.parent].namespace == new.namespace and new.last_use <= parent.last_use
            config_lib.check(is_like, f"node {place}: expected its parent's namespace and no later use, got another")
        config_lib.check_count(f"node {place}: last use", new.last_use, 0)
        tokens = prefix_nodes.token_ids(new.tokens)
        _check_tokens(tree, place, parent, tokens, len(new.pages))
        _check_intact(place, new.intact_from, windows, parent.end, parent.end + len(tokens))
        nodes.append(tree.add(parent, tokens, new.pages, intact_from=new.intact_from, last_use=new.last_use))


def _check_tokens(
    tree: prefix_nodes.NodeTree, place: int, parent: prefix_nodes.Node, tokens: tuple[int, ...], num_pages: int
) -> None:
    """Refuses what could not be a child beside those that are there."""
    page_len = tree.page_len
    is_whole = len(tokens) % page_len == 0 or num_pages == 1
    is_filled = num_pages == pages_lib.pages_for(len(tokens), page_len) > 0
    config_lib.check(
        is_whole and is_filled and parent.end % page_len == 0,
        f"node {place}: expected whole pages, or one in part as a leaf, got {len(tokens)} tokens in {num_pages} pages "
        f"from position {parent.end} on",
    )
    nearest, common_len = tree.nearest_child(parent, (0,) * parent.end + tokens)
    is_taken = nearest is not None and common_len == min(len(nearest.tokens), len(tokens), page_len)
    config_lib.check(not is_taken, f"node {place}: expected a page that no sibling begins with, got one that one does")


def _check_intact(place: int, intact_from: Mapping[int, int], windows: Sequence[int], start: int, end: int) -> None:
    is_sound = set(intact_from) == set(windows) and all(
        type(position) is int and start <= position <= end for position in intact_from.values()
    )
    config_lib.check(is_sound, f"node {place}: expected positions {start} to {end} for windows {windows}, got others")
