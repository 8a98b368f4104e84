"""The sandbox in which a model file's chat template runs, and the one place where such a template is compiled.

A template comes with the weights, from a stranger. Jinja's own sandbox keeps it from Python's internals; what is
added here keeps it from using up time and memory:

- every item of a loop, every call and every text that a filter, a call or an operator makes is paid from the budget
  of one rendering, so nested loops, recursion and doubling texts end early;
- what can multiply text in a single step (``*``, ``join``, ``replace``, widths) is measured before it happens;
- an attribute that the sandbox hides raises, where Jinja would write nothing.

Templates see no globals but ``range``, ``dict``, ``namespace``, ``cycler``, ``joiner`` and what the caller passes.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import jinja2
import jinja2.ext
import jinja2.parser
import jinja2.sandbox
from jinja2 import nodes

MAX_CHARS = 4_000_000  # of one text, and of the whole output; also items of one list
MAX_WORK = 2_000_000  # a loop item or 64 characters made: 1; a call: 10
_MAX_ARGUMENT = 100_000  # any whole number that is handed to a function or filter

_SEQUENCES = (str, bytes, list, tuple)
# Filters and methods whose result can be far longer than their arguments, and that no chat format needs.
_REFUSED_FILTERS = ("pprint", "urlize", "wordwrap", "xmlattr")
_REFUSED_METHODS = ("expandtabs", "translate", "format_map")
_WIDE_FORMAT = re.compile(r"\d{6}|%[^%a-zA-Z]*\*")  # "%900000d", "{:>900000}", "%*d"


class TemplateError(ValueError):
    """Says in one line why a chat template could not be rendered."""


class Budget:
    """Counts down the work of one rendering."""

    def __init__(self) -> None:
        self._left = MAX_WORK

    def spend(self, work: int = 1) -> None:
        """Pays for work done.

        Raises:
          TemplateError: the budget is used up.
        """
        self._left -= work
        if self._left < 0:
            raise TemplateError(f"expected at most {MAX_WORK} steps of work, got more; the template may loop")

    def count(self, items: Iterable[Any]) -> Iterator[Any]:
        """Hands out items, each paid for."""
        for item in items:
            self.spend()
            yield item

    def check(self, value: Any) -> Any:
        """Returns ``value``, paid for and found small enough."""
        if isinstance(value, _SEQUENCES):
            check_chars(len(value))
            self.spend(1 + len(value) // 64)
        elif isinstance(value, int) and value.bit_length() > 64:
            raise TemplateError("expected whole numbers of at most 64 bits, got a greater one")
        return value


def check_chars(count: int) -> None:
    """Refuses texts over ``MAX_CHARS`` characters."""
    if count > MAX_CHARS:
        raise TemplateError(f"expected texts of at most {MAX_CHARS} characters, got a longer one")


def _check_arguments(args: Iterable[Any], kwargs: Mapping[str, Any]) -> None:
    for value in (*args, *kwargs.values()):
        if isinstance(value, int) and abs(value) > _MAX_ARGUMENT:
            raise TemplateError(f"expected numbers up to {_MAX_ARGUMENT} as arguments, got {value}")


def _check_growth(name: str, text: str, args: tuple[Any, ...]) -> None:
    """Measures the result of ``join``, ``replace`` and ``format`` before it is made."""
    if name == "join" and args and isinstance(args[0], (list, tuple)):
        check_chars(sum(len(part) + len(text) for part in args[0] if isinstance(part, str)))
    elif name == "replace" and len(args) >= 2 and isinstance(args[0], str) and isinstance(args[1], str):
        check_chars(len(text) + (text.count(args[0]) if args[0] else len(text) + 1) * len(args[1]))
    elif name == "format" and _WIDE_FORMAT.search(text):
        raise TemplateError("expected format fields narrower than 100000, got a wider one")


class _Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox with the budget of one rendering."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationExtension]
        )
        self.budget = Budget()
        del self.globals["lipsum"]
        self.filters["tojson"] = _to_json
        kept = {name: function for name, function in self.filters.items() if name not in _REFUSED_FILTERS}
        self.filters = {name: self._bounded(name, function) for name, function in kept.items()}
        self.filters["jdecode_count"] = self.budget.count
        self.filters["jdecode_check"] = self.budget.check

    def _bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)  # carries over the mark by which Jinja passes a context or an environment
        def bounded(*args: Any, **kwargs: Any) -> Any:
            _check_arguments(args, kwargs)
            start = 1 if hasattr(function, "jinja_pass_arg") else 0
            value, rest = args[start], args[start + 1 :]
            self.budget.spend(1 + (len(value) // 4 if isinstance(value, (list, tuple, range)) else 0))
            if name == "join":
                value = value if isinstance(value, str) else list(value)
                args = (*args[:start], value, *rest)
                separator = rest[0] if rest else kwargs.get("d", "")
                _check_growth(name, str(separator), ([str(part) for part in value],))
            elif name == "replace":
                _check_growth(name, str(value), (*rest, *(kwargs[key] for key in ("old", "new") if key in kwargs)))
            elif name == "format":
                _check_growth(name, str(value), rest)
            elif name == "indent" and len(str(value).splitlines()) * 100 > MAX_CHARS:
                check_chars(MAX_CHARS + 1)
            return self.budget.check(function(*args, **kwargs))

        return bounded

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The underscores keep the names free for keyword arguments of the called macro.
        __self.budget.spend(10)
        _check_arguments(args, kwargs)
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            _check_growth(getattr(__obj, "__name__", ""), owner, args)
        return __self.budget.check(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, _SEQUENCES) and isinstance(times, int):
                    check_chars(len(sequence) * times)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * max(right, 0) > 64:
                raise TemplateError("expected whole numbers of at most 64 bits, got a greater power")
        elif operator == "%" and isinstance(left, str):
            _check_growth("format", left, ())
        return self.budget.check(super().call_binop(context, operator, left, right))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return super().is_safe_attribute(obj, attr, value) and attr not in _REFUSED_METHODS

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and value.__name__ in _REFUSED_METHODS:
            return self.unsafe_undefined(value.__self__, value.__name__)
        if wrapped is not None:
            _check_growth("format", value.__self__, ())
        return wrapped

    def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
        raise TemplateError(f"expected public, read-only attributes, got {attribute!r} of {type(obj).__name__}")


class _GenerationExtension(jinja2.ext.Extension):
    """Accepts ``{% generation %}…{% endgeneration %}``, which marks a reply for training and writes nothing."""

    tags = {"generation"}  # noqa: RUF012, the type that Jinja declares

    def parse(self, parser: jinja2.parser.Parser) -> nodes.Node:
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own tojson escapes <, > and & for HTML, which would change what the model reads.
    if isinstance(indent, int) and indent > 16:
        raise TemplateError(f"expected tojson with an indent up to 16, got {indent}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@functools.lru_cache(maxsize=16)
def _compile(source: str) -> Any:
    environment = _Environment()
    tree = environment.parse(source)
    # Jinja has hooks for calls and for arithmetic. What else takes time in proportion to its operands passes here
    # through a filter that pays for it.
    for node in list(tree.find_all((nodes.For, nodes.AssignBlock, nodes.Concat, nodes.Operand, nodes.Getitem))):
        if isinstance(node, nodes.For):
            node.iter = _filtered(node.iter, "jdecode_count", node.lineno)
        elif isinstance(node, nodes.AssignBlock):
            node.filter = _filtered(node.filter, "jdecode_check", node.lineno)
        elif isinstance(node, nodes.Concat):
            whole = nodes.Concat(node.nodes, lineno=node.lineno)
            node.nodes = [_filtered(whole, "jdecode_check", node.lineno)]
        elif isinstance(node, nodes.Operand):
            node.expr = _filtered(node.expr, "jdecode_check", node.lineno)
        elif isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
            node.node = _filtered(node.node, "jdecode_check", node.lineno)
    return environment.compile(tree)


def _filtered(node: nodes.Node | None, name: str, lineno: int) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=lineno)


def render(source: str, variables: Mapping[str, Any]) -> str:
    """Renders a chat template.

    Args:
      source: Jinja text. ``trim_blocks``, ``lstrip_blocks`` and loop controls are on, as Hugging Face does it.
      variables: what the template sees.

    Returns:
      The text, at most ``MAX_CHARS`` characters.

    Raises:
      TemplateError: something that the sandbox refuses. Jinja's errors, and those of the template's own expressions,
        pass through.
    """
    code = _compile(source)
    environment = _Environment()
    template = environment.template_class.from_code(environment, code, environment.make_globals(None))
    pieces: list[str] = []
    length = 0
    for piece in template.generate(**variables):
        length += len(piece)
        check_chars(length)
        pieces.append(piece)
    return "".join(pieces)
