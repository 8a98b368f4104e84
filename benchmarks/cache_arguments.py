"""The ledger's bytes of a cache beside the argument bytes that the compiler states for it, array by array.

Usage::

    python benchmarks/cache_arguments.py [--config smollm2_135m] [--batch 4] [--context 8192] [--kv-dtype bfloat16]
                                         [--layout auto] [--tpu v5e:2x4 [--mesh data=1,model=8] [--step]]

Without ``--tpu`` programs are compiled for this machine; with it, for a TPU that need not be there (see
``loop_memory.py``). Nothing is allocated and nothing runs. Bytes are those of one device. What the compiler adds is
padding: a TPU lays an array out in tiles, and the last two axes are rounded up to them.

The first program takes nothing but the cache, in the order of axes that the compiler prefers for it. ``--step``
compiles a decode step too, with the order of the donated rows left to the compiler as in ``decode/chosen_layout.py``,
and says what the cache takes then.
"""

import argparse
import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Format, Layout
from loop_memory import tpu_mesh
from models import abstract_model

from jdecode import command_line, config
from jdecode.cache import kv_cache, ledger
from jdecode.models import parameter_axes, transformer
from jdecode.parallel import mesh as mesh_lib
from jdecode.parallel import rules


def placed_cache(plan: ledger.Plan, mesh: jax.sharding.Mesh) -> kv_cache.KVCache:
    """Returns the shapes of a cache, spread over a mesh as the ledger says."""

    def place(leaf: Any) -> jax.ShapeDtypeStruct:
        spec = jax.sharding.PartitionSpec() if leaf.sharding is None else leaf.sharding.spec
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=jax.sharding.NamedSharding(mesh, spec))

    return jax.tree.map(place, ledger.abstract_cache(plan))


def argument_bytes(*arguments: Any) -> tuple[int, Any]:
    """Compiles a program with these arguments alone; returns their bytes and the formats that it takes them in."""
    compiled = jax.jit(lambda *leaves: jnp.int32(0), keep_unused=True).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes, compiled.input_formats


def step_bytes(model: transformer.Transformer, params: Any, cache: kv_cache.KVCache, mesh: jax.sharding.Mesh) -> int:
    """Compiles a decode step with the order of the rows left open; returns the argument bytes of the cache."""
    axes = parameter_axes.parameter_axes(model.config)
    replicated = rules.sharding(mesh, (), ())

    def place(path, leaf):
        own = rules.sharding(mesh, axes["/".join(entry.key for entry in path[1:])], leaf.shape)
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=own)

    params = jax.tree_util.tree_map_with_path(place, params)
    tokens_B1 = jax.ShapeDtypeStruct((cache.batch_size, 1), jnp.int32, sharding=replicated)
    stores = jax.tree.map(lambda leaf: Format(Layout.AUTO, leaf.sharding), cache.stores)
    formats = dataclasses.replace(jax.tree.map(lambda leaf: leaf.sharding, cache), stores=stores)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, tokens_B1, cache))
    own = jax.tree.map(lambda leaf: leaf.sharding, (params, tokens_B1))
    jitted = jax.jit(
        lambda params, tokens_B1, cache: model.apply(params, tokens_B1, cache)[1],
        in_shardings=(*own, formats),
        out_shardings=formats,
        donate_argnums=2,
        keep_unused=True,
    )
    memory = jitted.lower(*shapes).compile().memory_analysis()
    assert memory is not None
    return memory.argument_size_in_bytes - argument_bytes(params, tokens_B1)[0]


def report(plan: ledger.Plan, mesh: jax.sharding.Mesh) -> kv_cache.KVCache:
    """Prints the whole cache, and each kind of array."""
    cache = placed_cache(plan, mesh)
    predicted = ledger.ledger(plan).device_bytes
    stated, formats = argument_bytes(cache)
    print(f"ledger {predicted:,}, compiler {stated:,}, padding {stated - predicted:,}", flush=True)
    kinds: dict[Any, int] = {}
    for leaf, form in zip(jax.tree.leaves(cache), jax.tree.leaves(formats[0][0]), strict=True):
        kind = (leaf.sharding.shard_shape(leaf.shape), leaf, form.layout.major_to_minor, form.layout.tiling)
        kinds[kind] = kinds.get(kind, 0) + 1
    for (shape, leaf, order, tiling), count in kinds.items():
        own = ledger.leaf_bytes(jax.ShapeDtypeStruct(shape, leaf.dtype))
        padded = argument_bytes(leaf)[0]
        print(f"  {count} x {leaf.dtype}{list(shape)}: {own:,}, compiler {padded:,}; axes {order} in tiles {tiling}")
    return cache


def main() -> None:
    """Parses arguments, compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--context", type=int, default=8192)
    parser.add_argument("--kv-dtype", default="bfloat16")
    parser.add_argument("--layout", default="auto")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="such as v5e:2x4")
    parser.add_argument("--mesh", type=command_line.mesh, default=config.MeshConfig(), help="data=1,model=8")
    parser.add_argument("--step", action="store_true")
    arguments = parser.parse_args()
    model, params = abstract_model(arguments.config, "bfloat16")
    mesh = tpu_mesh(arguments.tpu, arguments.mesh) if arguments.tpu else mesh_lib.make_mesh(arguments.mesh)
    plan = ledger.Plan(
        model=model.config,
        cache=config.CacheConfig(dtype=arguments.kv_dtype, layout=arguments.layout),
        batch_size=arguments.batch,
        capacity=arguments.context,
        compute_dtype=model.dtype,
        mesh=arguments.mesh,
    )
    print(
        f"{arguments.config} on {arguments.tpu or 'this machine'}, batch {arguments.batch}, {arguments.context} tokens"
    )
    cache = report(plan, mesh)
    if arguments.step:
        tiled = ledger.ledger(plan).tiled_bytes
        print(f"a decode step: tiled ledger {tiled:,}, compiler {step_bytes(model, params, cache, mesh):,}", flush=True)


if __name__ == "__main__":
    main()
