"""A model on a mesh computes what it computes on one device, with rings and with every slot."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.cache import allocate, kv_cache
from jdecode.models import parameter_axes, transformer
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules
from tests import tiny_models

BLOCK_LEN, LAST_SLOT_LEN = 3, 12
LENGTHS = [12, 11, 7, 3, 12, 1, 9, 12]  # of 12 slots; every ring of window 4 has wrapped


def _config(num_kv_heads: int) -> config_lib.ModelConfig:
    # Vocabulary and feed-forward divide by 8; heads do, but for 3 and 6 key heads.
    return dataclasses.replace(
        tiny_models.MIXED,
        vocab_size=32,
        hidden_size=12,
        intermediate_size=24,
        num_heads=6 if num_kv_heads % 3 == 0 else 8,
        num_kv_heads=num_kv_heads,
        head_dim=4,
        qkv_bias=True,
    )


def _place(mesh: jax.sharding.Mesh, config: config_lib.ModelConfig, params: dict[str, Any]) -> dict[str, Any]:
    axes = parameter_axes.parameter_axes(config)

    def put(path, leaf):
        names = axes["/".join(entry.key for entry in path)]
        return jax.device_put(leaf, rules.sharding(mesh, names, leaf.shape))

    return jax.tree_util.tree_map_with_path(put, params)


def _cache(config, layout: str, mesh: jax.sharding.Mesh | None, dtype: str = "auto") -> kv_cache.KVCache:
    groups: dict[str, Any] = {"group_len": 4} if dtype in config_lib.GROUPED_DTYPES else {}
    cache_config = config_lib.CacheConfig(layout=layout, slack=BLOCK_LEN - 1, dtype=dtype, **groups)
    return allocate.init_cache(
        config, cache_config, batch_size=8, capacity=LAST_SLOT_LEN, compute_dtype="float32", mesh=mesh
    )


# More devices than key/value heads, fewer, and counts that do not divide (huggingface/transformers#48307,
# NVIDIA/TensorRT-LLM#4308, pytorch/torchtitan#2577, aws-neuron/aws-neuron-sdk#1289).
CASES = [("auto", 2, 4, heads, "auto") for heads in (1, 2, 3, 4, 8)]
CASES += [("auto", *case, "auto") for case in ((1, 8, 3), (1, 8, 8), (8, 1, 2), (1, 2, 8), (1, 2, 6))]
CASES += [("full", 2, 4, 4, "auto"), ("full", 1, 8, 2, "auto")]
# The quality of a quantised cache depended on the number of devices (vllm-project/vllm#23813).
CASES += [("full", 2, 4, 4, "int4"), ("auto", 2, 4, 3, "int8_channel"), ("paged", 1, 4, 4, "int4")]
CASES += [("auto", 1, 2, 4, "int8"), ("full", 2, 2, 4, "fp8")]

STEP_ATOL = 5e-3
"""As in ``models/test_quantised_cache``: another order of sums, and a number may fall to the next of 8 bits."""


@pytest.mark.parametrize(("layout", "data", "model", "num_kv_heads", "dtype"), CASES)
def test_mesh_equals_one_device(layout, data, model, num_kv_heads, dtype):
    config = _config(num_kv_heads)
    network, params = transformer.Transformer(config), tiny_models.random_params(config)
    rows = tiny_models.random_rows(LENGTHS, config.vocab_size)
    expected, single = tiny_models.feed(network, params, rows, _cache(config, layout, None, dtype), BLOCK_LEN)

    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=data, model=model))
    placed, cache = _place(mesh, config, params), _cache(config, layout, mesh, dtype)
    got, after = tiny_models.feed(network, placed, rows, cache, BLOCK_LEN)

    atol = STEP_ATOL if dtype in ("int8", "fp8") else tiny_models.LOGITS_ATOL
    tiny_models.assert_rows_close(got, expected, atol)
    for row_got, row_expected in zip(got, expected, strict=True):
        np.testing.assert_array_equal(row_got.argmax(axis=-1), row_expected.argmax(axis=-1))
    # The cache's last slot is written as on one device, where a partitioned update was dropped (openxla/xla#49118).
    for one, other in zip(jax.tree.leaves(single), jax.tree.leaves(after), strict=True):
        if one.dtype == jnp.int16:  # the bits of a float16, which may be rounded otherwise
            one, other = (np.asarray(leaf).view(np.float16).astype(np.float32) for leaf in (one, other))
            np.testing.assert_allclose(other, one, rtol=2**-10)
            continue
        step = int(one.dtype == jnp.int8 and dtype != "int8_channel")  # the next number of fp8 has the next bits, too
        np.testing.assert_allclose(
            np.asarray(other, np.float32), np.asarray(one, np.float32), rtol=0, atol=max(step, atol)
        )
    _check_places(cache, after, placed, data=data, model=model, num_kv_heads=num_kv_heads)


def _check_places(cache, after, placed, *, data: int, model: int, num_kv_heads: int) -> None:
    """Heads are split where the mesh divides them and whole elsewhere, and the step leaves the cache where it was."""
    split = model if num_kv_heads % model == 0 else 1
    key = placed["layers_0"]["attention"]["key"]["weight"]
    assert key.sharding.shard_shape(key.shape) == (num_kv_heads // split, 4, 12)
    for held in (cache, after):
        stored = held.stores[0].keys.data_BSX
        shard = stored.sharding.shard_shape(stored.shape)
        assert (shard[0], shard[2]) == (8 // data, stored.shape[2] // split)


def test_past_capacity_nothing_is_overwritten_on_a_mesh():
    config = dataclasses.replace(_config(4), layers=tiny_models.MIXED.layers[2:])
    network, params = transformer.Transformer(config), tiny_models.random_params(config)
    mesh = mesh_lib.make_mesh(config_lib.MeshConfig(data=2, model=4))
    rows = tiny_models.random_rows(LENGTHS, config.vocab_size)
    placed, cache = _place(mesh, config, params), _cache(config, "full", mesh)
    _, cache = tiny_models.feed(network, placed, rows, cache, BLOCK_LEN)
    tokens_BT = jnp.full((8, BLOCK_LEN), 5, jnp.int32)
    _, after = tiny_models.apply(network, placed, tokens_BT, cache, jnp.full(8, BLOCK_LEN, jnp.int32))
    for old, new in zip(jax.tree.leaves(cache.stores), jax.tree.leaves(after.stores), strict=True):
        for row, length in enumerate(LENGTHS):
            np.testing.assert_array_equal(new[row, :length], old[row, :length])
            free = slice(length, min(length + BLOCK_LEN, LAST_SLOT_LEN))
            assert (np.asarray(new[row, free]) != np.asarray(old[row, free])).all()
