"""What bytes each token stands for, read off the decoder of a Hugging Face ``tokenizers`` tokenizer.

Text is decoded here, not by the library, for one reason: a stream must be able to cut anywhere. With one byte string
a token, ``decode(ids)`` is the UTF-8 reading of a concatenation, so the text of a prefix of the ids is a prefix of
the text up to an unfinished character, and streaming needs no look-back. The library's own byte-fallback decoder
lacks that property: one stray byte turns the valid characters beside it into replacement characters. On well-formed
sequences both give the same text.

Two kinds of decoder are in use for language models, and both are supported:

- byte level (GPT-2): every character of a token is an alias of one byte;
- sentencepiece: ``▁`` is a space, ``<0x0A>`` is the byte 10, and one leading space of the whole text may be dropped.
"""

import dataclasses
import json
import re
from typing import Any

import tokenizers

SPACE_MARK = "\u2581"  # "▁", which sentencepiece writes for a space
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_aliases() -> dict[str, int]:
    """Returns the character → byte table of byte-level BPE (Radford et al. 2019).

    Printable bytes of Latin-1 stand for themselves; the other 68 are shifted to 256 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    aliases = {chr(byte): byte for byte in printable}
    hidden = [byte for byte in range(256) if byte not in set(printable)]
    aliases.update({chr(256 + index): byte for index, byte in enumerate(hidden)})
    return aliases


_ALIASES = byte_aliases()


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderKind:
    """Says how token strings become bytes.

    Attributes:
      is_byte_level: byte-level aliases; otherwise sentencepiece.
      has_byte_tokens: whether ``<0x0A>`` means a byte (sentencepiece only).
      strips_first_space: whether one leading space of the whole text is dropped.
    """

    is_byte_level: bool
    has_byte_tokens: bool = False
    strips_first_space: bool = False

    def token_bytes(self, token: str, *, is_added: bool) -> bytes:
        """Returns the bytes that a token stands for; added tokens of a byte-level vocabulary stand for themselves."""
        if self.is_byte_level:
            if is_added or not all(char in _ALIASES for char in token):
                return token.encode("utf-8")
            return bytes(_ALIASES[char] for char in token)
        if self.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode("utf-8")


def decoder_kind(backend: tokenizers.Tokenizer) -> DecoderKind:
    """Reads the kind of a tokenizer's decoder.

    Raises:
      ValueError: the decoder is neither byte level nor sentencepiece.
    """
    state: Any = {"type": None} if backend.decoder is None else json.loads(backend.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    names = [step["type"] for step in steps]
    if names == ["ByteLevel"]:
        return DecoderKind(is_byte_level=True)
    is_sentencepiece = (
        len(steps) >= 2
        and names[0] == "Replace"
        and steps[0]["pattern"] == {"String": SPACE_MARK}
        and steps[0]["content"] == " "
        and names[1:] in (["Fuse"], ["ByteFallback", "Fuse"], ["Fuse", "Strip"], ["ByteFallback", "Fuse", "Strip"])
    )
    if is_sentencepiece:
        strip = steps[-1] if names[-1] == "Strip" else {"content": " ", "start": 0, "stop": 0}
        if strip["content"] == " " and strip["start"] in (0, 1) and strip["stop"] == 0:
            return DecoderKind(
                is_byte_level=False, has_byte_tokens="ByteFallback" in names, strips_first_space=strip["start"] == 1
            )
    raise ValueError(
        f"tokenizer decoder: expected ByteLevel, or Replace ▁ / ByteFallback / Fuse / Strip, got "
        f"{' / '.join(map(str, names))}; convert the tokenizer to one of the two"
    )
