"""What a caller wants to keep of a prompt, as tokens."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from jdecode import request
from jdecode.prompt_compression import token_text as token_text_lib

Protected = str | range | tuple[int, int]
"""A string (each of its occurrences), a range of token indices, or a span of characters (start, end)."""


def protected_tokens(
    placed: token_text_lib.TokenText | None,
    protected: Protected | Sequence[Protected],
    *,
    prompt: Any,
    num_tokens: int,
) -> frozenset[int]:
    """Returns the indices of the tokens that protected things touch.

    Args:
      placed: the prompt's tokens in its text; ``None`` without a tokenizer.
      protected: one thing, or a list of them.
      prompt: as the caller gave it: spans of characters count in it, where it is text.
      num_tokens: of the prompt.

    Raises:
      ValueError, TypeError: it is none of these, or nothing of the prompt; one line.
    """
    things = [protected] if isinstance(protected, str | range) or _is_span(protected) else protected
    if not isinstance(things, Sequence):
        raise TypeError(f"protected: expected a list of strings, ranges and spans, got {protected!r}")
    tokens: set[int] = set()
    for thing in things:
        if isinstance(thing, range):
            tokens.update(_range_tokens(thing, num_tokens))
            continue
        if placed is None:
            raise ValueError(f"protected: expected ranges of token indices (no tokenizer, no text), got {thing!r}")
        if isinstance(thing, str):
            spans = _occurrences(placed.text, thing)
        elif _is_span(thing):
            spans = [_checked_span(thing, placed.text, prompt)]
        else:
            raise TypeError(f"protected: expected a string, a range or a span (start, end), got {thing!r}")
        for start, end in spans:
            tokens.update(placed.tokens_in(start, end))
    return frozenset(tokens)


def _is_span(thing: Any) -> TypeGuard[tuple[int, int]]:
    return isinstance(thing, tuple) and len(thing) == 2 and all(request.is_integer(place) for place in thing)


def _range_tokens(tokens: range, num_tokens: int) -> range:
    if len(tokens) and not (min(tokens) >= 0 and max(tokens) < num_tokens):
        raise ValueError(f"protected: expected token indices from 0 to {num_tokens - 1}, got {tokens!r}")
    return tokens


def _checked_span(span: tuple[int, int], text: str, prompt: Any) -> tuple[int, int]:
    if isinstance(prompt, str) and prompt != text:
        raise ValueError(
            f"protected: expected a tokenizer that gives back the prompt's characters, got one that does not for the "
            f"span {span!r}; give strings or ranges of token indices"
        )
    if not 0 <= span[0] <= span[1] <= len(text):
        raise ValueError(f"protected: expected a span within 0 to {len(text)} characters, got {span!r}")
    return span


def _occurrences(text: str, string: str) -> list[tuple[int, int]]:
    if not string:
        raise ValueError("protected: expected strings with characters, got an empty one; leave it out")
    places, at = [], text.find(string)
    while at >= 0:
        places.append((at, at + len(string)))
        at = text.find(string, at + 1)
    if not places:
        raise ValueError(f"protected: expected a string that the prompt holds, got {string!r}"[:200])
    return places
