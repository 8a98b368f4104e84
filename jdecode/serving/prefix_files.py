"""A prefix cache on disk: a JSON file of what is known, and a safetensors file of the pages, in one ``prefix_folder``.

A save can end at any point, however it ends, and the folder holds what it held before or all that is new::

    pages -> .pages    what is known -> .json    both are on the disk before either has its name
    .pages -> pages-<digest>.safetensors         beside the old ones: nothing names it yet
    .json  -> prefix_cache.json                  in one step: from here on the new ones count
    the old pages go

Everything is checked before it is used. Digests find damage. They do not prove who wrote a file, so read none that a
stranger could have written.

Salts are there as digests only.
"""

import contextlib
import dataclasses
import hashlib
import json
import os
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode.serving import device_pages, pages, prefix_folder, prefix_nodes, prefix_snapshot
from jdecode.serving.prefix_namespace import Namespace
from jdecode.weights import json_file, safetensors_file, safetensors_write, stored_tensor

FORMAT = "jdecode.prefix_cache.1"
_FIELDS = {"format", "model", "cache", "num_pages", "page_len", "namespaces", "nodes", "pages_file", "digest"}
_READ_BYTES = 2**22


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
    """What the JSON file says.

    Attributes:
      model: the digest of the model.
      cache: its dtype is resolved.
      num_pages, page_len: of the pool.
      nodes: of the tree; their pages are numbered from 0 on in the order of the nodes.
    """

    model: str
    cache: config_lib.CacheConfig
    num_pages: int
    page_len: int
    nodes: tuple[prefix_snapshot.SavedNode, ...]


def save(folder: str | pathlib.Path, contents: Contents, device: device_pages.DevicePages) -> None:
    """Writes a prefix cache; what the folder held of another is replaced at the end, or not at all.

    Args:
      folder: made when absent. While another process saves there, this waits.
      contents: the nodes' pages are those of ``device``.

    Raises:
      ValueError: it is no folder, or holds what is not ours and no prefix cache.
      OSError: it cannot be written.
    """
    folder = pathlib.Path(folder)
    prefix_folder.is_held(folder)
    page_X = np.asarray([page for node in contents.nodes for page in node.pages], np.int32)
    tensors = {name: _tensor(leaf, page_X) for name, leaf in _named_leaves(device)}
    digest = hashlib.blake2b(digest_size=32)
    writing = pages_path, json_path = folder / prefix_folder.WRITING_PAGES, folder / prefix_folder.WRITING_JSON
    with prefix_folder.alone(folder):
        try:
            for path in writing:
                path.unlink(missing_ok=True)  # of a save that was killed, perhaps another user's
            safetensors_write.write(pages_path, tensors, digest=digest)
            pages_file = f"pages-{digest.hexdigest()}.safetensors"
            values = {**_values(contents), "pages_file": pages_file}
            json_path.write_bytes(json.dumps({**values, "digest": _digest(values)}).encode())
            for path in writing:
                _flush(path)
            os.replace(pages_path, folder / pages_file)
            _flush(folder)  # names reach the disk in no order of their own
            os.replace(json_path, folder / prefix_folder.JSON_NAME)
            _flush(folder)
        finally:
            for path in writing:
                path.unlink(missing_ok=True)
        prefix_folder.sweep(folder, pages_file)


def load(folder: str | pathlib.Path) -> tuple[Contents, pathlib.Path]:
    """Reads the JSON file, and returns what it says and where the pages are.

    Raises:
      ValueError: one line: it is missing, damaged, or of another format.
    """
    path = pathlib.Path(folder) / prefix_folder.JSON_NAME
    values = json_file.read_object(path)
    with named(path):
        got = values.get("format")
        config_lib.check(got == FORMAT, f"format: expected {FORMAT}, got {str(got)[:40]!r}")
        config_lib.check(set(values) == _FIELDS, f"expected the fields {', '.join(sorted(_FIELDS))}, got others")
        found = values.pop("digest")
        config_lib.check(found == _digest(values), "digest: expected that of the contents, got another; it is damaged")
        pages_file = values["pages_file"]
        is_name = isinstance(pages_file, str) and prefix_folder.PAGES_NAME.fullmatch(pages_file) is not None
        config_lib.check(is_name, f"pages_file: expected pages-<digest>.safetensors, got {str(pages_file)[:90]!r}")
        return _contents(values), path.parent / pages_file


