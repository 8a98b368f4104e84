"""From configurations to an empty cache."""

import functools
from collections.abc import Sequence

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
    compress,
    grouped,
    kv_cache,
    layout,
    layout_full,
    layout_paged,
    layout_ring,
)
from jdecode.parallel import rules

PAGE_LEN = 64
"""Tokens a page unless told otherwise, or unless a group has more or fewer.

Attention reads 256 slots at a time: a divisor of it reads whole pages.
"""


def layer_layout(layer: config_lib.LayerConfig, cache_config: config_lib.CacheConfig, capacity: int) -> layout.Layout:
    """Chooses the layout of one layer: a ring where it has a window and the ring is smaller than ``capacity`` slots.

    For a codec by groups, slots and pages are whole groups, and no group has slots on both sides of a ring's end.
    """
    is_grouped = cache_config.dtype in config_lib.GROUPED_DTYPES
    unit = cache_config.group_len if is_grouped else 1
    capacity = shapes.round_up(capacity, unit)
    if cache_config.layout != "full" and layer.window is not None:
        ring_len = shapes.round_up(layer.window + cache_config.slack, unit)
        num_sinks = shapes.round_up(layer.num_sinks, unit)
        ring = layout_ring.RingLayout(window=layer.window, slack=ring_len - layer.window, num_sinks=num_sinks)
        if ring.capacity < capacity:
            return ring
    if cache_config.layout == "paged":
        page_len = cache_config.page_len or (unit if is_grouped else PAGE_LEN)
        return layout_paged.PagedLayout(capacity=shapes.round_up(capacity, page_len), page_len=page_len)
    return layout_full.FullLayout(capacity=capacity)


def make_codec(
    cache_config: config_lib.CacheConfig, compute_dtype: str, platform: str | None = None
) -> codec_lib.KVCodec:
    """Returns how keys and values are stored on a platform (``"cpu"``, ``"tpu"``, ``"gpu"``; ``None``: the default)."""
    dtype = compute_dtype if cache_config.dtype == "auto" else cache_config.dtype
    if dtype in codec_token.STORED:
        token = functools.partial(codec_token.TokenCodec, name=dtype, dtype=compute_dtype)
        return codec_lib.KVCodec(keys=token(rotates=True), values=token(rotates=False))
    plain = functools.partial(codec_plain.PlainCodec, holds_bits=(platform or jax.default_backend()) == "cpu")
    if dtype in config_lib.GROUPED_DTYPES:
        name = "int4" if dtype == "int4" else "int8"
        token = codec_token.TokenCodec(name="int8", rotates=False, dtype=compute_dtype)
        return codec_lib.KVCodec(
            keys=codec_channel.ChannelCodec(name=name, group_len=cache_config.group_len, dtype=compute_dtype),
            values=codec_int4.Int4Codec(dtype=compute_dtype) if dtype == "int4" else token,
            grouping=_grouping(cache_config, plain(dtype=compute_dtype)),
        )
    return codec_lib.KVCodec(keys=plain(dtype=dtype), values=plain(dtype=dtype))


def _grouping(cache_config: config_lib.CacheConfig, exact: codec_lib.RowCodec) -> codec_lib.Grouping:
    assert cache_config.group_lag is not None
    settling = visibility.Settling(group_len=cache_config.group_len, lag=cache_config.group_lag)
    return codec_lib.Grouping(
        settling=settling,
        layout=grouped.exact_layout(settling, cache_config.slack),
        exact=codec_lib.KVCodec(keys=exact, values=exact),
    )


def init_cache(
    model_config: config_lib.ModelConfig,
    cache_config: config_lib.CacheConfig,
    *,
    batch_size: int,
    capacity: int,
    compute_dtype: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
    num_pages: int | None = None,
    prompt_capacity: int | None = None,
) -> kv_cache.KVCache:
    """Allocates an empty cache that keeps every token.

    Args:
      batch_size: B.
      capacity: the longest text, prompt and output together, that a row must hold, in tokens.
      compute_dtype: stored dtype where ``cache_config.dtype`` is ``"auto"``.
      mesh: devices to spread it over, rows along ``data`` and heads along ``model``; ``None`` for the default one.
      platform: on which programs with the cache will run; ``None`` for the default one.
      num_pages: P, of the pools of layers with pages. Their columns have no page then: ``cache_rows.with_pages`` gives
        them one before it is written. ``None`` gives every column its own.
      prompt_capacity: slots of the layers without a window, where the cache is compressed after a prompt of so many
        tokens; ``None`` for ``capacity``.

    Raises:
      ValueError: a size is under 1; ``num_pages`` where no layer has pages; pages on a mesh that splits rows; or the
        config evicts tokens: see ``init_compressed``.
    """
    if cache_config.eviction is not None:
        raise ValueError(
            f"cache eviction: expected none (a cache is compressed after its prompt), got {cache_config.eviction}; "
            "use lm.generate, or leave the eviction out"
        )
    full = capacity if prompt_capacity is None else prompt_capacity
    layouts = [
        layer_layout(layer, cache_config, full if layer.window is None else capacity) for layer in model_config.layers
    ]
    codec = make_codec(cache_config, compute_dtype, platform)
    return _init(model_config, codec, layouts, batch_size=batch_size, capacity=capacity, mesh=mesh, num_pages=num_pages)


