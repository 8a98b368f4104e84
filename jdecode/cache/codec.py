"""Codecs: how a row of K or V becomes stored bytes. A codec is static and knows nothing of layouts."""

import dataclasses
from typing import Any, Protocol

import jax

from jdecode.attention import segment


class StoredRows(segment.Rows, Protocol):
    """Rows as a codec stores them: every leaf has the B rows on its first axis, and S slots that do not touch."""

    @property
    def slot_axes(self) -> tuple[int, ...]:
        """For each leaf, in the order of the pytree, the axis of its slots: 1 or more."""
        ...


class RowCodec(Protocol):
    """Stores rows of keys, or of values. Frozen and hashable."""

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> StoredRows:
        """Allocates empty rows for B x S slots of K heads of width H, spread over ``mesh`` where there is one."""
        ...

    def cast(self, x_BTKH: jax.Array) -> jax.Array:
        """Returns the block in the float dtype from which it is encoded; a number that it cannot hold is infinite."""
        ...

    def encode(self, x_BTKH: jax.Array) -> Any:
        """Returns the block as it is stored: ``StoredRows`` of T slots, the pytree that ``init`` makes."""
        ...

    def write(self, rows: Any, slot_BT: jax.Array, new: Any) -> Any:
        """Returns rows with slot t of the encoded block ``new`` in slot ``slot_BT[b, t]``.

        The slots of a batch row are distinct. Slots past the last are dropped (never clamped, never wrapped).
        """
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCodec:
    """How keys are stored, and how values are."""

    keys: RowCodec
    values: RowCodec
