"""What attention has to do with a cache: operations, and bytes of keys and values read, by formula.

A query at position q sees ``min(q + 1, W)`` positions of a layer with a window of W (all ``q + 1`` without one), and
the sinks before them. With each it makes a product of width H for the score and one for the sum, for each of N query
heads: ``4 · N · H`` operations. So a decode step is linear in the context and a prefill is quadratic; in layers with a
window they are constant and linear.

Bytes are those of the slots that hold something a query may see, read once a step, or once a chunk of a prefill. What
is left out: the rest of a block of 256 slots, the softmax, products with weights, and the second look at the keys of a
layer that counts the attention of its slots (``attention.received``).
"""

import collections
import dataclasses

import numpy as np

from jdecode import config as config_lib
from jdecode.cache import kv_cache, layout
from jdecode.cache import ledger as ledger_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """Attention's work on all rows and layers.

    Attributes:
      operations: multiplications and additions that a mask leaves.
      read_bytes: of keys and values.
    """

    operations: int
    read_bytes: int


def decode_step(plan: ledger_lib.Plan) -> Work:
    """Counts one step that fills the cache: each row sees ``plan.capacity`` positions, its own among them."""
    return _work(plan, np.asarray([plan.capacity - 1, plan.capacity]))


def prefill(plan: ledger_lib.Plan, chunk_len: int, num_held: int = 0) -> Work:
    """Counts a prefill of ``plan.capacity`` tokens a row, in chunks of ``chunk_len``.

    Nothing is evicted before its end.

    Args:
      num_held: how many of them each row holds already.
    """
    plan = dataclasses.replace(plan, cache=plan.cache.without_eviction())
    return _work(plan, np.append(np.arange(num_held, plan.capacity, chunk_len), plan.capacity))


def _work(plan: ledger_lib.Plan, bounds_X: np.ndarray) -> Work:
    """Counts blocks that follow on each other; a block is the positions from one of ``bounds_X`` to the next."""
    bounds_X = bounds_X.astype(np.int64)
    cache = ledger_lib.abstract_cache(plan)
    like = [dataclasses.replace(layer, rope=None) for layer in plan.model.layers]
    kinds = collections.Counter(zip(like, cache.layout_idx, strict=True))
    first, end = int(bounds_X[0]), int(bounds_X[-1])
    pairs = slot_bytes = 0
    for (layer, layout_idx), count in kinds.items():
        own_pairs = _pairs(layer, end) - _pairs(layer, first)
        if isinstance(cache.layouts[layout_idx], layout.PlacingLayout):
            own_pairs = min(own_pairs, (end - first) * cache.layouts[layout_idx].capacity)
        pairs += count * own_pairs
        slots = int(_slots_read(cache.layouts[layout_idx], layer, _settled(cache, bounds_X)).sum())
        row_bytes = ledger_lib.layer_row_bytes(cache, cache.layout_idx.index(layout_idx))
        slot_bytes += count * row_bytes * slots // cache.layouts[layout_idx].capacity
        slot_bytes += count * _recent_bytes(plan, cache, bounds_X)
    operations = plan.batch_size * 4 * plan.model.num_heads * plan.model.head_dim * pairs
    return Work(operations=operations, read_bytes=plan.batch_size * slot_bytes)


def _pairs(layer: config_lib.LayerConfig, length: int) -> int:
    """Returns how many pairs of a query and a key that it sees a text of ``length`` tokens has."""
    if layer.window is None:
        return _bounded_sum(length, length)
    outside = max(length - layer.window, 0)  # queries that do not see the whole text: the i-th misses i positions
    return _bounded_sum(length, layer.window) + _bounded_sum(outside, layer.num_sinks)


def _bounded_sum(count: int, bound: int) -> int:
    """Returns ``min(1, bound) + min(2, bound) + ... + min(count, bound)``."""
    rising = min(count, bound)
    return rising * (rising + 1) // 2 + (count - rising) * bound


def _slots_read(own: layout.AnyLayout, layer: config_lib.LayerConfig, bounds_X: np.ndarray) -> np.ndarray:
    """Returns the slots that each block reads of one layer and row, the block's own among them."""
    start, held = bounds_X[:-1], bounds_X[1:]
    if own.max_len is None:
        return _slots_used_again(own, bounds_X)
    if layer.window is None or layer.num_sinks:
        return held
    return held - np.maximum(start - (layer.window - 1), 0)


def _slots_used_again(own: layout.AnyLayout, bounds_X: np.ndarray) -> np.ndarray:
    """Returns the same of a layout without a last position."""
    start, held = bounds_X[:-1], bounds_X[1:]
    block_len = held - start
    beside = np.minimum(start, own.capacity) + block_len  # the old slots, and the block
    return np.where(block_len <= own.max_block_len, np.minimum(held, own.capacity), beside)


def _settled(cache: kv_cache.KVCache, bounds_X: np.ndarray) -> np.ndarray:
    """Returns bounds of blocks as the slots of a codec by groups see them: how many positions are settled there."""
    grouping = cache.codec.grouping
    if grouping is None:
        return bounds_X
    group_len, lag = grouping.settling.group_len, grouping.settling.lag
    return np.maximum(bounds_X - lag, 0) // group_len * group_len


def _recent_bytes(plan: ledger_lib.Plan, cache: kv_cache.KVCache, bounds_X: np.ndarray) -> int:
    """Returns the bytes that blocks read of one layer's and row's latest tokens, their own among them."""
    grouping = cache.codec.grouping
    if grouping is None:
        return 0
    slots = int(_slots_used_again(grouping.layout, bounds_X).sum())
    number_bytes = ledger_lib.number_bits(plan.compute_dtype) // 8
    return 2 * slots * plan.model.num_kv_heads * plan.model.head_dim * number_bytes
