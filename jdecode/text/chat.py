"""Chat messages to text and to token ids.

What a message says must never read as a control token: a user who writes ``<|im_end|>`` has written ten
characters, not the end of the turn. ``encode_chat`` therefore has two ways. Where no message holds a control string
or a piece of one, the rendered text is encoded as it is. Otherwise the messages are rendered a second time with every
control string in them broken by a mark; the control tokens that are still found there are the template's own, and
all text between them is encoded as ordinary text, with the marks taken out again.
"""

import datetime
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jinja2

from jdecode.text import template_sandbox
from jdecode.text import tokenizer as tokenizer_lib

TemplateError = template_sandbox.TemplateError

Messages = Sequence[Mapping[str, Any]]

# Unicode keeps these 32 code points out of any interchanged text, so they are free to mark places in one.
_MARKS = tuple(map(chr, range(0xFDD2, 0xFDF0)))


def render(
    template: str,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    bos_token: str | None = None,
    eos_token: str | None = None,
    **extra: Any,
) -> str:
    """Renders messages with a chat template.

    Args:
      template: Jinja source.
      messages: mappings with ``role``, ``content`` and whatever else the template reads.
      add_generation_prompt: end with the header of the assistant's turn.
      bos_token, eos_token: what the template writes for them.
      **extra: more variables, such as ``tools``. ``strftime_now`` may be given to fix the date.

    Returns:
      The text.

    Raises:
      TypeError, ValueError: messages that are not as above, or no messages.
      TemplateError: the template is wrong, refuses the messages (its own words are kept) or is refused.
    """
    if not isinstance(template, str):
        raise TypeError(f"chat template: expected text, got {type(template).__name__}")
    _check_messages(messages)

    def raise_exception(message: Any) -> str:
        raise TemplateError(str(message))

    tokens = {name: token for name, token in (("bos_token", bos_token), ("eos_token", eos_token)) if token is not None}
    variables = {
        "messages": messages,
        "add_generation_prompt": add_generation_prompt,
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        **tokens,
        **extra,
    }
    try:
        return template_sandbox.render(template, variables)
    except jinja2.TemplateSyntaxError as error:
        raise TemplateError(f"chat template: expected Jinja, got at line {error.lineno}: {_one_line(error)}") from None
    except RecursionError:
        raise TemplateError("chat template: expected no endless recursion, got one; fix the template") from None
    except MemoryError:
        raise
    except Exception as error:  # a template can raise whatever its expressions raise
        raise TemplateError(f"chat template: {_one_line(error)}") from None


def chat_template(tokenizer: tokenizer_lib.Tokenizer) -> str:
    """Returns the template of the model.

    Raises:
      ValueError: it has none.
    """
    if tokenizer.chat_template is None:
        raise ValueError("chat: expected a model with a chat template, got one without; pass raw text instead")
    return tokenizer.chat_template


def encode_chat(
    tokenizer: tokenizer_lib.Tokenizer,
    messages: Messages,
    *,
    add_generation_prompt: bool = True,
    template: str | None = None,
    **extra: Any,
) -> list[int]:
    """Turns messages into token ids.

    The ids start with exactly one BOS token if the template writes one or the tokenizer adds one. Control tokens come
    from the template alone.

    Args:
      tokenizer: with a chat template, unless ``template`` is given.
      messages: see ``render``.
      add_generation_prompt: end with the header of the assistant's turn.
      template: used in place of the tokenizer's.
      **extra: more variables for the template.

    Raises:
      ValueError: there is no template, or as ``render``.
    """
    source = chat_template(tokenizer) if template is None else template
    bos, eos = tokenizer.bos_token_id, next(iter(tokenizer.eos_token_ids), None)
    settings: dict[str, Any] = {
        "add_generation_prompt": add_generation_prompt,
        "bos_token": None if bos is None else tokenizer.token_string(bos),
        "eos_token": None if eos is None else tokenizer.token_string(eos),
    }
    text = render(source, messages, **settings, **extra)
    strings = list(_strings([messages, extra]))
    if any(_mark(string, _MARKS[0], tokenizer) != string for string in strings):
        mark = next((mark for mark in _MARKS if all(mark not in string for string in [text, *strings])), None)
        if mark is None:
            raise ValueError("chat: expected messages without noncharacters U+FDD2 to U+FDEF, got all; remove them")
        change = functools.partial(_marked_copy, mark=mark, tokenizer=tokenizer)
        marked = render(source, change(messages), **settings, **change(extra))
        if marked.replace(mark, "") != text:
            raise ValueError("chat: expected messages without control strings that the template acts on; remove them")
        ids = _encode_marked(tokenizer, marked, mark)
    else:
        ids = tokenizer.encode(text, add_special_tokens=False)
    return _with_one_bos(tokenizer, ids)


