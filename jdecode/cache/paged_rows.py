"""Rows whose slots lie in the pages of a pool, found by a table.

::

    slot of a row      0 .. Z-1     Z .. 2Z-1    2Z .. 3Z-1
    column             0            1            2
    page_BC[row]       7            2            P            (no page)
                       |            |
    pool  page 0 | page 1 | page 2 | ...          | page 7 | ... | page P-1

Attention reads them a block of slots at a time, so no row ever lies in one piece.
"""

import dataclasses

import jax
import jax.numpy as jnp

from jdecode.attention import kv_block
from jdecode.cache import codec as codec_lib
from jdecode.cache import page_pool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedRows:
    """Rows of B texts in a pool. See ``attention.segment.Rows``.

    Attributes:
      pool: see ``page_pool``.
      page_BC: int32, the page of each column; an id past the pool where there is none. Such slots read zeros.
    """

    pool: codec_lib.StoredRows
    page_BC: jax.Array

    @property
    def num_slots(self) -> int:
        """S = C * Z."""
        return self.page_BC.shape[1] * self.pool.num_slots

    @property
    def unit(self) -> int:
        """That of the pool."""
        return self.pool.unit

    @property
    def num_heads(self) -> int:
        """K."""
        return self.pool.num_heads

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns what ``size`` slots from ``start`` stand for."""
        return self._part(start, size).block(0, size)

    def stored(self, start: jax.Array | int, size: int) -> kv_block.KVBlock:
        """Returns ``size`` slots from ``start`` as they are stored."""
        return self._part(start, size).stored(0, size)

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Brings queries to the form of the pool's keys."""
        return self.pool.queries(q_BTNH)

    def write(self, slot_BT: jax.Array, new: codec_lib.StoredRows) -> codec_lib.StoredRows:
        """Returns the pool with slot t of the encoded block ``new`` in slot ``slot_BT[b, t]`` of each row.

        Slots past the last and slots without a page are dropped, and slots that are stored together are written so. No
        two rows may write one slot of a page.
        """
        page_BT, offset_BT = self._places(slot_BT)
        return page_pool.write(self.pool, page_BT, offset_BT, new)

    def _part(self, start: jax.Array | int, size: int) -> codec_lib.StoredRows:
        Z = self.pool.num_slots
        if size % Z == 0:  # whole pages: ``start`` is a multiple of ``size`` or ends at the last slot
            page_BC = jax.lax.dynamic_slice_in_dim(self.page_BC, start // Z, size // Z, axis=1)
            return page_pool.gather(self.pool, page_BC)
        slot_T = start + jnp.arange(size, dtype=jnp.int32)
        slot_BT = jnp.broadcast_to(slot_T[None, :], (self.page_BC.shape[0], size))
        return page_pool.gather_slots(self.pool, *self._places(slot_BT))

    def _places(self, slot_BT: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the page and the slot within it of each slot of a row."""
        Z, P = self.pool.num_slots, page_pool.num_pages(self.pool)
        page_BT = jnp.take_along_axis(self.page_BC, slot_BT // Z, axis=1, mode="fill", fill_value=P)
        return page_BT, slot_BT % Z
