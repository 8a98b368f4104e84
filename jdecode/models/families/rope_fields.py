"""Rotary settings from configuration files, in both Hugging Face spellings; every key is used or refused."""

from collections.abc import Mapping

from jdecode import config
from jdecode.models.families import strict_fields

_TYPES = {"default": "none", "none": "none", "linear": "linear", "llama3": "llama3"}


def flat(fields: strict_fields.StrictFields, *, default_theta: float) -> config.RopeConfig:
    """Reads the rotary settings of a model whose layers share one.

    Args:
      fields: of ``config.json``. Either ``rope_parameters`` (newer files) or ``rope_theta`` with ``rope_scaling``
        (older ones); when both are there they must agree.
      default_theta: the family's published base, for files that leave it out.

    Returns:
      The settings.

    Raises:
      ValueError: for a rope type or a key under it that is not computed, or for two settings that disagree.
    """
    new = fields.nested("rope_parameters")
    old_theta = fields.take_number("rope_theta", None)
    old = fields.nested("rope_scaling")
    if new is None:
        return _one(old, old_theta, default_theta)
    rope = _one(new, None, default_theta if old_theta is None else old_theta)
    if old_theta is not None or old is not None:
        _same(fields.where, rope, _one(old, old_theta, rope.theta), old is None)
    return rope


def by_layer_type(
    fields: strict_fields.StrictFields, *, default_global_theta: float, default_local_theta: float
) -> Mapping[str, config.RopeConfig]:
    """Reads the rotary settings of a model with one for global and one for sliding layers.

    Args:
      fields: of ``config.json``. Either ``rope_parameters`` with an object for each layer type, or ``rope_theta``
        and ``rope_scaling`` (global layers only) with ``rope_local_base_freq``.
      default_global_theta: the family's published base of global layers.
      default_local_theta: the family's published base of sliding layers.

    Returns:
      ``full_attention`` and ``sliding_attention``, each with its settings.

    Raises:
      ValueError: as ``flat``.
    """
    new = fields.nested("rope_parameters")
    theta = fields.take_number("rope_theta", None)
    scaling = fields.nested("rope_scaling")
    local_theta = fields.take_number("rope_local_base_freq", None)
    if new is None:
        return {
            "full_attention": _one(scaling, theta, default_global_theta),
            "sliding_attention": _one(None, local_theta, default_local_theta),
        }
    # A base beside rope_parameters stands in where an object leaves its own out.
    global_default = default_global_theta if theta is None else theta
    local_default = default_local_theta if local_theta is None else local_theta
    ropes = {
        "full_attention": _one(new.nested("full_attention"), None, global_default),
        "sliding_attention": _one(new.nested("sliding_attention"), None, local_default),
    }
    new.finish(("full_attention", "sliding_attention"))
    if theta is not None or scaling is not None:
        rope = ropes["full_attention"]
        _same(fields.where, rope, _one(scaling, theta, rope.theta), scaling is None)
    if local_theta is not None:
        rope = ropes["sliding_attention"]
        _same(fields.where, rope, _one(None, local_theta, rope.theta), True)
    return ropes


def scaling_to_hugging_face(rope: config.RopeConfig) -> dict[str, object] | None:
    """Writes the scaling as the older ``rope_scaling`` object, which every version reads; ``None`` for none."""
    if rope.scaling == "none":
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_max_positions,
    }


def _one(scaling: strict_fields.StrictFields | None, theta: float | None, default_theta: float) -> config.RopeConfig:
    """Reads one object of rotary settings; ``theta`` is what stands beside it in older files."""
    base: float = default_theta if theta is None else theta
    if scaling is None:
        return config.RopeConfig(theta=base)
    base = scaling.take_number("rope_theta", base)
    kind = _type(scaling)
    # Rotating only a part of the head is another computation; 1.0 says the whole.
    scaling.expect("partial_rotary_factor", 1.0, 1, why="the whole head is rotated")
    if kind == "none":
        scaling.expect("factor", 1.0, 1, why="rope type default does not scale")
        rope = config.RopeConfig(theta=base)
    elif kind == "linear":
        rope = config.RopeConfig(theta=base, scaling=kind, factor=scaling.take_number("factor"))
    else:
        rope = config.RopeConfig(
            theta=base,
            scaling=kind,
            factor=scaling.take_number("factor"),
            low_freq_factor=scaling.take_number("low_freq_factor"),
            high_freq_factor=scaling.take_number("high_freq_factor"),
            original_max_positions=scaling.take_count("original_max_position_embeddings"),
        )
    scaling.finish(("rope_type", "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"))
    return rope


def _type(scaling: strict_fields.StrictFields) -> str:
    """Reads the type under its newer name ``rope_type`` and its older name ``type``."""
    both = [scaling.take_choice(name, _TYPES, "default") for name in ("rope_type", "type") if scaling.has(name)]
    if len(set(both)) > 1:
        raise ValueError(
            f"{scaling.where}: expected rope_type and type to agree, got {' and '.join(both)}; keep rope_type"
        )
    return both[0] if both else "none"


def _same(where: str, new: config.RopeConfig, old: config.RopeConfig, theta_only: bool) -> None:
    if (new.theta != old.theta) if theta_only else (new != old):
        raise ValueError(
            f"{where}: expected rope_parameters to agree with rope_theta, rope_scaling and rope_local_base_freq, "
            f"got {new} and {old}; keep rope_parameters"
        )
