"""Which layers have a window, in the three spellings of configuration files."""

from collections.abc import Sequence

from jdecode.models.families import strict_fields

SLIDING = "sliding_attention"
FULL = "full_attention"
_PATTERN_KEYS = ("sliding_window_pattern", "_sliding_window_pattern")


def given(fields: strict_fields.StrictFields, num_layers: int) -> list[str] | None:
    """Reads the types of the layers when the file names them.

    Args:
      fields: of ``config.json``: ``layer_types``, a list; or ``sliding_window_pattern`` (also with an underscore
        before it), a number n, which says that every n-th layer is global. Those that are there must agree.
      num_layers: L.

    Returns:
      One type a layer; ``None`` when no key is there.

    Raises:
      ValueError: for a list of another length, an unknown type, or keys that disagree.
    """
    said: dict[str, list[str]] = {}
    listed = fields.take("layer_types", None)
    if listed is not None:
        if not isinstance(listed, list) or len(listed) != num_layers or not set(map(str, listed)) <= {SLIDING, FULL}:
            raise ValueError(
                f"{fields.where}: layer_types: expected {num_layers} entries, each {SLIDING} or {FULL}, got "
                f"{_summary(listed)}"
            )
        said["layer_types"] = list(listed)
    for name in _PATTERN_KEYS:
        pattern = fields.take_count(name, None)
        if pattern is not None:
            said[name] = from_pattern(pattern, num_layers)
    if not said:
        return None
    names = list(said)
    for name in names[1:]:
        if said[name] != said[names[0]]:
            raise ValueError(
                f"{fields.where}: expected {names[0]} and {name} to name the same global layers, got "
                f"{_full(said[names[0]])} and {_full(said[name])}; remove the wrong one"
            )
    return said[names[0]]


def from_pattern(pattern: int, num_layers: int) -> list[str]:
    """Makes every ``pattern``-th layer global and the others sliding, counting from one."""
    return [SLIDING if (layer + 1) % pattern else FULL for layer in range(num_layers)]


def from_windows(windows: Sequence[int | None]) -> list[str]:
    """Gives each layer the type that its window says."""
    return [FULL if window is None else SLIDING for window in windows]


def windows(kinds: Sequence[str], window: int | None, where: str) -> list[int | None]:
    """Gives each layer its window.

    Raises:
      ValueError: when a layer is sliding but there is no window.
    """
    if window is None and SLIDING in kinds:
        raise ValueError(
            f"{where}: expected a sliding_window for the layers of type {SLIDING}, got none; give it, or make every "
            f"layer {FULL}"
        )
    return [window if kind == SLIDING else None for kind in kinds]


def _summary(listed: object) -> str:
    if not isinstance(listed, list):
        return repr(listed)[:80]
    return f"{len(listed)} entries of {sorted(set(map(str, listed)))}"[:120]


def _full(kinds: Sequence[str]) -> list[int]:
    return [layer for layer, kind in enumerate(kinds) if kind == FULL][:8]
