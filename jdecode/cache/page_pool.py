"""Pages on the device: a pool is stored rows whose B rows are P pages, and whose S slots are the Z slots of a page.

``codec.keys.init(P, Z, K, H, mesh)`` makes one, so every codec has pools, and what is said of pages here is said of
stored bytes: nothing is decoded on the way. Which page belongs to whom is not known here (``serving.pages``).

A page id past the pool is no page: it reads zeros, and what is written to it is dropped. So is a negative id, which
must not be used as a marker all the same: elsewhere -1 is the last page.

Where a leaf has one entry for a run of slots (``codec.StoredRows``), pages hold whole runs, and slots are read and
written by whole runs: they are named slot by slot all the same, and the first of a run says where its entry is.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from jdecode.cache import codec as codec_lib

StoredRowsT = TypeVar("StoredRowsT", bound=codec_lib.StoredRows)


def num_pages(pool: codec_lib.StoredRows) -> int:
    """Returns P."""
    return jax.tree.leaves(pool)[0].shape[0]


def gather(pool: StoredRowsT, page_BC: jax.Array) -> StoredRowsT:
    """Reads pages, side by side.

    Args:
      page_BC: int32, the C pages of each of B rows; ids outside the pool read zeros.

    Returns:
      Rows of B rows and C * Z slots.
    """

    def read(axis: int, _: int, leaf: jax.Array) -> jax.Array:
        pages = leaf.at[page_BC].get(mode="fill", fill_value=0, wrap_negative_indices=False)
        pages = jnp.moveaxis(pages, 1, axis)  # the pages of a row, just before the slots of a page
        return pages.reshape(*pages.shape[:axis], -1, *pages.shape[axis + 2 :])

    return _map_leaves(read, pool)


def gather_slots(pool: StoredRowsT, page_BT: jax.Array, offset_BT: jax.Array) -> StoredRowsT:
    """Reads single slots: slot ``offset_BT[b, t]`` of page ``page_BT[b, t]`` becomes slot t of row b."""

    def read(axis: int, run_len: int, leaf: jax.Array) -> jax.Array:
        at = _entries(leaf, axis, run_len, page_BT, offset_BT)
        return jnp.moveaxis(at.get(mode="fill", fill_value=0, wrap_negative_indices=False), 1, axis)

    return _map_leaves(read, pool)


def write(pool: StoredRowsT, page_BT: jax.Array, offset_BT: jax.Array, new: StoredRowsT) -> StoredRowsT:
    """Writes slot t of row b of ``new`` to slot ``offset_BT[b, t]`` of page ``page_BT[b, t]``.

    Args:
      page_BT: int32; what has an id outside the pool is dropped. The places in the pool are distinct, over all rows.
      offset_BT: int32, from 0 to Z - 1.
      new: an encoded block, or other stored rows, of B rows and T slots.
    """
    P = num_pages(pool)
    # Distinct, as is promised to the compiler, though they are dropped.
    nowhere_BT = P + jnp.arange(page_BT.size, dtype=jnp.int32).reshape(page_BT.shape)
    page_BT = jnp.where((page_BT >= 0) & (page_BT < P), page_BT, nowhere_BT)

    def write_leaf(axis: int, run_len: int, leaf: jax.Array, fresh: jax.Array) -> jax.Array:
        at = _entries(leaf, axis, run_len, page_BT, offset_BT)
        return at.set(jnp.moveaxis(fresh, axis, 1), mode="drop", unique_indices=True, wrap_negative_indices=False)

    return _map_leaves(write_leaf, pool, new)


def copy_pages(pool: StoredRowsT, from_N: jax.Array, to_N: jax.Array) -> StoredRowsT:
    """Copies page ``from_N[i]`` onto page ``to_N[i]``, pair by pair: a later one reads what an earlier one wrote.

    Args:
      from_N, to_N: int32; a pair with an id outside the pool does nothing, so that N can be padded.
    """
    P = num_pages(pool)
    is_pair_N = (from_N >= 0) & (from_N < P) & (to_N >= 0)
    to_N = jnp.where(is_pair_N, to_N, P)

    def copy(idx: jax.Array, pool: StoredRowsT) -> StoredRowsT:
        def copy_leaf(leaf: jax.Array) -> jax.Array:
            return leaf.at[to_N[idx]].set(leaf.at[from_N[idx]].get(mode="clip"), mode="drop")

        return jax.tree.map(copy_leaf, pool)

    return jax.lax.fori_loop(0, from_N.shape[0], copy, pool)


def take_slots(rows: StoredRowsT, slot_BT: jax.Array) -> StoredRowsT:
    """Reads slots of ordinary rows (no pool) as they are stored, as ``write`` takes them.

    Args:
      slot_BT: int32; slots outside the rows read zeros.
    """

    def read(axis: int, run_len: int, leaf: jax.Array) -> jax.Array:
        entry_BU = slot_BT[:, ::run_len] // run_len
        idx = jnp.expand_dims(entry_BU, (*range(1, axis), *range(axis + 1, leaf.ndim)))
        return jnp.take_along_axis(leaf, idx, axis=axis, mode="fill", fill_value=0)

    return _map_leaves(read, rows)


def _entries(leaf: jax.Array, axis: int, run_len: int, page_BT: jax.Array, offset_BT: jax.Array) -> Any:
    """Addresses the entries of slots in a leaf of a pool."""
    page_BU, offset_BU = page_BT[:, ::run_len], offset_BT[:, ::run_len] // run_len
    return leaf.at[(page_BU, *[slice(None)] * (axis - 1), offset_BU)]


def _map_leaves(change: Callable[..., jax.Array], rows: codec_lib.StoredRows, *others: Any) -> Any:
    """Calls ``change(slot axis, slots an entry, leaf, ...)`` for each leaf of like rows."""
    leaves, structure = jax.tree.flatten(rows)
    columns = (jax.tree.leaves(other) for other in others)
    axes = rows.slot_axes
    run_lens = [rows.num_slots // leaf.shape[axis] for axis, leaf in zip(axes, leaves, strict=True)]
    return structure.unflatten(map(change, axes, run_lens, leaves, *columns))
