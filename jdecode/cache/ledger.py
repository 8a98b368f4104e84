"""The KV ledger: what a cache takes in memory, array by array, before any array is made.

Two predictions stand beside each other, each made without the other:

* *allocated*: ``allocate.init_cache`` itself is traced (``jax.eval_shape``), on a mesh whose devices need not be there,
  and the leaves of the cache that it would make become lines. The ledger knows no layout and no codec: whatever they
  allocate (rows, scales, tables) is a line, under the name that it has in the cache.
* *formula*: the closed form, for what the configuration alone decides::

      keys and values    2 · L · B · S · K · H · b     L layers of one layout, its S slots a row, b bytes a number;
                                                       and the same of the latest tokens, beside a codec by groups
      positions          4 · B · S                     an int32 a slot, once a layout (once a layer that evicts)
      received           4 · L · B · S                 a float32 a slot, in layers that evict as they go (h2o)
      length             4 · B                         an int32 a row
      pages              4 · B · C                     where slots lie in pages: an int32 a column
      shared             4 · B                         beside them: an int32 a row

Bytes are those of the whole arrays. What one device of a mesh holds follows from the sharding of each leaf: rows are
split along ``data`` and heads along ``model``, and what an axis does not divide stays whole on every device.

Arrays are counted as they are. A CPU holds them so; a TPU lays them out in tiles of 8 by 128, which ``tiled_bytes``
counts: rows of 192 numbers take as much as rows of 256.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable
from typing import Any, cast

import jax

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.cache import allocate, compress, kv_cache, layout
from jdecode.parallel import mesh as mesh_lib

POSITION_BYTES = 4
"""Of an int32: a position, or a length."""

TILE_ROWS, TILE_LANES = 8, 128
"""The tile of a TPU: what the last two axes of an array are rounded up to (fewer than 8 rows to a power of two)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """A cache that somebody thinks about. Frozen and hashable.

    Attributes:
      model: the model that it belongs to.
      cache: layout, dtype and slack.
      batch_size: B.
      capacity: the longest text that a row must hold, in tokens.
      compute_dtype: stored dtype where ``cache.dtype`` is ``"auto"``.
      mesh: the devices that it is spread over.
      num_new: of the capacity, the tokens that come after the prompt; a cache that evicts has slots for them (see
        ``compress``), other caches do not ask.
    """

    model: config_lib.ModelConfig
    cache: config_lib.CacheConfig
    batch_size: int
    capacity: int
    compute_dtype: str
    mesh: config_lib.MeshConfig = config_lib.MeshConfig()
    num_new: int = 0

    @property
    def longest_prompt(self) -> int:
        """The tokens of the longest prompt."""
        return max(self.capacity - self.num_new, 1)

    @property
    def is_compressed(self) -> bool:
        """Whether the cache evicts anything of such a text."""
        how = compress.compression(self.cache, self.num_new)
        return how is not None and how.acts(self.longest_prompt, self.num_new)

    @property
    def dtype(self) -> str:
        """The name of the stored dtype."""
        return self.compute_dtype if self.cache.dtype == "auto" else self.cache.dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Line:
    """Like arrays of a cache.

    Attributes:
      name: what they hold.
      layout: of the layers that they belong to, in words; empty for what belongs to all.
      num_layers: how many layers have such arrays; 0 for what layers share.
      num_slots: slots a row; 0 for what has no slots.
      is_stored: whether they are stored keys or values (or scales of such).
      num_bytes: of all of them, however they are spread; what several devices hold whole is counted once.
      device_bytes: of what one device holds of them.
      tiled_bytes: of the same, as a TPU pads it.
      split: the mesh axes along which they are split.
      formula: the closed form with its numbers, ``None`` for what it does not cover.
      formula_bytes: what the closed form gives.
    """

    name: str
    layout: str
    num_layers: int
    num_slots: int
    is_stored: bool
    num_bytes: int
    device_bytes: int
    tiled_bytes: int
    split: tuple[str, ...]
    formula: str | None
    formula_bytes: int | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ledger:
    """All lines of a cache; their bytes add up to the bytes of its leaves."""

    plan: Plan
    lines: tuple[Line, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the cache, however it is spread."""
        return sum(line.num_bytes for line in self.lines)

    @property
    def stored_bytes(self) -> int:
        """Bytes of keys and values, with what belongs to them (scales)."""
        return sum(line.num_bytes for line in self.lines if line.is_stored)

    @property
    def device_bytes(self) -> int:
        """Bytes that one device holds."""
        return sum(line.device_bytes for line in self.lines)

    @property
    def tiled_bytes(self) -> int:
        """Bytes that one device holds if it is a TPU, padding included."""
        return sum(line.tiled_bytes for line in self.lines)

    @property
    def formula_bytes(self) -> int:
        """What the closed form gives for all that it covers."""
        return sum(line.formula_bytes or 0 for line in self.lines)

    @property
    def formula_stored_bytes(self) -> int:
        """What ``2 · L · B · S · K · H · b`` gives."""
        return sum(line.formula_bytes or 0 for line in self.lines if line.is_stored)


def number_bits(dtype: str) -> int:
    """Returns the bits that a stored number takes: those that the dtype's name says (``"bfloat16"``: 16)."""
    match = re.search(r"\d+", dtype)
    if match is None:
        raise ValueError(f"dtype: expected a name with its bits, such as bfloat16, got {dtype!r}")
    return int(match[0])


@functools.lru_cache(maxsize=64)
def abstract_cache(plan: Plan, num_pages: int | None = None) -> kv_cache.KVCache:
    """Returns the cache with shapes, dtypes and, on a mesh of several devices, shardings instead of arrays.

    Args:
      num_pages: see ``allocate.init_cache``; acts on layers with pages.
    """
    if not plan.is_compressed:
        return jax.eval_shape(_init(allocate.init_cache, plan, plan.cache.without_eviction(), num_pages=num_pages))
    return jax.eval_shape(_init(allocate.init_compressed, plan, plan.cache, num_new=plan.num_new))


def prompt_bytes(plan: Plan) -> int:
    """Returns the bytes of the cache into which prompts are read; where it is compressed, both stand side by side."""
    if not plan.is_compressed:
        return ledger(plan).num_bytes
    init = _init(allocate.init_cache, plan, plan.cache.without_eviction(), prompt_capacity=plan.longest_prompt)
    return sum(map(leaf_bytes, jax.tree.leaves(jax.eval_shape(init))))


def _init(init: Callable[..., kv_cache.KVCache], plan: Plan, cache: config_lib.CacheConfig, **more: int | None):
    is_spread = plan.mesh.data * plan.mesh.model > 1
    # Only the shape of the mesh is read, so no device needs to be there.
    mesh = cast(jax.sharding.Mesh, mesh_lib.abstract_mesh(plan.mesh)) if is_spread else None
    return functools.partial(
        init,
        plan.model,
        cache,
        batch_size=plan.batch_size,
        capacity=plan.capacity,
        compute_dtype=plan.compute_dtype,
        mesh=mesh,
        platform="cpu",  # or any: bytes are the same, and no backend need be there
        **more,
    )


def ledger(plan: Plan) -> Ledger:
    """Writes down what a cache takes.

    Raises:
      ValueError: a size is under 1.
    """
    cache = abstract_cache(plan)
    groups: dict[Any, list[tuple[_Place, Any]]] = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(cache):
        place = _place(cache, path)
        own = None if place.layout_idx is None else cache.layouts[place.layout_idx]
        like = (place.part, own and (layout_name(own), own.capacity), place.array, leaf.shape, leaf.dtype, _split(leaf))
        groups.setdefault(like, []).append((place, leaf))
    return Ledger(plan=plan, lines=tuple(_line(plan, cache, members) for members in groups.values()))


def layout_name(own: layout.AnyLayout) -> str:
    """Names a layout and what it was made with, but for its capacity: ``full``, ``ring(window=64)``."""
    name = type(own).__name__.removesuffix("Layout").lower()
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(cast(Any, own))}
    # Nor the layer that a layout belongs to: like ones of several layers share a line.
    left_out = ("capacity", "layer")
    words = [f"{key}={value}" for key, value in fields.items() if key not in left_out and value not in (0, None)]
    return f"{name}({', '.join(words)})" if words else name