def fill(device: device_pages.DevicePages, path: pathlib.Path, num_held: int) -> None:
    """Reads pages into the first ones of a pool.

    Args:
      device: of the geometry that ``load`` told.
      path: of the file of pages.
      num_held: how many pages it has.

    Raises:
      ValueError: one line: the file is missing or damaged, or its pages are not those of this pool.
    """
    tensors = safetensors_file.read_header(path)
    leaves = dict(_named_leaves(device))
    for name, leaf in leaves.items():
        expected = (str(leaf.dtype), (num_held, *leaf.shape[1:]))
        got = (tensors[name].encoding.name, tensors[name].shape) if name in tensors else None
        config_lib.check(got == expected, f"{path}: {name}: expected {expected}, got {got}; it is another cache's")
    config_lib.check(len(tensors) == len(leaves), f"{path}: expected {len(leaves)} tensors, got {len(tensors)}")
    digest = hashlib.blake2b(digest_size=32)
    try:
        with path.open("rb") as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
        is_whole = path.name == f"pages-{digest.hexdigest()}.safetensors"
        config_lib.check(is_whole, f"{path}: expected the contents of its name's digest, got others; it is damaged")
        whole_leaves = [_whole_leaf(leaf, tensors[name]) for name, leaf in leaves.items()]
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got: {error.strerror or error}") from error
    device.put_leaves(whole_leaves)


def _named_leaves(device: device_pages.DevicePages) -> Iterator[tuple[str, jax.Array]]:
    for layer, store in enumerate(device.stores):
        for kind, rows in (("keys", store.keys), ("values", store.values)):
            for place, leaf in enumerate(jax.tree.leaves(rows)):
                yield f"layers.{layer}.{kind}.{place}", leaf


def _tensor(leaf: jax.Array, page_X: np.ndarray) -> safetensors_write.Tensor:
    return safetensors_write.Tensor(
        shape=(len(page_X), *leaf.shape[1:]),
        dtype=np.dtype(leaf.dtype),
        read=lambda: jnp.take(leaf, jnp.asarray(page_X), axis=0),
    )


def _whole_leaf(leaf: jax.Array, tensor: stored_tensor.StoredTensor) -> jax.Array:
    whole = np.zeros(leaf.shape, leaf.dtype)
    whole[: tensor.shape[0]] = tensor.read()
    return jax.device_put(whole, leaf.sharding)


def _values(contents: Contents) -> dict[str, Any]:
    """Returns the fields of the JSON file, but for the file of pages and the digest."""
    namespaces = list(dict.fromkeys(node.namespace for node in contents.nodes))
    return {
        "format": FORMAT,
        "model": contents.model,
        "cache": dataclasses.asdict(contents.cache),
        "num_pages": contents.num_pages,
        "page_len": contents.page_len,
        "namespaces": [
            {"cache": dataclasses.asdict(one.cache), "adapter": one.adapter, "salt": one.salt, "extras": one.extras}
            for one in namespaces
            if isinstance(one, Namespace)
        ],
        "nodes": [
            {
                "namespace": namespaces.index(node.namespace),
                "parent": node.parent,
                "tokens": node.tokens,
                "intact_from": sorted(node.intact_from.items()),
                "last_use": node.last_use,
            }
            for node in contents.nodes
        ],
    }


def _contents(values: Mapping[str, Any]) -> Contents:
    """Reads the fields. What they have to be to make sense together is for the tree and the pool to check."""
    page_len, model = values["page_len"], values["model"]
    config_lib.check_count("num_pages", values["num_pages"], 1)
    config_lib.check_count("page_len", page_len, 1)
    namespaces = [
        Namespace(
            model=model,
            cache=config_lib.CacheConfig(**one["cache"]),
            adapter=one["adapter"],
            salt=one["salt"],
            extras=tuple((kind, value) for kind, value in one["extras"]),
        )
        for one in values["namespaces"]
    ]
    nodes, num_held = [], 0
    for node in values["nodes"]:
        config_lib.check(node["namespace"] in range(len(namespaces)), "node: expected one of the namespaces, got none")
        num_pages = pages.pages_for(len(node["tokens"]), page_len)
        nodes.append(
            prefix_snapshot.SavedNode(
                namespace=namespaces[node["namespace"]],
                parent=node["parent"],
                tokens=prefix_nodes.token_ids(node["tokens"]),
                pages=tuple(range(num_held, num_held + num_pages)),
                intact_from=dict(node["intact_from"]),
                last_use=node["last_use"],
            )
        )
        num_held += num_pages
    return Contents(
        model=model,
        cache=config_lib.CacheConfig(**values["cache"]),
        num_pages=values["num_pages"],
        page_len=page_len,
        nodes=tuple(nodes),
    )


def _digest(values: Mapping[str, Any]) -> str:
    return hashlib.blake2b(json.dumps(values, sort_keys=True).encode(), digest_size=32).hexdigest()


@contextlib.contextmanager
def named(path: pathlib.Path) -> Iterator[None]:
    """Turns whatever is wrong with the values of a file into one line that names it."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path}: expected the fields of {FORMAT}, got others; it is damaged") from error


def _flush(path: pathlib.Path) -> None:
    """Waits until a file, or a folder's table of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
