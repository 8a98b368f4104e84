"""From configurations to an empty cache."""

import functools

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.attention import visibility
from jdecode.cache import codec as codec_lib
from jdecode.cache import (
    codec_channel,
    codec_int4,
    codec_plain,
    codec_token,
    grouped,
    kv_cache,
    layout,
    layout_full,
    layout_ring,
)
from jdecode.parallel import rules


def layer_layout(layer: config_lib.LayerConfig, cache_config: config_lib.CacheConfig, capacity: int) -> layout.Layout:
    """Chooses the layout of one layer: a ring where it has a window and the ring is smaller than ``capacity`` slots.

    For a codec by groups, slots are whole groups, and no group has slots on both sides of a ring's end.
    """
    unit = cache_config.group_len if cache_config.dtype in config_lib.GROUPED_DTYPES else 1
    capacity = shapes.round_up(capacity, unit)
    if cache_config.layout == "auto" and layer.window is not None:
        ring_len = shapes.round_up(layer.window + cache_config.slack, unit)
        num_sinks = shapes.round_up(layer.num_sinks, unit)
        ring = layout_ring.RingLayout(window=layer.window, slack=ring_len - layer.window, num_sinks=num_sinks)
        if ring.capacity < capacity:
            return ring
    return layout_full.FullLayout(capacity=capacity)


def make_codec(cache_config: config_lib.CacheConfig, compute_dtype: str) -> codec_lib.KVCodec:
    """Returns how keys and values are stored."""
    dtype = compute_dtype if cache_config.dtype == "auto" else cache_config.dtype
    if dtype in codec_token.STORED:
        token = functools.partial(codec_token.TokenCodec, name=dtype, dtype=compute_dtype)
        return codec_lib.KVCodec(keys=token(rotates=True), values=token(rotates=False))
    if dtype in config_lib.GROUPED_DTYPES:
        name = "int4" if dtype == "int4" else "int8"
        token = codec_token.TokenCodec(name="int8", rotates=False, dtype=compute_dtype)
        return codec_lib.KVCodec(
            keys=codec_channel.ChannelCodec(name=name, group_len=cache_config.group_len, dtype=compute_dtype),
            values=codec_int4.Int4Codec(dtype=compute_dtype) if dtype == "int4" else token,
            grouping=_grouping(cache_config, compute_dtype),
        )
    plain = codec_plain.PlainCodec(dtype=dtype)
    return codec_lib.KVCodec(keys=plain, values=plain)


def _grouping(cache_config: config_lib.CacheConfig, compute_dtype: str) -> codec_lib.Grouping:
    # The latest quarter of a group stays exact: those tokens weigh most. So does what can be taken back. Not the sum of
    # the two: a text with a draft, which needs slack, would not be that without.
    lag = max(cache_config.group_len // 4, cache_config.slack + 1)
    settling = visibility.Settling(group_len=cache_config.group_len, lag=lag)
    plain = codec_plain.PlainCodec(dtype=compute_dtype)
    return codec_lib.Grouping(
        settling=settling,
        layout=grouped.exact_layout(settling, cache_config.slack),
        exact=codec_lib.KVCodec(keys=plain, values=plain),
    )


def init_cache(
    model_config: config_lib.ModelConfig,
    cache_config: config_lib.CacheConfig,
    *,
    batch_size: int,
    capacity: int,
    compute_dtype: str,
    mesh: jax.sharding.Mesh | None = None,
) -> kv_cache.KVCache:
    """Allocates an empty cache.

    Args:
      batch_size: B.
      capacity: the longest text, prompt and output together, that a row must hold, in tokens.
      compute_dtype: stored dtype where ``cache_config.dtype`` is ``"auto"``.
      mesh: devices to spread it over, rows along ``data`` and heads along ``model``; ``None`` for the default one.

    Raises:
      ValueError: ``batch_size`` or ``capacity`` is under 1.
    """
    for name, value in (("batch_size", batch_size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}: expected a count of at least 1, got {value}")
    codec = make_codec(cache_config, compute_dtype)
    layer_layouts = [layer_layout(layer, cache_config, capacity) for layer in model_config.layers]
    own_layouts = [] if codec.grouping is None else [codec.grouping.layout]
    layouts = tuple(dict.fromkeys([*layer_layouts, *own_layouts]))

    def store(num_slots: int, codec: codec_lib.KVCodec = codec) -> kv_cache.LayerStore:
        shape, grouping = (batch_size, num_slots, model_config.num_kv_heads, model_config.head_dim), codec.grouping
        return kv_cache.LayerStore(
            keys=codec.keys.init(*shape, mesh),
            values=codec.values.init(*shape, mesh),
            recent=None if grouping is None else store(grouping.layout.capacity, grouping.exact),
        )

    def table(shape: tuple[int, ...], filler: int):
        device = None if mesh is None else rules.sharding(mesh, ("batch", None)[: len(shape)], shape)
        return jnp.full(shape, filler, jnp.int32, device=device)

    return kv_cache.KVCache(
        stores=tuple(store(own.capacity) for own in layer_layouts),
        positions=tuple(table((batch_size, own.capacity), int(visibility.EMPTY)) for own in layouts),
        length_B=table((batch_size,), 0),
        layouts=layouts,
        layout_idx=tuple(layouts.index(own) for own in layer_layouts),
        codec=codec,
    )