def leaf_bytes(leaf: Any) -> int:
    """Returns the bytes of an array, or of what stands for one."""
    return math.prod(leaf.shape) * leaf.dtype.itemsize


def layer_row_bytes(cache: kv_cache.KVCache, layer_idx: int) -> int:
    """Returns the bytes of keys and values of one layer that one row has, with what belongs to them.

    The latest tokens beside a codec by groups are not among them.
    """
    store = cache.stores[layer_idx]
    return sum(leaf_bytes(leaf) for leaf in jax.tree.leaves((store.keys, store.values))) // cache.batch_size


def most_rows(plan: Plan, device_bytes: int, *, is_tiled: bool = False) -> int:
    """Returns the greatest batch whose cache takes at most ``device_bytes`` on each device; 0 where none does.

    Rows are split along ``data`` in equal parts, so on a mesh it is a multiple of that axis.

    Args:
      is_tiled: whether the devices are TPUs, which pad.
    """
    count = _tiled_bytes if is_tiled else _device_bytes

    def fits(num_rows: int) -> bool:
        batch = dataclasses.replace(plan, batch_size=num_rows * plan.mesh.data)
        return sum(map(count, jax.tree.leaves(abstract_cache(batch)))) <= device_bytes

    if not fits(1):
        return 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low * plan.mesh.data


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Place:
    """Where a leaf stands in a cache.

    Attributes:
      part: the attribute of the cache.
      array: its name within the part, without the letters of its axes.
      layout_idx: of the layer or table that it belongs to.
      layer_idx: of a store.
      side: the attribute of a store: ``"keys"``, ``"values"``, those of its latest tokens (``"recent keys"``), or what
        else a layer may hold.
    """

    part: str
    array: str = ""
    layout_idx: int | None = None
    layer_idx: int | None = None
    side: str = ""


