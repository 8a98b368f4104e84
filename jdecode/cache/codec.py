"""Codecs: how a row of K or V becomes stored bytes. A codec is static and knows nothing of layouts."""

import dataclasses
from typing import Any, Protocol

import jax

from jdecode.attention import segment, visibility
from jdecode.cache import layout as layout_lib


class StoredRows(segment.Rows, Protocol):
    """Rows as a codec stores them: every leaf has the B rows first, and entries for their S slots on another axis.

    An entry is that of one slot, or of as many slots as come to one where a leaf has fewer: the scale of a group. Slots
    that share an entry are written together.
    """

    @property
    def slot_axes(self) -> tuple[int, ...]:
        """For each leaf, in the order of the pytree, the axis of its entries: 1 or more."""
        ...


class RowCodec(Protocol):
    """Stores rows of keys, or of values. Frozen and hashable."""

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> segment.Rows:
        """Allocates empty rows for B x S slots of K heads of width H, spread over ``mesh`` where there is one."""
        ...

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in the float dtype from which it is encoded; a number that it cannot hold is infinite."""
        ...

    def encode(self, x_BTKH: jax.Array) -> Any:
        """Returns the block as it is stored: rows of T slots, the pytree that ``init`` makes."""
        ...

    def write(self, rows: Any, slot_BT: jax.Array, new: Any) -> Any:
        """Returns rows with slot t of the encoded block ``new`` in slot ``slot_BT[b, t]``.

        The slots of a batch row are distinct. Slots past the last are dropped (never clamped, never wrapped).
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCodec:
    """How keys are stored, and how values are.

    Attributes:
      grouping: for codecs that store whole groups of tokens, see ``cache/grouped.py``.
    """

    keys: RowCodec
    values: RowCodec
    grouping: "Grouping | None" = None

    def stored_len(self, length: jax.Array) -> jax.Array:
        """Returns how many of a text's tokens are stored so: all, or those of settled groups.

        Args:
          length: of the text, int32, of any shape.
        """
        return length if self.grouping is None else self.grouping.settling.end(length)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Grouping:
    """Where tokens are until their group is stored.

    Attributes:
      settling: when it is.
      layout: of the latest tokens.
      exact: how those are stored.
    """

    settling: visibility.Settling
    layout: layout_lib.Layout
    exact: KVCodec
