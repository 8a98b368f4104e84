"""Codecs: how a row of K or V becomes stored bytes. A codec is static and knows nothing of layouts."""

from typing import Any, Protocol

import jax

from jdecode.attention import segment


class Codec(Protocol):
    """Stores rows of keys or values. Frozen and hashable."""

    def init(
        self, batch_size: int, num_slots: int, num_heads: int, head_dim: int, mesh: jax.sharding.Mesh | None
    ) -> segment.Rows:
        """Allocates empty rows for B x S slots of K heads of width H, spread over ``mesh`` where there is one."""
        ...

    def write(self, rows: Any, slot_BT: jax.Array, x_BTKH: jax.Array) -> segment.Rows:
        """Returns rows with ``x_BTKH[b, t]`` in slot ``slot_BT[b, t]``.

        The slots of a batch row are distinct. Slots past the last are dropped (never clamped, never wrapped).
        """
        ...

    def round_trip(self, x_BTKH: jax.Array) -> segment.Rows:
        """Returns rows of T slots that read as ``x_BTKH`` would after it was written.

        What they read as may be written in its place, and reads the same.
        """
        ...
