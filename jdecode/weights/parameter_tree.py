"""The two forms of a model's parameters: a nested dict, as modules take them, and a table from path to array."""

from collections.abc import Mapping
from typing import Any


def flat(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the leaves of a nested mapping by their paths, whose parts are joined by ``/``."""
    pairs: dict[str, Any] = {}
    for name, node in tree.items():
        if isinstance(node, Mapping):
            pairs.update({f"{name}/{path}": leaf for path, leaf in flat(node).items()})
        else:
            pairs[name] = node
    return pairs


def nested(table: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the nested dict whose ``flat`` is ``table``."""
    tree: dict[str, Any] = {}
    for path, leaf in table.items():
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree
