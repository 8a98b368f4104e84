"""What of a prompt stays or goes together: words, numbers, characters; and the structure that what stays brings along.

A token is never split, so a unit is a run of tokens::

    |-| Mix| 2|,|5|00| g| flour|.|\\n|        tokens
     s  1    2------- 3   4     s  s          units, and structure: the list marker, the sentence end, the line break

A unit that stays brings the structure of its sentence (its end) and of its line (its list marker, its line break);
structure of which nothing else stays goes. Blanks go with what they precede, as in the vocabularies of most models.
"""

import bisect
import dataclasses
import re
from collections.abc import Sequence

from jdecode.prompt_compression import token_text as token_text_lib

UNITS = ("token", "word", "sentence")
"""How finely a prompt may be cut."""

NUMBER = re.compile(r"(?:(?<!\w)[-+−])?[$€£¥]?\d+(?:[.,:/'’-]\d+)*[%‰]?")
WORD = re.compile(r"\w+(?:[-'’.]\w+)*")
SENTENCE_END = re.compile(r"[.!?…]+[\"'”’)\]]*(?=\s|$)|[。！？]+[」』”]*")
LIST_MARKER = re.compile(r"^[ \t]*(?:[-*+•–>]|#{1,6}|\(?(?:\d{1,3}|[A-Za-z])[.)])(?=[ \t])", re.MULTILINE)
LINE_BREAKS = re.compile(r"(?:[ \t]*\r?\n)+")
ROLE = re.compile(r"\w{0,24}(\n+|$)")
"""What may follow a control token and still be the template's: a role and its line break."""

_NOTHING: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unit:
    """Tokens that stay or go together.

    Attributes:
      tokens: their indices, consecutive.
      structure: indices of the tokens that stay when these do.
    """

    tokens: tuple[int, ...]
    structure: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Division:
    """A prompt as units.

    Attributes:
      units: in order; every token is in one unit, or is structure, or is fixed.
      structure: by the index of each token, those that stay when it does.
      fixed: tokens that always stay and are in no unit.
      roles: tokens of units that always stay: the names of roles in a chat.
    """

    units: tuple[Unit, ...]
    structure: tuple[frozenset[int], ...]
    fixed: frozenset[int]
    roles: frozenset[int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Parts:
    """Cuts a text behind some of its places; parts are numbered from 0.

    Attributes:
      ends: of the parts, in characters, ascending; the last part has no end.
      structure: by the number of a part, its tokens that stay if anything of it does.
    """

    ends: tuple[int, ...]
    structure: dict[int, frozenset[int]]

    def number(self, char: int) -> int:
        """Returns the part that a character lies in."""
        return bisect.bisect_right(self.ends, char)


def divide_ids(ids: Sequence[int]) -> Division:
    """Makes each token a unit, for ids whose text is not known."""
    units = tuple(Unit(tokens=(idx,), structure=_NOTHING) for idx in range(len(ids)))
    return Division(units=units, structure=(_NOTHING,) * len(ids), fixed=_NOTHING, roles=_NOTHING)


def divide(placed: token_text_lib.TokenText, unit: str, *, keep_structure: bool) -> Division:
    """Divides a prompt.

    Args:
      placed: its tokens in its text.
      unit: one of ``UNITS``. Numbers and characters are whole in each.
      keep_structure: whether what stays brings the structure of its line and sentence along; otherwise sentence ends,
        list markers and line breaks are units like others.
    """
    num_tokens = len(placed.spans)
    fixed = placed.fixed
    lines, sentences = _lines(placed), _sentences(placed)
    parts = [(lines.number(start), sentences.number(start)) for start, _ in placed.spans]
    structure = [_NOTHING] * num_tokens
    if keep_structure:
        known = {
            (line, sentence): lines.structure.get(line, _NOTHING) | sentences.structure.get(sentence, _NOTHING)
            for line, sentence in set(parts)
        }
        structure = [known[part] - fixed for part in parts]
    apart = fixed.union(*structure)
    joined = _joined(placed, unit)
    if unit == "sentence":
        joined |= {idx for idx in range(1, num_tokens) if parts[idx] == parts[idx - 1]}
    runs: list[list[int]] = []
    for idx in range(num_tokens):
        if idx in apart:
            continue
        if runs and idx in joined and runs[-1][-1] == idx - 1:
            runs[-1].append(idx)
        else:
            runs.append([idx])
    units = (Unit(tokens=tuple(run), structure=frozenset().union(*(structure[idx] for idx in run))) for run in runs)
    return Division(units=tuple(units), structure=tuple(structure), fixed=fixed, roles=_roles(placed))


def _joined(placed: token_text_lib.TokenText, unit: str) -> set[int]:
    """Returns the tokens that go with the one before: of one number, word or character, or behind a blank."""
    joined = set()
    patterns = (NUMBER,) if unit == "token" else (NUMBER, WORD)
    for pattern in patterns:
        for match in pattern.finditer(placed.text):
            joined.update(placed.tokens_in(*match.span())[1:])
    for idx in range(1, len(placed.spans)):
        (before, end_before), (start, end) = placed.spans[idx - 1], placed.spans[idx]
        is_blank = placed.text[before:end_before].strip(" \t") == "" and before < end_before
        if start < end and (start < end_before or is_blank):
            joined.add(idx)
    return joined


def _lines(placed: token_text_lib.TokenText) -> _Parts:
    breaks = [match.span() for match in LINE_BREAKS.finditer(placed.text)]
    ends = tuple(end for _, end in breaks)
    structure = {number: _bare_tokens(placed, start, end) for number, (start, end) in enumerate(breaks)}
    for match in LIST_MARKER.finditer(placed.text):
        number = bisect.bisect_right(ends, match.start())
        marker = _bare_tokens(placed, *match.span(), is_marker=True)
        structure[number] = structure.get(number, _NOTHING) | marker
    return _Parts(ends=ends, structure=structure)


def _sentences(placed: token_text_lib.TokenText) -> _Parts:
    marks = [match.span() for match in SENTENCE_END.finditer(placed.text)]
    ends = sorted({end for _, end in marks} | {match.end() for match in LINE_BREAKS.finditer(placed.text)})
    structure = {bisect.bisect_left(ends, end): _bare_tokens(placed, start, end) for start, end in marks}
    return _Parts(ends=tuple(ends), structure=structure)


def _bare_tokens(placed: token_text_lib.TokenText, start: int, end: int, *, is_marker: bool = False) -> frozenset[int]:
    """Returns the tokens of a mark, or none where they hold a part of a word or of another character too."""
    tokens = placed.tokens_in(start, end)
    if not tokens:
        return _NOTHING
    first, last = placed.spans[tokens[0]][0], placed.spans[tokens[-1]][1]
    held = placed.text[first:start] + placed.text[end:last]
    if not is_marker:
        held += placed.text[start:end]
    is_shared = len(placed.tokens_in(first, last)) > len(tokens)
    return _NOTHING if is_shared or any(char.isalnum() for char in held) else frozenset(tokens)


def _roles(placed: token_text_lib.TokenText) -> frozenset[int]:
    """Returns the tokens that name the role of a turn, in the line of a control token."""
    control = sorted(placed.spans[idx] for idx in placed.fixed if placed.spans[idx][0] < placed.spans[idx][1])
    roles: set[int] = set()
    for number, (_, end) in enumerate(control):
        stop = control[number + 1][0] if number + 1 < len(control) else len(placed.text)
        if match := ROLE.match(placed.text[end:stop]):
            roles.update(placed.tokens_in(end, end + match.end()))
    return frozenset(roles)