def init_compressed(
    model_config: config_lib.ModelConfig,
    cache_config: config_lib.CacheConfig,
    *,
    batch_size: int,
    capacity: int,
    num_new: int,
    compute_dtype: str,
    mesh: jax.sharding.Mesh | None = None,
    platform: str | None = None,
) -> kv_cache.KVCache:
    """Allocates an empty cache of the form that ``compress.compress`` gives.

    With ``h2o`` it may be fed in blocks of up to the budget. With ``snapkv`` it can be filled by compression alone.

    Args:
      capacity: the longest text, for layers with a window.
      num_new: the most tokens that come after a prompt.
      The others are those of ``init_cache``.

    Raises:
      ValueError: a size is under 1, or the config evicts nothing.
    """
    how = compress.compression(cache_config, num_new)
    if how is None:
        raise ValueError("cache eviction: expected snapkv or h2o, got none; use init_cache")
    if how.num_new is not None and how.num_new < 1:
        raise ValueError(f"num_new: expected a count of at least 1, got {how.num_new}")
    plain, full = cache_config.without_eviction(), compress.full_layers(model_config)
    layouts = [
        how.layout(idx) if idx in full else layer_layout(layer, plain, capacity)
        for idx, layer in enumerate(model_config.layers)
    ]
    codec = make_codec(plain, compute_dtype, platform)
    counting = full if how.is_lasting else ()
    return _init(model_config, codec, layouts, batch_size=batch_size, capacity=capacity, mesh=mesh, counting=counting)


def _init(
    model_config: config_lib.ModelConfig,
    codec: codec_lib.KVCodec,
    layer_layouts: Sequence[layout.AnyLayout],
    *,
    batch_size: int,
    capacity: int,
    mesh: jax.sharding.Mesh | None,
    num_pages: int | None = None,
    counting: Sequence[int] = (),
) -> kv_cache.KVCache:
    """Allocates a cache with the given layout for each layer; those ``counting`` count the attention of their slots."""
    for name, value in (("batch_size", batch_size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}: expected a count of at least 1, got {value}")
    own_layouts = [] if codec.grouping is None else [codec.grouping.layout]
    layouts = tuple(dict.fromkeys([*layer_layouts, *own_layouts]))
    paged = next((own for own in layouts if isinstance(own, layout_paged.PagedLayout)), None)
    _check_pages(paged, num_pages, mesh)

    def table(shape: tuple[int, ...], filler: int, dtype: str = "int32"):
        device = None if mesh is None else rules.sharding(mesh, ("batch", None)[: len(shape)], shape)
        return jnp.full(shape, filler, dtype, device=device)

    def store(own: layout.AnyLayout, codec: codec_lib.KVCodec, is_counting: bool = False) -> kv_cache.LayerStore:
        B, S, grouping = batch_size, own.capacity, codec.grouping
        heads = (model_config.num_kv_heads, model_config.head_dim)
        if isinstance(own, layout_paged.PagedLayout):
            B, S = num_pages or batch_size * own.num_columns, own.page_len
        return kv_cache.LayerStore(
            keys=codec.keys.init(B, S, *heads, mesh),
            values=codec.values.init(B, S, *heads, mesh),
            received_BS=table((B, S), 0, "float32") if is_counting else None,
            recent=None if grouping is None else store(grouping.layout, grouping.exact),
        )

    pages_BC = shared_B = None
    if paged is not None:
        pages_BC, shared_B = table((batch_size, paged.num_columns), num_pages or 0), table((batch_size,), 0)
        if num_pages is None:
            pages_BC = pages_BC + jnp.arange(pages_BC.size).reshape(pages_BC.shape)
    return kv_cache.KVCache(
        stores=tuple(store(own, codec, idx in counting) for idx, own in enumerate(layer_layouts)),
        positions=tuple(table((batch_size, own.capacity), int(visibility.EMPTY)) for own in layouts),
        length_B=table((batch_size,), 0),
        pages_BC=pages_BC,
        shared_B=shared_B,
        layouts=layouts,
        layout_idx=tuple(layouts.index(own) for own in layer_layouts),
        codec=codec,
    )


def _check_pages(paged: layout_paged.PagedLayout | None, num_pages: int | None, mesh: jax.sharding.Mesh | None) -> None:
    if paged is None:
        if num_pages is not None:
            raise ValueError(f"num_pages: expected none (no layer has pages), got {num_pages}; use the layout paged")
        return
    if num_pages is not None and num_pages < 1:
        raise ValueError(f"num_pages: expected a count of at least 1, got {num_pages}")
    if mesh is not None and mesh.shape["data"] > 1:
        raise ValueError(
            f"cache layout paged: expected a mesh with data=1 (a page may belong to any row), got data="
            f"{mesh.shape['data']}; use model, or another layout"
        )
