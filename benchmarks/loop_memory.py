"""Temporary bytes of the device loop beside the bytes of its cache, as the compiler states them.

Usage::

    python benchmarks/loop_memory.py [--config smollm2_135m] [--capacity 8192] [--batches 1,4] [--tpu v5e:2x4]

Without ``--tpu`` the loop is compiled for this machine. With it, for a TPU that need not be there: the package
``libtpu`` compiles ahead of time for a named topology. Nothing runs.
"""

import argparse
import os

import jax
import jax.numpy as jnp
import numpy as np
from models import abstract_model

from jdecode import config, sampling
from jdecode.cache import allocate
from jdecode.decode import chosen_layout, loop, state
from jdecode.sampling import standard

MEBIBYTE = 2.0**20


def abstract_state(model, batch: int, capacity: int) -> state.DecodeState:
    """Returns the shapes of a decode's state."""

    def build():
        cache = allocate.init_cache(
            model.config, config.CacheConfig(), batch_size=batch, capacity=capacity, compute_dtype=model.dtype
        )
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
            max_new_B=jnp.full(batch, 64, jnp.int32),
            output_len=64,
            num_top_logprobs=None,
        )

    return jax.eval_shape(build)


def report(name: str, batch: int, shapes: state.DecodeState, compiled: jax.stages.Compiled) -> None:
    """Prints one line."""
    memory = compiled.memory_analysis()
    cache = sum(int(np.prod(leaf.shape)) * leaf.dtype.itemsize for leaf in jax.tree.leaves(shapes.cache))
    print(
        f"{name}, batch {batch}: cache {cache / MEBIBYTE:.1f} MiB, temporaries "
        f"{memory.temp_size_in_bytes / MEBIBYTE:.1f} MiB, ratio {memory.temp_size_in_bytes / cache:.4f}",
        flush=True,
    )


def main() -> None:
    """Parses arguments, compiles and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--capacity", type=int, default=8192)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--tpu", metavar="TOPOLOGY", help="such as v5e:2x4")
    arguments = parser.parse_args()
    model, params = abstract_model(arguments.config, "bfloat16" if arguments.tpu else "float32")
    chain = sampling.standard_chain()
    for batch in [int(text) for text in arguments.batches.split(",")]:
        shapes = abstract_state(model, batch, arguments.capacity)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        if not arguments.tpu:
            jitted = jax.jit(loop.decode_steps, static_argnums=(0, 1), donate_argnums=3)
            compiled = jitted.lower(model, chain, params, shapes, steps).compile()
            report(f"{arguments.config} on this machine", batch, shapes, compiled)
            continue
        os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
        from jax.experimental import topologies

        topology = topologies.get_topology_desc(platform="tpu", topology_name=arguments.tpu)
        sharding = jax.sharding.SingleDeviceSharding(topology.devices[0])
        flat, structure = jax.tree.flatten((params, shapes, steps))
        leaves = tuple((jax.core.ShapedArray(leaf.shape, leaf.dtype), sharding) for leaf in flat)
        compiled = chosen_layout.compile_loop(loop.decode_steps, model, chain, structure, leaves)
        report(f"{arguments.config} on {arguments.tpu}", batch, shapes, compiled)


if __name__ == "__main__":
    main()
