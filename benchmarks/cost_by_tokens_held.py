"""The time of a decode step by the tokens held, for several capacities, codecs and layouts of the cache, in turn.

Usage::

    python benchmarks/cost_by_tokens_held.py [--config smollm2_135m] [--held 300] [--capacities 512,8192] [--rounds 9]
                                             [--kv-dtypes auto,int8] [--layouts auto,paged]

A step should cost what is held, not what is reserved. Weights are random: only times are read.
"""

import argparse
import functools
import statistics
import time

import jax
import jax.numpy as jnp
from models import abstract_model, random_params

from jdecode import config
from jdecode.cache import allocate, kv_cache


@functools.partial(jax.jit, static_argnames="model", donate_argnames="cache")
def steps(model, params, cache, num_steps):
    """Feeds ``num_steps`` tokens one by one."""

    def step(_, carry):
        token_B1, cache = carry
        logits_B1V, cache = model.apply(params, token_B1, cache)
        return jnp.argmax(logits_B1V, axis=-1).astype(jnp.int32), cache

    return jax.lax.fori_loop(0, num_steps, step, (jnp.ones((cache.batch_size, 1), jnp.int32), cache))


def main() -> None:
    """Parses arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="smollm2_135m")
    parser.add_argument("--held", type=int, default=300)
    parser.add_argument("--capacities", default="512,8192")
    parser.add_argument("--kv-dtypes", default="auto")
    parser.add_argument("--layouts", default="auto")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model, shapes = abstract_model(arguments.config, "float32")
    params = random_params(shapes)
    ways = [
        (layout, kv_dtype, int(capacity))
        for layout in arguments.layouts.split(",")
        for kv_dtype in arguments.kv_dtypes.split(",")
        for capacity in arguments.capacities.split(",")
    ]
    caches, num_steps = {}, 16
    for layout, kv_dtype, capacity in ways:
        cache = allocate.init_cache(
            model.config,
            config.CacheConfig(dtype=kv_dtype, layout=layout),
            batch_size=arguments.batch,
            capacity=capacity,
            compute_dtype="float32",
        )
        _, caches[layout, kv_dtype, capacity] = steps(model, params, cache, arguments.held)
    held_B = jnp.full(arguments.batch, arguments.held, jnp.int32)
    seconds: dict[tuple[str, str, int], list[float]] = {way: [] for way in ways}
    for _ in range(arguments.rounds):
        for way in ways:
            cache = kv_cache.truncate(caches[way], held_B)
            start = time.perf_counter()
            token_B1, caches[way] = steps(model, params, cache, num_steps)
            token_B1.block_until_ready()
            seconds[way].append((time.perf_counter() - start) / num_steps)
    medians = {way: statistics.median(times) for way, times in seconds.items()}
    for (layout, kv_dtype, capacity), median in medians.items():
        print(
            f"{arguments.held} tokens held, capacity {capacity}, {kv_dtype}, {layout}: {1e3 * median:.2f} ms a step, "
            f"{median / medians[ways[0]]:.3f} of the first"
        )


if __name__ == "__main__":
    main()
