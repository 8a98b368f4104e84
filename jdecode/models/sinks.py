"""Sinks at positions inside the cache (Xiao et al. 2024, section 3.2): how far a query is from the first tokens.

A layer with a window of W and N sinks holds N + W keys, however long the text. At its end the text's own distance to a
sink is one that no model was trained for; what counts is the distance inside the cache, where the sinks stand at 0 ..
N-1 and the window follows at N .. N+W-1::

    text      0 1 2 | ......... | q-W+1 ... q        q sees sink s at the distance q - s
    cache     0 1 2 |             3     ... N+W-1    q sees sink s at the distance N+W-1 - s

Inside the window nothing changes, for rope is relative. So a query acts on the sinks, and on them alone, as if it stood
at ``min(q, N + W - 1)``. Keys stay as they are stored, rotated by their own positions; it is the query that is turned
back by the difference as it meets the sinks (rotations add up), each query of a block by its own. Hence every codec,
layout and backend, chunks, blocks of proposals and rollback work as they do without.

The sinks become a segment of their own. Positions decide which keys those are; layouts only promise that position p
under N has slot p, so that a cache has them in its first N slots, and a block among its first N tokens.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.attention import blockwise, kv_block, visibility
from jdecode.attention import segment as segment_lib
from jdecode.models import rotary


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first slots of other rows. See ``attention.segment.Rows``."""

    rows: segment_lib.Rows
    num_slots: int = dataclasses.field(metadata={"static": True})

    @property
    def unit(self) -> int:
        """That of the rows beneath."""
        return self.rows.unit

    @property
    def num_heads(self) -> int:
        """K."""
        return self.rows.num_heads

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns those of the rows beneath."""
        return self.rows.block(start, size)

    def stored(self, start: jax.Array | int, size: int) -> kv_block.KVBlock:
        """Returns those of the rows beneath."""
        return self.rows.stored(start, size)

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Brings queries to the form that the rows beneath want."""
        return self.rows.queries(q_BTNH)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TurnedRows:
    """Keys that are met by queries from other positions. See ``attention.segment.Rows``.

    Attributes:
      rows: the keys.
      turn_BT: int32, how far each query is moved, in positions.
      rope: by which the queries are rotated. Static.
    """

    rows: segment_lib.Rows
    turn_BT: jax.Array
    rope: config_lib.RopeConfig = dataclasses.field(metadata={"static": True})

    @property
    def num_slots(self) -> int:
        """S."""
        return self.rows.num_slots

    @property
    def unit(self) -> int:
        """That of the rows beneath."""
        return self.rows.unit

    @property
    def num_heads(self) -> int:
        """K."""
        return self.rows.num_heads

    def block(self, start: jax.Array | int, size: int) -> jax.Array:
        """Returns the keys as they are."""
        return self.rows.block(start, size)

    def stored(self, start: jax.Array | int, size: int) -> kv_block.KVBlock:
        """Returns the keys as they are stored."""
        return self.rows.stored(start, size)

    def queries(self, q_BTNH: jax.Array) -> jax.Array:
        """Turns queries, and then brings them to the form that the keys want."""
        return self.rows.queries(rotary.rotate(q_BTNH, self.turn_BT, self.rope))


def inside_cache(
    segments: Sequence[segment_lib.Segment], query_position_BT: jax.Array, layer: config_lib.LayerConfig
) -> tuple[segment_lib.Segment, ...]:
    """Takes the sinks out of segments, into segments of their own that meet queries as the cache numbers them.

    Args:
      segments: what a layer's queries attend over.
      query_position_BT: int32, absolute positions of the queries, which are rotated by them.
      layer: static; one whose sinks need nothing leaves the segments as they are.
    """
    if not layer.turns_sinks:
        return tuple(segments)
    assert layer.window is not None and layer.rope is not None
    turn_BT = jnp.minimum(layer.num_sinks + layer.window - 1 - query_position_BT, 0)
    parts = []
    for segment in segments:
        first, others = _split(segment, layer.num_sinks)
        keys = TurnedRows(rows=first.keys, turn_BT=turn_BT, rope=layer.rope)
        parts += [dataclasses.replace(first, keys=keys), others]
    return tuple(parts)


def _split(segment: segment_lib.Segment, num_sinks: int) -> tuple[segment_lib.Segment, segment_lib.Segment]:
    """Returns the sinks of a segment, and the segment without them: their slots are as if they were empty."""
    # Whole blocks where attention reads several: it moves the last one back, which would begin inside a page.
    unit = blockwise.BLOCK_SIZE if num_sinks > blockwise.BLOCK_SIZE else segment.keys.unit
    num_slots = min(shapes.round_up(num_sinks, unit), segment.keys.num_slots)
    is_sink_BS = segment.position_BS < num_sinks
    first_BS = jnp.where(is_sink_BS, segment.position_BS, visibility.EMPTY)[:, :num_slots]
    first = dataclasses.replace(
        segment,
        keys=FirstRows(rows=segment.keys, num_slots=num_slots),
        values=FirstRows(rows=segment.values, num_slots=num_slots),
        position_BS=first_BS,
        first_slot=jnp.int32(0),
        end_slot=jnp.minimum(segment.end_slot, num_slots),
        is_block=False,
    )
    others_BS = jnp.where(is_sink_BS, visibility.EMPTY, segment.position_BS)
    return first, dataclasses.replace(segment, position_BS=others_BS, is_block=False)
