"""What a layer does with a block of tokens: it writes keys and values, and says what the block's queries attend over.

``append`` writes the block and lets it attend over the written cache where that is safe. A block too long for a ring
(see ``layout_ring``) attends to the old ring and to itself instead, and then its tail is written. Either way token i
sees exactly what ``attention.visibility`` says.

A codec may store tokens by groups (``grouped``). A layer then has its latest tokens beside its groups, and a block
writes the groups that settle with it before it attends.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp

from jdecode.attention import received, visibility
from jdecode.attention import segment as segment_lib
from jdecode.cache import block as block_lib
from jdecode.cache import codec as codec_lib
from jdecode.cache import grouped
from jdecode.cache import layout as layout_lib
from jdecode.cache import slots as slots_lib
from jdecode.cache.kv_cache import KVCache, LayerStore


@dataclasses.dataclass(frozen=True, kw_only=True)
class CachedLayer:
    """One layer's view of a cache while a block passes through it."""

    cache: KVCache
    block: block_lib.Block
    layer_idx: int
    window: int | None
    num_sinks: int

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the block's keys and values; returns the layer's rows after it, and what its queries attend over.

        What is not finite is written into keys alone (``segment.faults_in_keys``), so that a proposal that is refused
        harms nobody, neither in its own block nor as a slot past the length.
        """
        codec, old = self.cache.codec, self.cache.stores[self.layer_idx]
        k_BTKH, v_BTKH = codec.keys.cast(k_BTKH), codec.values.cast(v_BTKH)
        if codec.grouping is None:
            return self._append_tokens(codec, self.cache.layout_idx[self.layer_idx], old, k_BTKH, v_BTKH)
        idx, exact = self.cache.layouts.index(codec.grouping.layout), codec.grouping.exact
        k_BTKH, v_BTKH = exact.keys.cast(k_BTKH), exact.values.cast(v_BTKH)
        assert old.recent is not None
        recent, tokens = self._append_tokens(exact, idx, old.recent, k_BTKH, v_BTKH)
        groups, settled = self._append_groups(codec, codec.grouping, old, tokens)
        return dataclasses.replace(groups, recent=recent), (
            *(_share(segment, codec.grouping, is_settled=True) for segment in settled),
            *(_share(segment, codec.grouping, is_settled=False) for segment in tokens),
        )

    def _append_tokens(
        self, codec: codec_lib.KVCodec, layout_idx: int, old: LayerStore, k_BTKH: jax.Array, v_BTKH: jax.Array
    ) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the block token by token."""
        cache, block, idx = self.cache, self.block, layout_idx
        block_len, layout = k_BTKH.shape[1], cache.layouts[idx]
        k_BTKH, v_BTKH = segment_lib.faults_in_keys(k_BTKH, v_BTKH)
        fresh = LayerStore(keys=codec.keys.encode(k_BTKH), values=codec.values.encode(v_BTKH))
        new = self._written(codec, idx, old, block.slots[idx], fresh)
        if block_len <= layout.max_block_len:
            return new, (self._stored_segment(idx, new, block.positions[idx], block.length_B),)
        fresh_segment = segment_lib.Segment(
            keys=fresh.keys,
            values=fresh.values,
            position_BS=block.stored_position_BT,
            first_slot=jnp.int32(0),
            end_slot=jnp.int32(block_len),
            is_block=True,
        )
        # The old slots still hold tokens that were taken back; in the fresh block others have their positions.
        kept_position_BS = _before(cache.positions[idx], cache.length_B)
        return new, (self._stored_segment(idx, old, kept_position_BS, cache.length_B), fresh_segment)

    def _append_groups(
        self,
        codec: codec_lib.KVCodec,
        grouping: codec_lib.Grouping,
        old: LayerStore,
        tokens: tuple[segment_lib.Segment, ...],
    ) -> tuple[LayerStore, tuple[segment_lib.Segment, ...]]:
        """Writes the groups that settle with the block, from the exact tokens that it attends over."""
        cache, block, settled = self.cache, self.block, self.block.settled
        assert settled is not None
        idx, old = cache.layout_idx[self.layer_idx], dataclasses.replace(old, recent=None)
        layout, block_len = cast(layout_lib.Layout, cache.layouts[idx]), block.position_BT.shape[1]
        slot_BX, token_BX = settled.slots(layout), settled.slots_of_tokens(grouping.layout, cache.length_B, tokens)

        def encoded(token_BX: jax.Array) -> LayerStore:
            k_BXKH, v_BXKH = grouped.take_tokens(tokens, token_BX)
            return LayerStore(keys=codec.keys.encode(k_BXKH), values=codec.values.encode(v_BXKH))

        if len(tokens) == 1:

            def write_group(turn: jax.Array, own: LayerStore) -> LayerStore:
                token_BZ, slot_BZ = (settled.group(x_BX, turn) for x_BX in (token_BX, slot_BX))
                return self._written(codec, idx, own, slot_BZ, encoded(token_BZ))

            # Mostly of no turn. (A condition would copy the rows that pass through it.)
            new = jax.lax.fori_loop(0, settled.num_groups, write_group, old)
        else:
            fresh = encoded(token_BX)
            new = self._written(codec, idx, old, slot_BX, fresh)
            if block_len > layout.max_block_len:
                fresh_segment = segment_lib.Segment(
                    keys=fresh.keys,
                    values=fresh.values,
                    position_BS=settled.position_BX,
                    first_slot=jnp.int32(0),
                    end_slot=settled.num_groups * settled.group_len,
                )
                position_BS = _before(cache.positions[idx], settled.before_B)
                return new, (self._stored_segment(idx, old, position_BS, settled.before_B), fresh_segment)
        position_BS = _before(block.positions[idx], settled.after_B)
        return new, (self._stored_segment(idx, new, position_BS, settled.after_B),)

    def _written(
        self, codec: codec_lib.KVCodec, layout_idx: int, old: LayerStore, slot_BT: jax.Array, fresh: LayerStore
    ) -> LayerStore:
        return LayerStore(
            keys=self.cache.write(layout_idx, codec.keys, old.keys, slot_BT, fresh.keys),
            values=self.cache.write(layout_idx, codec.values, old.values, slot_BT, fresh.values),
            received_BS=_with_zeros(old.received_BS, slot_BT),
        )

    def _stored_segment(
        self, layout_idx: int, store: LayerStore, position_BS: jax.Array, length_B: jax.Array
    ) -> segment_lib.Segment:
        layout = self.cache.layouts[layout_idx]
        first_slot, end_slot = jnp.int32(0), jnp.minimum(length_B.max(), layout.capacity)
        if isinstance(layout, layout_lib.PlacingLayout):
            end_slot = slots_lib.end_of_held(position_BS)
        if self.window is not None and not self.num_sinks and layout.max_len is not None:
            # Slots in the order of positions: those before the window of every row need not be read.
            first_slot = jnp.maximum(self.block.position_BT[:, 0].min() - (self.window - 1), 0)
        return segment_lib.Segment(
            keys=self.cache.rows(layout_idx, store.keys),
            values=self.cache.rows(layout_idx, store.values),
            position_BS=position_BS,
            first_slot=first_slot,
            end_slot=end_slot,
        )

    def observe(
        self,
        store: LayerStore | None,
        q_BTNH: jax.Array,
        segments: Sequence[segment_lib.Segment],
        **attention: Any,
    ) -> LayerStore:
        """Adds the attention that the block's queries pay to each slot, where the layer counts it.

        Args:
          store, segments: of ``append``.
          q_BTNH: the block's queries.
          attention: ``scale`` and the others of ``attention.reference.attend``.
        """
        assert store is not None  # as ``append`` gave it
        if store.received_BS is None:
            return store
        (segment,) = segments  # a layer that counts writes first and attends then, whatever the block
        real_BT = self.block.stored_position_BT != visibility.EMPTY
        more_BS = received.received(q_BTNH, self.block.position_BT, real_BT, segment, **attention)
        return dataclasses.replace(store, received_BS=store.received_BS + more_BS)


