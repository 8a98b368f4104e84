"""The device loop with the memory layout of the cache left to the compiler.

A TPU lays arrays out in tiles, and the order of axes that a program wants of its cache depends on B, K and H. With
the default order a whole copy of the cache can appear among the loop's temporaries (for three heads of width 64 it
does). Left to itself the compiler finds an order in which every step writes in place. The cache is brought into that
order once, before the first run; the loop gives it back in the same order, so later runs find it as they want it.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.experimental.layout import Format, Layout

from jdecode import sampling
from jdecode.decode import state as state_lib
from jdecode.models import transformer


@functools.lru_cache(maxsize=128)
def compile_loop(
    loop: Callable[..., state_lib.DecodeState],
    model: transformer.Transformer,
    chain: sampling.Transform,
    structure: Any,
    leaves: tuple[tuple[jax.ShapeDtypeStruct, jax.sharding.Sharding], ...],
) -> jax.stages.Compiled:
    """Compiles ``loop(model, chain, params, state, max_steps)`` with the layout of the cache's rows left open.

    Args:
      loop: ``loop.decode_steps``.
      model, chain: static.
      structure: the pytree structure of (params, state, max_steps).
      leaves: for each of their leaves its shape and dtype, and its sharding.
    """
    shapes = structure.unflatten([shape for shape, _ in leaves])
    shardings = structure.unflatten([sharding for _, sharding in leaves])
    state_formats = _with_open_rows(shardings[1])
    jitted = jax.jit(
        functools.partial(loop, model, chain),
        donate_argnums=1,
        in_shardings=(shardings[0], state_formats, shardings[2]),
        out_shardings=state_formats,
    )
    return jitted.lower(*shapes).compile()


def _with_open_rows(state: state_lib.DecodeState) -> state_lib.DecodeState:
    """Replaces, in a tree of shardings, those of the cache's keys and values by formats without a layout."""
    return _with_stores(state, jax.tree.map(lambda own: Format(Layout.AUTO, own), state.cache.stores))


def _with_stores(state: state_lib.DecodeState, stores: Any) -> state_lib.DecodeState:
    return dataclasses.replace(state, cache=dataclasses.replace(state.cache, stores=stores))


def run(
    loop: Callable[..., state_lib.DecodeState],
    model: transformer.Transformer,
    chain: sampling.Transform,
    params: Any,
    state: state_lib.DecodeState,
    max_steps: jax.Array,
) -> state_lib.DecodeState:
    """Runs the loop, compiling it where needed. See ``loop.run`` for arguments; ``state`` is donated."""
    flat, structure = jax.tree.flatten((params, state, max_steps))
    leaves = tuple((jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf.sharding) for leaf in flat)
    compiled = compile_loop(loop, cast(Any, model), chain, structure, leaves)
    stores = jax.device_put(state.cache.stores, compiled.input_formats[0][1].cache.stores, donate=True)
    return compiled(params, _with_stores(state, stores), max_steps)
