"""Bytes of parameters by configuration, beside parameters that are really there."""

import dataclasses

import jax
import pytest

from jdecode import config as config_lib
from jdecode import config_file
from jdecode.models import parameter_axes, weight_bytes
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules
from tests import tiny_models

ALONE = config_lib.MeshConfig()


# What their publisher states: https://huggingface.co/meta-llama/Meta-Llama-3-8B, and of 70B.
@pytest.mark.parametrize(("name", "count"), [("llama3_8b", 8_030_261_248), ("llama3_70b", 70_553_706_496)])
def test_parameters_of_llama_3(name, count):
    model = config_file.load(name).architecture
    assert weight_bytes.weights(model, "bfloat16", ALONE) == weight_bytes.Weights(
        num_parameters=count, num_bytes=2 * count, device_bytes=2 * count
    )
    assert weight_bytes.weights(model, "float32", ALONE).num_bytes == 4 * count


@pytest.mark.parametrize(("data", "model"), [(1, 1), (2, 4), (1, 8), (8, 1)])
def test_equals_what_a_device_holds(data, model):
    # 12 heads divide by 4 and not by 8, 3 key/value heads by neither, V=40 and F=24 by both.
    config = dataclasses.replace(
        tiny_models.MIXED,
        vocab_size=40,
        intermediate_size=24,
        num_heads=12,
        num_kv_heads=3,
        qkv_bias=True,
        output_bias=True,
        feed_forward_bias=True,
        qk_norm=True,
        post_norms=True,
    )
    mesh_config = config_lib.MeshConfig(data=data, model=model)
    mesh, axes = mesh_lib.make_mesh(mesh_config), parameter_axes.parameter_axes(config)

    def put(path, leaf):
        return jax.device_put(leaf, rules.sharding(mesh, axes["/".join(entry.key for entry in path)], leaf.shape))

    params = jax.tree_util.tree_map_with_path(put, tiny_models.random_params(config))
    leaves = jax.tree.leaves(params)
    own = weight_bytes.weights(config, "float32", mesh_config)
    assert own.num_parameters == sum(leaf.size for leaf in leaves)
    assert own.num_bytes == sum(leaf.nbytes for leaf in leaves)
    assert own.device_bytes == sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves)
    assert (own.device_bytes < own.num_bytes) == (model > 1)