def _place(cache: kv_cache.KVCache, path: tuple[Any, ...]) -> _Place:
    def name(entries: tuple[Any, ...]) -> str:
        return re.sub(r"_[A-Z]+$", "", jax.tree_util.keystr(entries, simple=True, separator="/"))

    part = path[0].name
    if part == "stores":
        layer, side, rest = path[1].idx, name(path[2:3]), path[3:]
        layout_idx = cache.layout_idx[layer]
        if side == "recent" and cache.codec.grouping is not None:
            side, rest = f"recent {rest[0].name}", rest[1:]
            layout_idx = cache.layouts.index(cache.codec.grouping.layout)
        return _Place(part=part, array=name(rest), layout_idx=layout_idx, layer_idx=layer, side=side)
    if part == "positions":
        return _Place(part=part, array=part, layout_idx=path[1].idx)
    return _Place(part=part, array=name(path))


def _split(leaf: Any) -> tuple[str, ...]:
    """Returns the mesh axes of several devices along which a leaf is split."""
    if leaf.sharding is None:
        return ()
    entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in leaf.sharding.spec]
    return tuple(axis for axes in entries for axis in axes if leaf.sharding.mesh.shape[axis] > 1)


def _device_shape(leaf: Any) -> tuple[int, ...]:
    return leaf.shape if leaf.sharding is None else leaf.sharding.shard_shape(leaf.shape)


def _device_bytes(leaf: Any) -> int:
    return math.prod(_device_shape(leaf)) * leaf.dtype.itemsize


def _tiled_bytes(leaf: Any) -> int:
    """Returns the bytes of what one TPU holds of a leaf, its axes in their own order as the decode loop wants them."""
    *outer, lanes = _device_shape(leaf) or (1,)
    if outer:
        rows = outer[-1]
        outer[-1] = min(shapes.power_of_two_at_least(rows), shapes.round_up(rows, TILE_ROWS))
    return math.prod(outer) * shapes.round_up(lanes, TILE_LANES) * leaf.dtype.itemsize


def _line(plan: Plan, cache: kv_cache.KVCache, members: list[tuple[_Place, Any]]) -> Line:
    place, leaf = members[0]
    own = None if place.layout_idx is None else cache.layouts[place.layout_idx]
    sides = list(dict.fromkeys(member.side for member, _ in members))
    num_slots = 0 if own is None else own.capacity
    num_layers = len({member.layer_idx for member, _ in members if member.layer_idx is not None})
    factors: tuple[int, ...] | None = None
    bits = 8 * POSITION_BYTES
    if place.part == "stores":
        name = " and ".join(sides)
        if _is_numbers(cache, place, leaf):
            is_recent = place.side.startswith("recent ")
            shape = (plan.batch_size, num_slots, plan.model.num_kv_heads, plan.model.head_dim)
            factors = (len(sides), num_layers, *shape)
            bits = number_bits(plan.compute_dtype if is_recent else plan.dtype)
        elif place.side == "received":
            factors = (num_layers, plan.batch_size, num_slots)
        else:
            name = ": ".join(filter(None, (name, place.array)))
    else:
        name = place.array
        if place.part == "positions":
            factors = (len(members), plan.batch_size, num_slots)[len(members) == 1 :]
        elif place.part == "pages_BC" and cache.paged_layout is not None:
            factors = (plan.batch_size, cache.paged_layout.num_columns)
        elif place.part in ("length_B", "shared_B"):
            factors = (plan.batch_size,)
    formula = None if factors is None else _formula(factors, bits)
    return Line(
        name=name,
        layout="" if own is None else layout_name(own),
        num_layers=num_layers,
        num_slots=num_slots,
        is_stored=place.part == "stores",
        num_bytes=sum(leaf_bytes(leaf) for _, leaf in members),
        device_bytes=sum(_device_bytes(leaf) for _, leaf in members),
        tiled_bytes=sum(_tiled_bytes(leaf) for _, leaf in members),
        split=_split(leaf),
        formula=formula,
        formula_bytes=None if factors is None else math.prod(factors) * bits // 8,
    )


def _is_numbers(cache: kv_cache.KVCache, place: _Place, leaf: Any) -> bool:
    """Says whether a leaf holds the keys or values themselves: it is the array of its rows with most entries."""
    *parents, side = place.side.split()
    if side not in ("keys", "values"):
        return False
    rows: Any = cache.stores[cast(int, place.layer_idx)]
    for attribute in (*parents, side):
        rows = getattr(rows, attribute)
    return math.prod(leaf.shape) == max(math.prod(own.shape) for own in jax.tree.leaves(rows))


def _formula(factors: tuple[int, ...], bits: int) -> str:
    """Writes a product out, the bytes of a number last: ``2·32·16·4,096·8·128·2``."""
    width = str(bits // 8) if bits % 8 == 0 else f"{bits}/8"
    return "·".join([*(f"{factor:,}" for factor in factors), width])
