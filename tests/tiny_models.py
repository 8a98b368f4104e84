"""Tiny random models, and the few jitted calls that the tests of model and cache share."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode.cache import allocate, kv_cache
from jdecode.models import parameter_shapes, transformer

WINDOW = 4

# A ring, a ring with sinks, and every slot: each with its own rope, so that a layer that takes another's shows.
MIXED = config_lib.ModelConfig(
    vocab_size=29,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layers=(
        config_lib.LayerConfig(window=WINDOW, rope=config_lib.RopeConfig(theta=100.0)),
        config_lib.LayerConfig(window=WINDOW, num_sinks=2, rope=config_lib.RopeConfig(theta=700.0)),
        config_lib.LayerConfig(rope=config_lib.RopeConfig(theta=10_000.0)),
    ),
)
CAPACITY = 32
GROUP_LEN = 4

LOGITS_ATOL = 5e-5
"""Two orders of summation of one float32 model of this size: logits of about 5, some ten layers of sums, 6e-8 a
rounding. Leaving out or adding one key moves some logit by more than 1e-2 (``test_one_key_matters``)."""


def random_params(config: config_lib.ModelConfig, seed: int = 1) -> dict[str, Any]:
    """Draws parameters of which each one matters: biases and norm scales are no constants either."""
    rng = np.random.default_rng(seed)
    tree: dict[str, Any] = {}
    for path, shape in parameter_shapes.parameter_shapes(config).items():
        array = rng.normal(size=shape)
        if path.endswith("/scale"):
            array = 1 + 0.3 * array - config.norm_offset
        elif path.endswith("/bias"):
            array = 0.3 * array
        elif path != "embedding/weight":
            fan_in = math.prod(shape[1:]) if path.endswith("output/weight") else shape[-1]
            array = 1.5 * array / math.sqrt(fan_in)
        *parents, name = path.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jnp.asarray(array, jnp.float32)
    return tree


def random_rows(lengths: Sequence[int], vocab_size: int = MIXED.vocab_size, seed: int = 2) -> list[list[int]]:
    """Draws ragged rows of ids, none of them 0."""
    rng = np.random.default_rng(seed)
    return [rng.integers(1, vocab_size, size=length).tolist() for length in lengths]


def group_options(dtype: str) -> dict[str, Any]:
    """Returns what a config of a cache says of groups, where its dtype has them."""
    return {"group_len": GROUP_LEN} if dtype in config_lib.GROUPED_DTYPES else {}


def poison(leaf: jax.Array, value: jax.Array | float) -> jax.Array:
    """Returns what a wrong read of an array of stored rows would show: ``value`` in scales and floats, or a code."""
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return jnp.asarray(value, leaf.dtype)
    if leaf.dtype == jnp.int16:  # the bits of a float16, see ``codec_int4``
        return jax.lax.bitcast_convert_type(jnp.asarray(value, jnp.float16), jnp.int16)
    if leaf.dtype == jnp.uint16:  # of a float16 or a bfloat16: NaN as either; or 2**13 as the one, 2**97 as the other
        return jnp.where(jnp.isnan(value), 0x7FFF, 0x7000).astype(jnp.uint16)
    return jnp.asarray(99, leaf.dtype)


def empty_cache(
    config: config_lib.ModelConfig,
    batch_size: int,
    *,
    slack: int = 0,
    layout: str = "auto",
    capacity: int = CAPACITY,
    dtype: str = "float32",
) -> kv_cache.KVCache:
    """Allocates a cache on one device; groups, where the dtype has them, are of ``GROUP_LEN``."""
    cache_config = config_lib.CacheConfig(layout=layout, slack=slack, dtype=dtype, **group_options(dtype))
    return allocate.init_cache(config, cache_config, batch_size=batch_size, capacity=capacity, compute_dtype="float32")


@functools.partial(jax.jit, static_argnames=("model", "last_only"))
def apply(
    model: transformer.Transformer,
    params: Any,
    tokens_BT: jax.Array,
    cache: kv_cache.KVCache | None,
    num_tokens_B: jax.Array | None = None,
    *,
    last_only: bool = False,
) -> tuple[jax.Array, Any]:
    """Calls the model."""
    return model.apply({"params": params}, tokens_BT, cache, num_tokens_B=num_tokens_B, last_only=last_only)


def padded(rows: Sequence[Sequence[int]], width: int, padding: int = 0) -> tuple[jax.Array, jax.Array]:
    """Packs ragged rows: int32 (B, width), ``padding`` at their ends, and their lengths."""
    tokens_BT = np.full((len(rows), width), padding, np.int32)
    for idx, row in enumerate(rows):
        tokens_BT[idx, : len(row)] = row
    return jnp.asarray(tokens_BT), jnp.asarray([len(row) for row in rows], jnp.int32)


def unpadded(logits_BTV: jax.Array, rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Cuts logits back to the lengths of the rows: (len(row), V) each."""
    host_BTV = np.asarray(logits_BTV)
    return [host_BTV[idx, : len(row)] for idx, row in enumerate(rows)]