def _encode_marked(tokenizer: tokenizer_lib.Tokenizer, marked: str, mark: str) -> list[int]:
    ids: list[int] = []
    position = 0
    for start, end, token_id in [*tokenizer.special_spans(marked), (len(marked), len(marked), -1)]:
        piece = marked[position:start].replace(mark, "")
        if piece:
            ids += tokenizer.encode_literal(piece, starts_text=position == 0)
        if token_id >= 0:
            ids.append(token_id)
        position = end
    return ids


def _with_one_bos(tokenizer: tokenizer_lib.Tokenizer, ids: list[int]) -> list[int]:
    bos = tokenizer.bos_token_id
    start = 0
    while start < len(ids) and ids[start] == bos:
        start += 1
    return [bos, *ids[start:]] if bos is not None and (start or tokenizer.adds_bos) else ids


def _marked_copy(value: Any, *, mark: str, tokenizer: tokenizer_lib.Tokenizer) -> Any:
    """Copies nested messages with every text in them marked."""
    change = functools.partial(_marked_copy, mark=mark, tokenizer=tokenizer)
    if isinstance(value, str):
        return _mark(value, mark, tokenizer)
    if isinstance(value, Mapping):
        return {key: change(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [change(entry) for entry in value]
    return value


def _mark(text: str, mark: str, tokenizer: tokenizer_lib.Tokenizer) -> str:
    """Puts marks into a text so that it neither holds a control string nor can become part of one.

    A control string is broken behind its first character. The end of the text can be the start of a control string
    that what follows completes, and the start of the text can be the end of one; they are broken in the same way.
    """
    while spans := tokenizer.special_spans(text):  # again, as what is broken can have hidden what overlaps it
        for start, end, token_id in reversed(spans):
            string = tokenizer.token_string(token_id)
            if len(string) < 2:
                raise ValueError(f"chat: expected messages without the control character {string!r}, got one")
            at = text.find(string, start, end)
            # A token that is matched after normalization need not be written as it is named.
            broken = mark.join(text[start:end]) if at < 0 else text[start : at + 1] + mark + text[at + 1 : end]
            text = text[:start] + broken + text[end:]
    starts, ends, longest = _edges(tokenizer.special_strings)
    for length in range(min(longest, len(text)), 0, -1):
        if text[-length:] in starts:
            text = text[: len(text) - length + 1] + mark + text[len(text) - length + 1 :]
            break
    for length in range(min(longest, len(text)), 0, -1):
        if text[:length] in ends:
            return text[: length - 1] + mark + text[length - 1 :]
    return text


@functools.lru_cache(maxsize=8)
def _edges(control: tuple[str, ...]) -> tuple[frozenset[str], frozenset[str], int]:
    """Lists what control strings start with, what they end with, and the length of the longest of these."""
    starts = frozenset(string[:length] for string in control for length in range(1, len(string)))
    ends = frozenset(string[-length:] for string in control for length in range(1, len(string)))
    return starts, ends, max(map(len, starts), default=0)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for entry in value.values():
            yield from _strings(entry)
    elif isinstance(value, (list, tuple)):
        for entry in value:
            yield from _strings(entry)


def _check_messages(messages: Messages) -> None:
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise TypeError(f"messages: expected a list of mappings, got {type(messages).__name__}")
    if not messages:
        raise ValueError("messages: expected at least one, got none")
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"messages[{index}]: expected a mapping with a role, got {type(message).__name__}")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{index}]: expected a role as text, got {message.get('role')!r}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
