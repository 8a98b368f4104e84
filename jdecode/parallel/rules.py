"""Rules: the logical name of an array axis decides along which mesh axis it is split.

An axis that the mesh axis does not divide stays whole on every device, so any model runs on any mesh: three
key/value heads on eight devices are replicated, never cut into fractions.
"""

from collections.abc import Sequence

import jax

RULES: dict[str | None, str | None] = {
    "batch": "data",
    "vocab": "model",
    "heads": "model",
    "kv_heads": "model",
    "mlp": "model",
    "embed": None,
    "head_dim": None,
    None: None,
}


def partition_spec(
    mesh: jax.sharding.Mesh, axes: Sequence[str | None], shape: Sequence[int]
) -> jax.sharding.PartitionSpec:
    """Returns how an array is split.

    Args:
      axes: the logical name of each axis, ``None`` for one that is never split.
      shape: its lengths. For an axis in which several heads lie side by side, the number of heads.

    Raises:
      ValueError: a name has no rule.
    """
    entries: list[str | None] = []
    for name, length in zip(axes, shape, strict=True):
        if name not in RULES:
            raise ValueError(f"logical axis: expected one of {', '.join(map(str, RULES))}, got {name!r}")
        mesh_axis = RULES[name]
        splits = mesh_axis is not None and mesh_axis not in entries and length % mesh.shape[mesh_axis] == 0
        entries.append(mesh_axis if splits else None)
    return jax.sharding.PartitionSpec(*entries)


def sharding(mesh: jax.sharding.Mesh, axes: Sequence[str | None], shape: Sequence[int]) -> jax.sharding.NamedSharding:
    """Returns ``partition_spec`` on its mesh."""
    return jax.sharding.NamedSharding(mesh, partition_spec(mesh, axes, shape))
