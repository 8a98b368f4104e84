"""How much memory the devices have, so that what cannot fit is refused with numbers and not by the allocator."""

import math
import os
from typing import Any

import jax

GIBIBYTE = 2.0**30
LESS_FOR_A_REQUEST = "lower max_new_tokens, the capacity, the number of rows or the width of the cache's dtype"


def total_bytes(mesh: jax.sharding.Mesh | None) -> int | None:
    """Returns the bytes of all devices together: of ``mesh``, or of the default device.

    CPU devices share the memory of the machine. ``None`` where nobody says.
    """
    devices = jax.devices()[:1] if mesh is None else list(mesh.devices.flat)
    if devices[0].platform == "cpu":
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return None if None in limits else sum(limit for limit in limits if limit is not None)


def check(
    tree: Any, mesh: jax.sharding.Mesh | None, what: str, *, times: int = 1, remedy: str = LESS_FOR_A_REQUEST
) -> None:
    """Refuses a tree of shapes that no allocation could hold.

    Args:
      tree: leaves with ``shape`` and ``dtype``.
      what: words for the message.
      times: how many such trees are needed.
      remedy: what needs less.

    Raises:
      ValueError: its bytes are more than ``total_bytes``.
    """
    needed = times * sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    limit = total_bytes(mesh)
    if limit is not None and needed > limit:
        raise ValueError(
            f"memory: expected at most {limit / GIBIBYTE:.1f} GiB, got {needed / GIBIBYTE:.1f} GiB for {what}; {remedy}"
        )