def _with_zeros(received_BS: jax.Array | None, slot_BT: jax.Array) -> jax.Array | None:
    """Forgets what those got whose slots are written."""
    return None if received_BS is None else slots_lib.scatter(received_BS, slot_BT, jnp.zeros(slot_BT.shape))


def _before(position_BS: jax.Array, end_B: jax.Array) -> jax.Array:
    """Returns positions with ``EMPTY`` for those that are not under ``end_B``."""
    return jnp.where(position_BS < end_B[:, None], position_BS, visibility.EMPTY)


def _share(part: segment_lib.Segment, grouping: codec_lib.Grouping, *, is_settled: bool) -> segment_lib.Segment:
    share = visibility.Share(settling=grouping.settling, is_settled=is_settled)
    return dataclasses.replace(part, share=share)


@dataclasses.dataclass(frozen=True, kw_only=True)
class UncachedLayer:
    """The view of a layer when there is no cache: a block attends to itself."""

    block: block_lib.Block

    def append(self, k_BTKH: jax.Array, v_BTKH: jax.Array) -> tuple[None, tuple[segment_lib.Segment, ...]]:
        """Returns the block as the only segment."""
        return None, (segment_lib.whole_segment(k_BTKH, v_BTKH, self.block.stored_position_BT, is_block=True),)

    def observe(
        self,
        store: LayerStore | None,
        q_BTNH: jax.Array,
        segments: Sequence[segment_lib.Segment],
        **attention: Any,
    ) -> None:
        """Has no slots that could count."""
        del store, q_BTNH, segments, attention
