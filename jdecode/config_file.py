"""Reads frozen configs from YAML, strictly: nothing in a file is ignored, guessed or converted in silence.

An unknown key names its nearest known one, a value of the wrong type names both types, and each message starts with
the file and the place in it (``gemma.yaml: sampling.temprature: unknown key; did you mean temperature?``).

The layers of an architecture have a short form, since models repeat a pattern::

    layers:
      count: 18
      pattern:                        # repeated, and cut at `count`
        - {times: 5, window: 512}     # `times` like layers in a row; 1 when not given
        - {}                          # a layer with nothing but defaults
"""

import dataclasses
import difflib
import os
import pathlib
import re
import types
import typing
from collections.abc import Mapping
from typing import Any

import yaml
from yaml import composer, constructor, events

from jdecode import config

SUFFIX = ".yaml"
SCALAR_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}
MAX_LAYERS = 10_000  # far over any model: a misplaced number must not fill the memory
_PACKAGE_FOLDER = pathlib.Path(__file__).resolve().parent


class _StrictLoader(yaml.SafeLoader):
    """Plain YAML, in which a key may stand once, nothing is an alias, and ``1e6`` is a number."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(events.AliasEvent):
            event = self.peek_event()
            raise composer.ComposerError(None, None, "aliases are not supported", event.start_mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, Any] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                message = f"expected a word as key, got {key!r}"
                raise constructor.ConstructorError(None, None, message, key_node.start_mark)
            if key in seen:
                message = f"key {key!r} stands here for the second time (first in line {seen[key].line + 1})"
                raise constructor.ConstructorError(None, None, message, key_node.start_mark)
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep=True)


# YAML 1.1 takes `1e6` for text, since it asks for a dot and for the exponent's sign.
_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+"), list("-+.0123456789")
)


def _value_name(value: Any) -> str:
    """Says in words what a file gave, with the value where it is short."""
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, list):
        return "a list"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    kinds = {int: "the whole number", float: "the number", str: "the text"}
    return f"{kinds.get(type(value), type(value).__name__)} {_short(value)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def nearest(name: str, known: typing.Iterable[str]) -> str:
    """Returns the end of a message about an unknown name: the nearest known one, or all of them."""
    names = list(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.6)
    return f"did you mean {close[0]}?" if close else f"known: {', '.join(names)}"


def _join(place: str, key: str | int) -> str:
    if isinstance(key, int):
        return f"{place}[{key}]"
    return f"{place}.{key}" if place else key


def _fail(place: str, message: str) -> typing.NoReturn:
    raise ValueError(f"{place}: {message}" if place else message)


def _expand_layers(value: Mapping[str, Any], place: str) -> list[Any]:
    """Writes out the short form of a model's layers (see the module's text)."""
    for key in value:
        if key not in ("count", "pattern"):
            _fail(_join(place, key), f"unknown key; {nearest(key, ('count', 'pattern'))}")
    count = _convert(int, value.get("count"), _join(place, "count"))
    if not 1 <= count <= MAX_LAYERS:
        _fail(_join(place, "count"), f"expected a count from 1 to {MAX_LAYERS}, got {count}")
    pattern = value.get("pattern")
    if not isinstance(pattern, list) or not pattern:
        _fail(_join(place, "pattern"), f"expected a list of at least one layer, got {_value_name(pattern)}")
    period: list[Any] = []
    for idx, entry in enumerate(pattern):
        here = _join(_join(place, "pattern"), idx)
        if not isinstance(entry, Mapping):
            _fail(here, f"expected a mapping, got {_value_name(entry)}")
        times = _convert(int, entry.get("times", 1), _join(here, "times"))
        if not 1 <= times <= count:
            _fail(_join(here, "times"), f"expected a count from 1 to {count}, got {times}")
        layer = _convert(config.LayerConfig, {key: entry[key] for key in entry if key != "times"}, here)
        period += [layer] * times
    return [period[idx % len(period)] for idx in range(count)]


def _convert_tuple(expected: Any, value: Any, place: str) -> tuple[Any, ...]:
    arguments = typing.get_args(expected)
    if arguments == (config.LayerConfig, ...) and isinstance(value, Mapping):
        return tuple(_expand_layers(value, place))
    if not isinstance(value, list):
        _fail(place, f"expected a list, got {_value_name(value)}")
    if arguments[-1] is Ellipsis:
        arguments = (arguments[0],) * len(value)
    if len(arguments) != len(value):
        _fail(place, f"expected a list of {len(arguments)}, got one of {len(value)}")
    return tuple(
        _convert(entry_type, entry, _join(place, idx))
        for idx, (entry_type, entry) in enumerate(zip(arguments, value, strict=True))
    )


def _convert(expected: Any, value: Any, place: str) -> Any:
    """Returns ``value`` as the type ``expected``; the only conversion is of whole numbers to floats."""
    may_be_null = typing.get_origin(expected) in (types.UnionType, typing.Union)
    if may_be_null:
        if value is None:
            return None
        (expected,) = (choice for choice in typing.get_args(expected) if choice is not type(None))
    if typing.get_origin(expected) is tuple:
        return _convert_tuple(expected, value, place)
    if dataclasses.is_dataclass(expected):
        return from_mapping(typing.cast(type, expected), value, place=place)
    if not _is_scalar_of(expected, value):
        words = SCALAR_NAMES[expected] + (" or null" if may_be_null else "")
        _fail(place, f"expected {words}, got {_value_name(value)}")
    if isinstance(value, str) and any("\ud800" <= letter <= "\udfff" for letter in value):
        _fail(place, "expected Unicode text, got a lone surrogate; remove it")
    try:
        return float(value) if expected is float else value
    except OverflowError:
        _fail(place, f"expected a number that a float can hold, got {_value_name(value)}")


def _is_scalar_of(expected: Any, value: Any) -> bool:
    if isinstance(value, bool):  # in Python a bool is a whole number, in a config it is not
        return expected is bool
    return isinstance(value, (int, float) if expected is float else expected)


def from_mapping(cls: type, value: Any, *, place: str = "") -> Any:
    """Builds a frozen config from plain mappings, lists and scalars.

    Args:
      cls: one of the dataclasses of ``jdecode.config``.
      value: mapping from field names to values.
      place: what messages start with, such as ``sampling``.

    Returns:
      An instance of ``cls``; fields that are not given keep their defaults.

    Raises:
      ValueError: on an unknown or a missing key, a value of the wrong type, or one that the class refuses. The
        message is one line with the place.
    """
    if not isinstance(value, Mapping):
        _fail(place, f"expected a mapping, got {_value_name(value)}")
    field_types = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for key in value:
        if key not in fields:
            _fail(_join(place, key), f"unknown key; {nearest(key, fields)}")
    for name, field in fields.items():
        no_default = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if no_default and name not in value:
            _fail(_join(place, name), "missing; this key has no default")
    converted = {key: _convert(field_types[key], entry, _join(place, key)) for key, entry in value.items()}
    try:
        return cls(**converted)
    except ValueError as error:
        _fail(place, str(error))


def loads(text: str, *, origin: str, cls: type = config.RunConfig) -> Any:
    """Reads a config from YAML text.

    Args:
      text: the YAML.
      origin: the file's name, for messages; its stem is the name of a config that gives none.
      cls: the dataclass that the file describes; it has a ``name``.

    Returns:
      An instance of ``cls``.

    Raises:
      ValueError: one line with ``origin`` and the line or the key.
    """
    try:
        tree = yaml.load(text, Loader=_StrictLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}:" if mark else ""
        problem = " ".join(str(error.problem or error.context).split())
        raise ValueError(f"{origin}:{line} {problem}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{origin}: not YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:  # ValueError: a date or number that looks right and is not
        raise ValueError(f"{origin}: not readable as YAML: {' '.join(str(error).split())}") from None
    if tree is None:
        raise ValueError(f"{origin}: expected a mapping, got an empty file")
    try:
        run = from_mapping(cls, tree)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from None
    return run if run.name else dataclasses.replace(run, name=pathlib.PurePath(origin).stem)


def folders(below: str = "") -> tuple[pathlib.Path, ...]:
    """Returns the folders in which a config is looked up by name: ``./configs``, then the package's own.

    Args:
      below: a folder in these, such as ``training``; none for themselves.
    """
    shipped = _PACKAGE_FOLDER / "configs"
    beside = _PACKAGE_FOLDER.parent / "configs"  # in a checkout, and so in an editable install
    in_checkout = (_PACKAGE_FOLDER.parent / "pyproject.toml").is_file()
    return pathlib.Path("configs") / below, (beside if in_checkout else shipped) / below


def available(below: str = "") -> list[str]:
    """Returns the names of the configs that can be found by name, in order."""
    return sorted({path.name for folder in folders(below) for path in folder.glob(f"*{SUFFIX}")})


def find(name: str | os.PathLike[str], below: str = "") -> pathlib.Path:
    """Finds a config: as given, then in ``./configs``, then in the package. The suffix ``.yaml`` may be left out.

    Args:
      name: a path, or a name.
      below: see ``folders``.

    Raises:
      FileNotFoundError: one line with the nearest names.
    """
    text = os.fspath(name)
    for folder in (pathlib.Path(), *folders(below)):
        for spelling in (text, f"{text}{SUFFIX}"):
            path = folder / spelling
            if text and path.is_file():
                return path
    known = available(below)
    close = difflib.get_close_matches(text, known, n=3, cutoff=0.4)
    hint = f"did you mean {' or '.join(close)}?" if close else f"there are: {', '.join(known) or 'none'}"
    place = pathlib.PurePosixPath("configs", below)
    raise FileNotFoundError(f"config {text!r}: no such file, here, in ./{place} or in the package; {hint}")


def load(name: str | os.PathLike[str], cls: type = config.RunConfig, below: str = "") -> Any:
    """Finds and reads a config (see ``find`` and ``loads``).

    Raises:
      FileNotFoundError: if there is none of that name.
      ValueError: if the file does not describe a ``cls``.
    """
    path = find(name, below)
    try:
        text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError) as error:
        raise ValueError(f"{path}: expected a readable text file in UTF-8, got {error}") from None
    return loads(text, origin=str(path), cls=cls)
