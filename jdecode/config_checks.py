"""Refusals of configurations, one line each: what was expected, and what was got."""

import math
import numbers
from typing import Any


def check(condition: bool, message: str) -> None:
    """Raises ``ValueError`` with ``message`` unless ``condition`` holds."""
    if not condition:
        raise ValueError(message)


def check_count(name: str, value: Any, least: int, alternative: str = "") -> None:
    """Refuses what is no whole number of at least ``least``; ``alternative`` says what else may stand there."""
    is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= least
    check(is_count, f"{name}: expected a count of at least {least}{alternative}, got {value!r}")


def check_number(name: str, value: Any, low: float, high: float, says: str, *, exclusive: bool = False) -> None:
    """Refuses what is no finite number from ``low`` to ``high`` (``exclusive``: over ``low``); ``says`` is in words."""
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value)
    inside = is_number and low <= float(value) <= high and not (exclusive and value == low)
    check(bool(inside), f"{name}: expected {says}, got {value!r}")
