"""Where the tokens of a prompt stand in its text."""

import bisect
import dataclasses
import itertools
from collections.abc import Sequence

from jdecode.text import tokenizer as tokenizer_lib

Span = tuple[int, int]
"""Start and end, half open."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenText:
    """A text and the characters of it that each token holds.

    A token that ends within a character, or starts within one, has the whole of it: so tokens that share a character
    have overlapping spans.

    Attributes:
      text: control strings included, but without what ``encode`` puts round a text.
      spans: for each token, the characters; empty for what ``encode`` puts round a text.
      fixed: indices of tokens that are no text: control tokens, and what ``encode`` puts round a text.
      num_start: how many of the first tokens ``encode`` puts before a text.
    """

    text: str
    spans: tuple[Span, ...]
    fixed: frozenset[int]
    num_start: int

    def tokens_in(self, start: int, end: int) -> range:
        """Returns the tokens that hold any of the characters ``start`` to ``end`` (half open)."""
        first = bisect.bisect_right(self.spans, start, key=lambda span: span[1])
        return range(first, max(first, bisect.bisect_left(self.spans, end, key=lambda span: span[0])))


def token_text(ids: Sequence[int], tokenizer: tokenizer_lib.Tokenizer) -> TokenText:
    """Places tokens in the text that they make.

    Args:
      ids: each within the tokenizer's vocabulary; ids past it stand for no text.
      tokenizer: of the ids.
    """
    prefix, suffix = tokenizer.prefix_ids, tokenizer.suffix_ids
    ids = tuple(ids)
    first = len(prefix) if ids[: len(prefix)] == prefix else 0
    last = len(ids) - len(suffix) if suffix and ids[first:][-len(suffix) :] == suffix else len(ids)
    pieces = [b""] * len(ids)
    for idx in range(first, last):
        if ids[idx] < tokenizer.vocab_size:
            pieces[idx] = tokenizer.token_bytes(ids[idx], skip_special_tokens=False)
    if tokenizer.strips_first_space and first < last:
        pieces[first] = pieces[first].removeprefix(b" ")
    special = (idx for idx, token_id in enumerate(ids) if token_id in tokenizer.special_ids)
    text, spans = _characters(pieces)
    fixed = frozenset([*special, *range(first), *range(last, len(ids))])
    return TokenText(text=text, spans=spans, fixed=fixed, num_start=first)


def _characters(pieces: Sequence[bytes]) -> tuple[str, tuple[Span, ...]]:
    """Decodes joined pieces, and places each in the text; a byte that is no UTF-8 becomes one U+FFFD."""
    # `surrogateescape` turns each stray byte into one character, so that the bytes of every character are known.
    text = b"".join(pieces).decode("utf-8", errors="surrogateescape")
    widths = (len(char.encode("utf-8", errors="surrogateescape")) for char in text)
    starts = list(itertools.accumulate(widths, initial=0))[:-1]  # the first byte of each character
    spans, at = [], 0
    for piece in pieces:
        end = at + len(piece)
        stop = bisect.bisect_left(starts, end)
        spans.append((bisect.bisect_right(starts, at) - 1 if piece else stop, stop))
        at = end
    return "".join("\ufffd" if "\udc80" <= char <= "\udcff" else char for char in text), tuple(spans)
