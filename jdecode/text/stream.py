"""The stream of text out of tokens: nothing half-finished is shown, and stop strings never appear.

Two things can hold text back: the bytes of an unfinished character, and characters that may turn out to begin a stop
string. Both are bounded, so a token costs the same however long the text is.
"""

import codecs
from collections.abc import Iterable, Sequence

from jdecode.text import tokenizer as tokenizer_lib


class StopMatcher:
    """Looks for stop strings in a text that arrives in pieces.

    The stop string that is completed first wins, and of those completed by the same character the longest. This does
    not depend on how the text is cut into pieces. Follows Knuth, Morris, Pratt (1977), one automaton a string.

    Args:
      stop: the stop strings, none empty.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        if isinstance(stop, str):
            raise TypeError("stop: expected a list of strings, got one string; put it into a list")
        for string in stop:
            if not isinstance(string, str):
                raise TypeError(f"stop: expected strings, got {type(string).__name__}")
            if not string:
                raise ValueError("stop: expected stop strings of at least one character, got an empty one; remove it")
            tokenizer_lib.check_text(string, "stop")
        self._stop = sorted(set(stop), key=len, reverse=True)
        self._fallbacks = [_fallback(string) for string in self._stop]
        self._matched = [0] * len(self._stop)  # characters of each stop string that the text ends with
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """Takes the next piece; returns what can be shown. After a stop string, nothing more is."""
        if self.stopped:
            return ""
        if not self._stop:
            return text
        held = self._held + text
        for position, char in enumerate(text, start=len(self._held) + 1):
            for index, (string, fallback) in enumerate(zip(self._stop, self._fallbacks, strict=True)):
                matched = self._matched[index]
                while matched and string[matched] != char:
                    matched = fallback[matched]
                matched += string[matched] == char
                self._matched[index] = matched
                if matched == len(string):
                    self.stopped = True
                    self._held = ""
                    return held[: position - matched]
        shown = len(held) - max(self._matched)
        self._held = held[shown:]
        return held[:shown]

    def finish(self) -> str:
        """Returns what was held back for a stop string that did not come."""
        held, self._held = self._held, ""
        return held


def _fallback(string: str) -> list[int]:
    # fallback[n]: the length of the longest proper prefix of string[:n] that is also its suffix.
    fallback = [0, 0]
    for end in range(1, len(string)):
        length = fallback[end]
        while length and string[length] != string[end]:
            length = fallback[length]
        fallback.append(length + (string[length] == string[end]))
    return fallback


class DetokenizerStream:
    """Turns token ids into text as they arrive.

    All deltas together, ``finish`` included, are ``tokenizer.decode(ids)`` up to the first stop string. No delta ends
    inside a character.

    Args:
      tokenizer: decodes.
      stop: strings that end the text; neither they nor anything after them is shown. See ``StopMatcher``.
      skip_special_tokens: leave control tokens out, as in ``Tokenizer.decode``.
      continues_text: keep a first space that a tokenizer of the sentencepiece type would drop, as the ids follow a
        text that is already shown.

    Attributes:
      stopped: whether a stop string was completed.
      stop_token_count: how many ids had been pushed when it was, the completing one included; None before.

    Example:
      >>> stream = DetokenizerStream(tokenizer, stop=["\\n"])  # doctest: +SKIP
      >>> "".join([*map(stream.push, [[504], [3575, 198]]), stream.finish()])  # doctest: +SKIP
    """

    def __init__(
        self,
        tokenizer: tokenizer_lib.Tokenizer,
        stop: Sequence[str] = (),
        *,
        skip_special_tokens: bool = True,
        continues_text: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._strips_space = tokenizer.strips_first_space and not continues_text
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._matcher = StopMatcher(stop)
        self._shown: list[str] = []
        self._token_count = 0
        self._is_finished = False
        self.stop_token_count: int | None = None

    @property
    def stopped(self) -> bool:
        """Whether a stop string was completed."""
        return self._matcher.stopped

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._shown)

    def push(self, ids: Iterable[int]) -> str:
        """Takes the next ids.

        Args:
          ids: token ids, any number. Those after the one that completes a stop string are not looked at.

        Returns:
          The text that they add and that is certain; often empty.

        Raises:
          ValueError: an id outside the vocabulary, or the stream is finished.
        """
        if self._is_finished:
            raise ValueError("stream: expected no ids after finish(), got some; make a new stream")
        pieces = [self._tokenizer.token_bytes(i, skip_special_tokens=self._skip_special_tokens) for i in ids]
        delta: list[str] = []
        for piece in pieces:
            if self.stopped:
                break
            self._token_count += 1
            delta.append(self._take(self._utf8.decode(piece)))
        return self._show("".join(delta))

    def finish(self) -> str:
        """Ends the stream; returns the rest, in which an unfinished character is U+FFFD. A second call returns ""."""
        if self._is_finished:
            return ""
        self._is_finished = True
        rest = "" if self.stopped else self._take(self._utf8.decode(b"", final=True))
        return self._show(rest + self._matcher.finish())

    def _take(self, text: str) -> str:
        if text and self._strips_space:
            self._strips_space = False
            text = text.removeprefix(" ")
        shown = self._matcher.push(text)
        if self.stopped and self.stop_token_count is None:
            self.stop_token_count = self._token_count
        return shown

    def _show(self, delta: str) -> str:
        if delta:
            self._shown.append(delta)
        return delta
