"""A mapping from a file, of which every key must be used: what is left over at the end is an error that names it."""

import difflib
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

REQUIRED = object()  # a field without a default: its absence is an error

# An absurd count in a damaged file must not become a loop or an allocation. The deepest published models have
# a few hundred layers, and no size of a model comes near 2**31.
MAX_COUNT = 2**31 - 1
MAX_LAYERS = 4096


class StrictFields:
    """Reads the keys of a mapping one by one and remembers which were read.

    A key whose value is null counts as absent unless the reader says otherwise.
    """

    def __init__(self, values: Mapping[str, Any], where: str) -> None:
        """Starts with every key unread.

        Args:
          values: the mapping.
          where: what the mapping is, for error lines, such as ``config.json``.
        """
        self._values = values
        self._unread = set(values)
        self.where = where

    def has(self, name: str) -> bool:
        """Tells whether the key is there, even with a null value. Does not count as reading."""
        return name in self._values

    def take(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns the raw value of a key; the default when it is absent or null."""
        self._unread.discard(name)
        value = self._values.get(name)
        if value is not None:
            return value
        if default is REQUIRED:
            raise ValueError(f"{self.where}: expected the key {name!r}, got none; add it or use the file it came with")
        return default

    def take_count(self, name: str, default: Any = REQUIRED, *, largest: int = MAX_COUNT) -> Any:
        """Returns a whole number of at least 1, or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        value = _plain(value)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= largest:
            raise self._wrong(name, f"a whole number from 1 to {largest}", value)
        return value

    def take_number(self, name: str, default: Any = REQUIRED) -> Any:
        """Returns a finite number over 0 as a float, or the default."""
        value = self.take(name, default)
        if value is default:
            return value
        if isinstance(value, np.generic) and value.dtype == np.float32:
            # The shortest decimal that gives this float32: a file that says 1e-5 in 32 bits then means 1e-5, and
            # the same model read from two formats has one configuration.
            value = float(str(value))
        value = _plain(value)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        # Compared before it is converted: a whole number of JSON may be beyond any float.
        if not is_number or not 0 < value <= sys.float_info.max:
            raise self._wrong(name, "a finite number over 0", value)
        return float(value)

    def take_bool(self, name: str, default: bool) -> bool:
        """Returns true or false; the default when the key is absent or null."""
        value = _plain(self.take(name, default))
        if not isinstance(value, bool):
            raise self._wrong(name, "true or false", value)
        return value

    def take_choice(self, name: str, choices: Mapping[str, str], default: str) -> str:
        """Returns what the choices map the value to."""
        value = self.take(name, default)
        if not isinstance(value, str) or value not in choices:
            raise self._wrong(name, f"one of {', '.join(choices)}", value)
        return choices[value]

    def expect(self, name: str, *allowed: Any, why: str) -> None:
        """Accepts a key only when it is absent, null, or has one of the values that this engine computes."""
        value = _plain(self.take(name, None))
        if value is not None and not any(type(value) is type(ok) and value == ok for ok in allowed):
            says = " or ".join(repr(ok) for ok in allowed)
            raise self._wrong(name, f"{says} or none ({why})", value)

    def ignore(self, names: Iterable[str]) -> None:
        """Marks keys that cannot change what inference computes as read."""
        self._unread.difference_update(names)

    def nested(self, name: str) -> "StrictFields | None":
        """Returns the mapping under a key as strict fields of its own; ``None`` when absent or null."""
        value = self.take(name, None)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self._wrong(name, "an object with named values", value)
        return StrictFields(value, f"{self.where}: {name}")

    def names(self) -> Sequence[str]:
        """Returns all keys in the order of the file."""
        return tuple(self._values)

    def finish(self, known: Iterable[str] = ()) -> None:
        """Raises when a key was not read.

        Args:
          known: further names to propose to the writer of a misspelt key.

        Raises:
          ValueError: names the first unread key, and the nearest key that would have been read.
        """
        if not self._unread:
            return
        left = sorted(map(str, self._unread))
        read = [str(name) for name in self._values if name not in self._unread]
        near = difflib.get_close_matches(left[0], [*known, *read], n=1)
        nearest = f"; the nearest known key is {near[0]!r}" if near else ""
        raise ValueError(
            f"{self.where}: expected only keys whose meaning is known, got {', '.join(map(repr, left[:5]))}"
            f"{' and more' if len(left) > 5 else ''}{nearest}; remove what does not change the model"
        )

    def _wrong(self, name: str, expected: str, got: Any) -> ValueError:
        shown = repr(got)
        return ValueError(
            f"{self.where}: {name}: expected {expected}, got {shown if len(shown) < 80 else shown[:77] + '...'}"
        )


def _plain(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
