"""The pre-tokenizers of byte-level BPE vocabularies, by the name under which a GGUF refers to them.

A pre-tokenizer cuts a text into words before BPE; merges never cross a cut. The expressions are facts of the models:
each is the one that its vocabulary was trained with.
"""

import dataclasses
import difflib

from tokenizers import Regex, normalizers, pre_tokenizers

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_DIGIT = r"\p{N}"
_ENGLISH_SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ENGLISH_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_TAIL}"
_QWEN2 = rf"{_ENGLISH_SUFFIX}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_TAIL}"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_TAIL_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = rf"{_LEAD}{_UPPER}*{_LOWER}+|{_LEAD}{_UPPER}+{_LOWER}*|\p{{N}}|{_TAIL_SLASH}"
_GPT4O = (
    rf"{_LEAD}{_UPPER}*{_LOWER}+{_ENGLISH_SUFFIX}?|{_LEAD}{_UPPER}+{_LOWER}*{_ENGLISH_SUFFIX}?"
    rf"|\p{{N}}{{1,3}}|{_TAIL_SLASH}"
)


@dataclasses.dataclass(frozen=True)
class _Splitting:
    """Expressions applied one after another, each cutting the pieces that the one before left.

    Attributes:
      expressions: what is matched becomes a piece of its own, and so does what lies between matches.
      normalizes: whether text is first brought to Unicode form NFC.
      keeps_whole_words: whether a word that is itself a token is taken whole, merges or not.
      adds_bos: whether a file that does not say so starts texts with BOS.
    """

    expressions: tuple[str, ...]
    normalizes: bool = False
    keeps_whole_words: bool = False
    adds_bos: bool = False


_BY_DIGITS = _Splitting((_DIGIT, _GPT2))
_LLAMA3_SPLITTING = _Splitting((_LLAMA3,), keeps_whole_words=True, adds_bos=True)
_KNOWN = {
    "default": _Splitting((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]")),
    "gpt-2": _Splitting((_GPT2,)),
    "smollm": _BY_DIGITS,
    "starcoder": _BY_DIGITS,
    "refact": _BY_DIGITS,
    "codeshell": _BY_DIGITS,
    "llama-bpe": _LLAMA3_SPLITTING,
    "llama3": _LLAMA3_SPLITTING,
    "llama-v3": _LLAMA3_SPLITTING,
    "dbrx": _Splitting((_LLAMA3,)),
    "qwen2": _Splitting((_QWEN2,), normalizes=True),
    "deepseek-r1-qwen": _Splitting((_QWEN2,)),
    "tekken": _Splitting((_TEKKEN,), keeps_whole_words=True, adds_bos=True),
    "gpt-4o": _Splitting((_GPT4O,)),
}


def _splitting(name: str) -> _Splitting:
    if name not in _KNOWN:
        near = difflib.get_close_matches(name, _KNOWN, n=1)
        hint = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(f"tokenizer.ggml.pre: expected one of {', '.join(_KNOWN)}, got {name!r}{hint}")
    return _KNOWN[name]


def find(name: str) -> tuple[normalizers.Normalizer | None, pre_tokenizers.PreTokenizer]:
    """Returns the normalizer, if any, and the pre-tokenizer of a name.

    Raises:
      ValueError: an unknown name; the message lists the known ones.
    """
    splitting = _splitting(name)
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in splitting.expressions]
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return normalizers.NFC() if splitting.normalizes else None, pre_tokenizers.Sequence([*splits, bytes_only])


def keeps_whole_words(name: str) -> bool:
    """Says whether a word that is itself a token is taken whole, merges or not."""
    return _splitting(name).keeps_whole_words


def adds_bos(name: str) -> bool:
    """Says whether a file that does not say so starts texts with BOS."""
    return name in _KNOWN and _KNOWN[name].adds_bos
