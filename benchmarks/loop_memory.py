"""Temporary bytes of the device loop beside the bytes of its cache, as the compiler states them.

Usage::

    python benchmarks/loop_memory.py [--config smollm2_135m] [--capacity 8192] [--batches 1,4] [--kv-dtype auto]
                                     [--layout auto] [--window 1020 [--sinks 4]] [--eviction snapkv|h2o [--budget 1024]]
                                     [--tpu v5e:2x4 [--mesh data=1,model=8]]

Without ``--tpu`` the loop is compiled for this machine. With it, for a TPU that need not be there: the package
``libtpu`` compiles ahead of time for a named topology. Nothing runs. With ``--mesh`` the program is spread over the
topology's devices by the same rules as a real run; bytes are then those of one device, and the collective operations
of the whole program are counted. A cache that evicts is the one after a prompt that fills the capacity but for 64
tokens.
"""

import argparse
import collections
import dataclasses
import os
import re
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from models import abstract_model

from jdecode import command_line, config, sampling, streaming
from jdecode.cache import allocate
from jdecode.decode import chosen_layout, loop, state, step
from jdecode.models import parameter_axes
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules
from jdecode.sampling import standard

MEBIBYTE = 2.0**20

NUM_NEW = 64
"""Tokens that the loop may write."""


def abstract_state(
    model, batch: int, capacity: int, cache_config: config.CacheConfig, platform: str
) -> state.DecodeState:
    """Returns the shapes of a decode's state."""

    def build():
        sizes = {"batch_size": batch, "capacity": capacity, "compute_dtype": model.dtype, "platform": platform}
        if cache_config.eviction is None:
            cache = allocate.init_cache(model.config, cache_config, **sizes)
        else:
            cache = allocate.init_compressed(model.config, cache_config, num_new=NUM_NEW, **sizes)
        params = standard.params_from_configs(
            [config.SamplingConfig()] * batch,
            vocab_size=model.config.vocab_size,
            prompts=[[1]] * batch,
            history_len=capacity,
            stop_ids=[[1]] * batch,
        )
        return state.init_state(
            cache,
            sampler=sampling.standard_chain().init(params, batch, model.config.vocab_size),
            key_B=sampling.request_keys([0] * batch, [0] * batch),
            temperature_B=params.temperature_B,
            stop_ids_BX=jnp.full((batch, 8), state.NO_STOP_ID, jnp.int32),
            max_new_B=jnp.full(batch, NUM_NEW, jnp.int32),
            output_len=NUM_NEW,
            num_top_logprobs=None,
        )

    return jax.eval_shape(build)


def tpu_mesh(topology_name: str, mesh_config: config.MeshConfig) -> jax.sharding.Mesh:
    """Returns a mesh of devices that are described, not there."""
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    from jax.experimental import topologies

    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology_name).devices
    grid = np.asarray(devices[: mesh_config.data * mesh_config.model]).reshape(mesh_config.data, mesh_config.model)
    return jax.sharding.Mesh(grid, mesh_lib.AXES)


def shardings(model, mesh: jax.sharding.Mesh, arguments):
    """Returns how the loop's arguments (params, state, steps) are split on a mesh."""
    params, shapes, steps = arguments
    axes, batch = parameter_axes.parameter_axes(model.config), shapes.token_B.shape[0]

    def of_parameter(path, leaf):
        return rules.sharding(mesh, axes["/".join(entry.key for entry in path[1:])], leaf.shape)

    def of_state(path, leaf):
        name = jax.tree_util.keystr(path)
        if re.search("_B[SU]X$", name):
            return rules.sharding(mesh, ("batch", None, "kv_heads"), (*leaf.shape[:2], model.config.num_kv_heads))
        if re.search("_B[KX]S$", name):
            sizes = (leaf.shape[0], model.config.num_kv_heads, leaf.shape[2])
            return rules.sharding(mesh, ("batch", "kv_heads", None), sizes)
        names = ("batch", *[None] * leaf.ndim)[: leaf.ndim] if leaf.shape[:1] == (batch,) else (None,) * leaf.ndim
        return rules.sharding(mesh, names, leaf.shape)

    return (
        jax.tree_util.tree_map_with_path(of_parameter, params),
        jax.tree_util.tree_map_with_path(of_state, shapes),
        rules.sharding(mesh, (), steps.shape),
    )


def report(name: str, batch: int, shapes: state.DecodeState, compiled: jax.stages.Compiled, num_devices: int) -> None:
    """Prints one line, and one of collective operations where there are several devices."""
    memory, program = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and program is not None
    cache = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.cache)) / num_devices
    print(
        f"{name}, batch {batch}: cache {cache / MEBIBYTE:.1f} MiB, temporaries "
        f"{memory.temp_size_in_bytes / MEBIBYTE:.1f} MiB, ratio {memory.temp_size_in_bytes / cache:.4f}",
        flush=True,
    )
    if num_devices > 1:
        found = re.findall(r" = \S+ (all-reduce|all-gather|all-to-all|collective-permute)", program)
        print("  ", ", ".join(f"{count} {kind}" for kind, count in collections.Counter(found).items()), flush=True)


def main() -> None:
    """Parses arguments, compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--window", type=int, help="of every layer without one")
    parser.add_argument("--sinks", type=int, default=4, help="beside --window")
    parser.add_argument("--eviction", choices=config.EVICTIONS)
    parser.add_argument("--budget", type=int, default=1024, help="beside --eviction")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="such as v5e:2x4")
    parser.add_argument("--mesh", type=command_line.mesh, default=config.MeshConfig(), help="data=1,model=8")
    arguments = parser.parse_args()
    model, params = abstract_model(arguments.config, "bfloat16" if arguments.tpu else "float32")
    platform = "tpu" if arguments.tpu else jax.default_backend()
    if arguments.window is not None:
        asked = config.StreamingConfig(window=arguments.window, num_sinks=arguments.sinks)
        model = dataclasses.replace(model, config=streaming.with_window(model.config, asked))
    evicting: dict[str, Any] = {}
    if arguments.eviction is not None:
        evicting = {"eviction": arguments.eviction, "budget": arguments.budget}
    cache_config = config.CacheConfig(dtype=arguments.kv_dtype, layout=arguments.layout, **evicting)
    plain = step.PlainStep(model, sampling.standard_chain())
    for batch in [int(text) for text in arguments.batches.split(",")]:
        shapes = abstract_state(model, batch, arguments.capacity, cache_config, platform)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        if not arguments.tpu:
            jitted = jax.jit(loop.decode_steps, static_argnums=0, donate_argnums=2)
            compiled = jitted.lower(plain, params, shapes, steps).compile()
            report(f"{arguments.config} on this machine", batch, shapes, compiled, 1)
            continue
        mesh = tpu_mesh(arguments.tpu, arguments.mesh)
        flat, structure = jax.tree.flatten((params, shapes, steps))
        split = jax.tree.leaves(shardings(model, mesh, (params, shapes, steps)))
        avals = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in flat]
        leaves = tuple(zip(avals, split, strict=True))
        compiled = chosen_layout.compile_loop(loop.decode_steps, cast(Any, plain), structure, leaves)
        report(f"{arguments.config} on {arguments.tpu}", batch, shapes, compiled, mesh.size)


if __name__ == "__main__":
    main()
