"""JSON files that hold one object, read with one clear line for whatever is wrong with them."""

import json
import pathlib
from typing import Any

MAX_BYTES = 100_000_000  # a configuration or an index beyond this is no such file


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Args:
      path: the file.

    Returns:
      The object.

    Raises:
      ValueError: when the file is missing, unreadable, no JSON, or holds something else than an object.
    """
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise ValueError(f"{path}: expected a JSON file of at most {MAX_BYTES} bytes, got {size}")
        text = path.read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: expected a readable file, got: {error.strerror or error}") from error
    return parse_object(text, str(path))


def parse_object(text: bytes, where: str) -> dict[str, Any]:
    """Reads one JSON object from bytes; a key that stands twice is an error, as either value could be meant.

    Args:
      text: UTF-8 bytes.
      where: what the bytes are, for error lines.

    Returns:
      The object.

    Raises:
      ValueError: when the bytes are no JSON, or hold something else than an object.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, value in pairs:
            if name in values:
                raise ValueError(f"the key {name!r} stands twice")
            values[name] = value
        return values

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise ValueError(f"{where}: expected JSON, got brackets nested too deeply") from error
    except ValueError as error:  # decoding of UTF-8 and of JSON
        raise ValueError(f"{where}: expected JSON, got: {error}; the file is damaged or incomplete") from error
    if not isinstance(value, dict):
        raise ValueError(f"{where}: expected a JSON object, got {type(value).__name__}")
    return value
