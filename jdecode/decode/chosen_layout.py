"""The device loop with the memory layout of the cache left to the compiler.

A TPU lays arrays out in tiles, and the order of axes that a program wants of its cache depends on B, K and H. With
the default order a whole copy of the cache can appear among the loop's temporaries (for three heads of width 64 it
does). Left to itself the compiler finds an order in which every step writes in place. The cache is brought into that
order once, before the first run; the loop gives it back in the same order, so later runs find it as they want it.

Of ``int8`` it would find tiles of 32 x 128, from which it copies the rows of a layer to tiles of 8 x 128 and back for
every write of a token. So these are asked for in the latter. (Of other codecs in bytes the compiler's own choice is the
better one: what reads them wants another order of axes than what writes.)
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
from jax.experimental.layout import Format, Layout

from jdecode.cache import codec_token, kv_cache
from jdecode.decode import step as step_lib

BYTE_TILES = ((8, 128), (4, 1))
"""Of numbers of one byte: 8 x 128, four of which share a word."""


@functools.lru_cache(maxsize=128)
def compile_loop(
    loop: Callable[..., Any],
    step: step_lib.Step[Any],
    structure: Any,
    leaves: tuple[tuple[jax.ShapeDtypeStruct, jax.sharding.Sharding], ...],
) -> jax.stages.Compiled:
    """Compiles ``loop(step, params, state, max_tokens)`` with the layout of the caches' rows left open.

    Args:
      loop: ``loop.decode_steps``.
      step: static.
      structure: the pytree structure of (params, state, max_tokens).
      leaves: for each of their leaves its shape and dtype, and its sharding.
    """
    shapes = structure.unflatten([shape for shape, _ in leaves])
    shardings = structure.unflatten([sharding for _, sharding in leaves])
    state_formats = _map_stores(_wanted, shardings[1])
    jitted = jax.jit(
        functools.partial(loop, step),
        donate_argnums=1,
        in_shardings=(shardings[0], state_formats, shardings[2]),
        out_shardings=state_formats,
    )
    return jitted.lower(*shapes).compile()


def _wanted(store: kv_cache.LayerStore) -> kv_cache.LayerStore:
    """Returns the formats in which a layer's arrays are to lie, given their shardings."""
    wanted = jax.tree.map(lambda own: Format(Layout.AUTO, own), store)
    if store.recent is not None:
        return wanted

    def with_tiles(rows: Any) -> Any:
        if not isinstance(rows, codec_token.TokenRows) or rows.name != "int8":
            return rows
        tiles = Format(Layout((0, 1, 2), BYTE_TILES), cast(Any, rows.data_BSX).sharding)
        return dataclasses.replace(rows, data_BSX=tiles)

    return dataclasses.replace(wanted, keys=with_tiles(wanted.keys), values=with_tiles(wanted.values))


def _map_stores(change: Callable[..., Any], state: Any, *others: Any) -> Any:
    """Maps over the layers of every cache in a state, and leaves all else as it is in the first tree."""

    def is_store(node: Any) -> bool:
        return isinstance(node, kv_cache.LayerStore)

    def map_node(node: Any, *rest: Any) -> Any:
        return change(node, *rest) if is_store(node) else node

    return jax.tree.map(map_node, state, *others, is_leaf=is_store)


def run(
    loop: Callable[..., step_lib.State],
    step: step_lib.Step[step_lib.State],
    params: Any,
    state: step_lib.State,
    max_tokens: jax.Array,
) -> step_lib.State:
    """Runs the loop, compiling it where needed. See ``loop.run`` for arguments; ``state`` is donated."""
    flat, structure = jax.tree.flatten((params, state, max_tokens))
    leaves = tuple((jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaf.sharding) for leaf in flat)
    compiled = compile_loop(loop, cast(Any, step), structure, leaves)
    formats = compiled.input_formats[0][1]
    state = _map_stores(lambda store, own: jax.device_put(store, own, donate=True), state, formats)
    return compiled(params, state, max_tokens)