def whole(
    model: transformer.Transformer, params: Any, rows: Sequence[Sequence[int]], width: int, padding: int = 0
) -> list[np.ndarray]:
    """Runs rows without a cache; returns the logits (len(row), V) of each row."""
    tokens_BT, num_tokens_B = padded(rows, width, padding)
    logits_BTV, _ = apply(model, params, tokens_BT, None, num_tokens_B)
    return unpadded(logits_BTV, rows)


def feed(
    model: transformer.Transformer,
    params: Any,
    rows: Sequence[Sequence[int]],
    cache: kv_cache.KVCache,
    chunk_len: int,
    padding: int = 0,
) -> tuple[list[np.ndarray], kv_cache.KVCache]:
    """Runs rows through a cache in chunks; returns the logits (len(row), V) of each row and the cache after them."""
    logits: list[list[np.ndarray]] = [[np.zeros((0, model.config.vocab_size), np.float32)] for _ in rows]
    for start in range(0, max(len(row) for row in rows), chunk_len):
        parts = [row[start : start + chunk_len] for row in rows]
        tokens_BT, num_tokens_B = padded(parts, chunk_len, padding)
        logits_BTV, cache = apply(model, params, tokens_BT, cache, num_tokens_B)
        for row, new in zip(logits, unpadded(logits_BTV, parts), strict=True):
            row.append(new)
    return [np.concatenate(row) for row in logits], cache


def assert_rows_close(got: Sequence[np.ndarray], expected: Sequence[np.ndarray], atol: float = LOGITS_ATOL) -> None:
    """Compares the logits of rows."""
    for row_got, row_expected in zip(got, expected, strict=True):
        np.testing.assert_allclose(row_got, row_expected, rtol=0, atol=atol)


def fill_unused(
    cache: kv_cache.KVCache, value: float, *, is_unused, layers: Sequence[int] | None = None
) -> kv_cache.KVCache:
    """Overwrites the keys and values of the slots that ``is_unused(position_BS, length_B1)`` (numpy) picks.

    Scales of a group of slots are overwritten where all of its slots are. The latest tokens beside groups stay.

    Args:
      layers: of which; ``None`` for all.
    """

    def fill(rows, unused_BS):
        leaves, structure = jax.tree.flatten(rows)
        for idx, (array, axis) in enumerate(zip(leaves, rows.slot_axes, strict=True)):
            unused_BE = unused_BS.reshape(len(unused_BS), array.shape[axis], -1).all(axis=2)
            leaves[idx] = jnp.where(jnp.expand_dims(unused_BE, 3 - axis), poison(array, value), array)
        return structure.unflatten(leaves)

    stores = list(cache.stores)
    for idx in range(len(stores)) if layers is None else layers:
        position_BS, length_B1 = np.asarray(cache.positions[cache.layout_idx[idx]]), np.asarray(cache.length_B)[:, None]
        unused_BS = jnp.asarray(is_unused(position_BS, length_B1))
        changed = {"keys": fill(stores[idx].keys, unused_BS), "values": fill(stores[idx].values, unused_BS)}
        stores[idx] = dataclasses.replace(stores[idx], **changed)
    return dataclasses.replace(cache, stores=tuple(stores))
