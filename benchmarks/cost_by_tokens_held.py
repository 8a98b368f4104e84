"""The time of a decode step when few tokens are held, for a small and a large capacity, in turn.

Usage::

    python benchmarks/cost_by_tokens_held.py [--config smollm2_135m] [--held 300] [--capacities 512,8192] [--rounds 9]

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
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    model, shapes = abstract_model(arguments.config, "float32")
    params = random_params(shapes)
    capacities = [int(text) for text in arguments.capacities.split(",")]
    caches, num_steps = {}, 16
    for capacity in capacities:
        cache = allocate.init_cache(
            model.config,
            config.CacheConfig(),
            batch_size=arguments.batch,
            capacity=capacity,
            compute_dtype="float32",
        )
        _, caches[capacity] = steps(model, params, cache, arguments.held)
    held_B = jnp.full(arguments.batch, arguments.held, jnp.int32)
    seconds: dict[int, list[float]] = {capacity: [] for capacity in capacities}
    for _ in range(arguments.rounds):
        for capacity in capacities:
            cache = kv_cache.truncate(caches[capacity], held_B)
            start = time.perf_counter()
            token_B1, caches[capacity] = steps(model, params, cache, num_steps)
            token_B1.block_until_ready()
            seconds[capacity].append((time.perf_counter() - start) / num_steps)
    medians = {capacity: statistics.median(times) for capacity, times in seconds.items()}
    for capacity, median in medians.items():
        print(f"{arguments.held} tokens held, capacity {capacity}: {1e3 * median:.2f} ms a step")
    print(f"ratio {medians[capacities[-1]] / medians[capacities[0]]:.3f}")


if __name__ == "__main__":
    main()
