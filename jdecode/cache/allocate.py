"""From configurations to an empty cache."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode.attention import visibility
from jdecode.cache import codec as codec_lib
from jdecode.cache import codec_plain, codec_token, compress, kv_cache, layout, layout_full, layout_ring
from jdecode.parallel import rules


def layer_layout(layer: config_lib.LayerConfig, cache_config: config_lib.CacheConfig, capacity: int) -> layout.Layout:
    """Chooses the layout of one layer: a ring where it has a window and the ring is smaller than ``capacity`` slots."""
    if cache_config.layout == "auto" and layer.window is not None:
        ring = layout_ring.RingLayout(window=layer.window, slack=cache_config.slack, num_sinks=layer.num_sinks)
        if ring.capacity < capacity:
            return ring
    return layout_full.FullLayout(capacity=capacity)


def make_codec(cache_config: config_lib.CacheConfig, compute_dtype: str) -> codec_lib.KVCodec:
    """Returns how keys and values are stored."""
    dtype = compute_dtype if cache_config.dtype == "auto" else cache_config.dtype
    if dtype in codec_token.STORED:
        token = functools.partial(codec_token.TokenCodec, name=dtype, dtype=compute_dtype)
        return codec_lib.KVCodec(keys=token(rotates=True), values=token(rotates=False))
    plain = codec_plain.PlainCodec(dtype=dtype)
    return codec_lib.KVCodec(keys=plain, values=plain)


def init_cache(
    model_config: config_lib.ModelConfig,
    cache_config: config_lib.CacheConfig,
    *,
    batch_size: int,
    capacity: int,
    compute_dtype: str,
    mesh: jax.sharding.Mesh | None = None,
    prompt_capacity: int | None = None,
) -> kv_cache.KVCache:
    """Allocates an empty cache that keeps every token.

    Args:
      batch_size: B.
      capacity: the longest text, prompt and output together, that a row must hold, in tokens.
      compute_dtype: stored dtype where ``cache_config.dtype`` is ``"auto"``.
      mesh: devices to spread it over, rows along ``data`` and heads along ``model``; ``None`` for the default one.
      prompt_capacity: slots of the layers without a window, where the cache is compressed after a prompt of so many
        tokens; ``None`` for ``capacity``.

    Raises:
      ValueError: a size is under 1, or the config evicts tokens: see ``init_compressed``.
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
    return _init(model_config, make_codec(cache_config, compute_dtype), layouts, [], batch_size, capacity, mesh)


def init_compressed(
    model_config: config_lib.ModelConfig,
    cache_config: config_lib.CacheConfig,
    *,
    batch_size: int,
    capacity: int,
    num_new: int,
    compute_dtype: str,
    mesh: jax.sharding.Mesh | None = None,
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
    counting = full if how.is_lasting else ()
    return _init(model_config, make_codec(plain, compute_dtype), layouts, counting, batch_size, capacity, mesh)


def _init(
    model_config: config_lib.ModelConfig,
    codec: codec_lib.KVCodec,
    layer_layouts: Sequence[layout.AnyLayout],
    counting: Sequence[int],
    batch_size: int,
    capacity: int,
    mesh: jax.sharding.Mesh | None,
) -> kv_cache.KVCache:
    """Allocates a cache with the given layout for each layer; those ``counting`` count the attention of their slots."""
    for name, value in (("batch_size", batch_size), ("capacity", capacity)):
        if value < 1:
            raise ValueError(f"{name}: expected a count of at least 1, got {value}")
    layouts = tuple(dict.fromkeys(layer_layouts))

    def table(shape: tuple[int, ...], filler: int, dtype: str = "int32"):
        device = None if mesh is None else rules.sharding(mesh, ("batch", None)[: len(shape)], shape)
        return jnp.full(shape, filler, dtype, device=device)

    def store(idx: int, num_slots: int) -> kv_cache.LayerStore:
        shape = (batch_size, num_slots, model_config.num_kv_heads, model_config.head_dim)
        return kv_cache.LayerStore(
            keys=codec.keys.init(*shape, mesh),
            values=codec.values.init(*shape, mesh),
            received_BS=table((batch_size, num_slots), 0, "float32") if idx in counting else None,
        )

    return kv_cache.KVCache(
        stores=tuple(store(idx, own.capacity) for idx, own in enumerate(layer_layouts)),
        positions=tuple(table((batch_size, own.capacity), int(visibility.EMPTY)) for own in layouts),
        length_B=table((batch_size,), 0),
        layouts=layouts,
        layout_idx=tuple(layouts.index(own) for own in layer_layouts),
        codec=codec,
    )
