"""Builds a ``tokenizers.Tokenizer`` from the vocabulary in a GGUF's metadata.

Two models of vocabulary occur in language models of this format:

- ``gpt2``: byte-level BPE. The file lists tokens and ranked merges, and only names its pre-tokenizer.
- ``llama``: sentencepiece BPE. The file lists tokens with scores and no merges. Sentencepiece joins, as long as it
  can, the neighbouring pair whose joined token has the highest score, the leftmost of equals. That is a BPE whose
  merges are all splits of all tokens, ranked by the score of what they make (see ``_merges_from_scores``).
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, processors

from jdecode.text import pre_tokenization, token_bytes

# tokenizer.ggml.token_type
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)

_PREFIX = "tokenizer.ggml."


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufVocabulary:
    """Holds what a GGUF says about its tokenizer. See ``tokenizer.Tokenizer`` for the meaning of the parts."""

    backend: tokenizers.Tokenizer
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    chat_template: str | None
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]


def build(fields: Mapping[str, Any], *, control_strings: Sequence[str] = ()) -> GgufVocabulary:
    """Builds the tokenizer of a GGUF.

    Args:
      fields: metadata key → Python value.
      control_strings: tokens that count as control tokens even where the file calls them ordinary.

    Raises:
      ValueError: a key is missing or malformed, or names what is not supported.
    """
    model = _get(fields, "model", str)
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if model not in builders:
        raise ValueError(
            f"{_PREFIX}model: expected {' or '.join(builders)}, got {model!r}; use a folder with tokenizer.json"
        )
    tokens = _get_list(fields, "tokens", str)
    if not tokens:
        raise ValueError(f"{_PREFIX}tokens: expected at least one token, got none")
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        twice = next(token for token_id, token in enumerate(tokens) if vocabulary[token] != token_id)
        raise ValueError(f"{_PREFIX}tokens: expected distinct tokens, got {twice!r} twice")
    ids = {name: _get_id(fields, f"{name}_token_id", len(tokens)) for name in ("bos", "eos", "eot", "eom", "unknown")}
    types = _token_types(fields, tokens, ids, control_strings)
    backend = builders[model](fields, tokens, vocabulary, types, ids["unknown"])
    # To sentencepiece a space and a literal ▁ are the same, also inside user-defined tokens ("  "): these are matched
    # after normalization. Not so where normalization would put the first space before the token itself.
    _add_tokens(backend, tokens, types, is_normalized=model == "llama" and not _adds_space(fields))
    if fields.get(f"{_PREFIX}add_sep_token"):
        raise ValueError(f"{_PREFIX}add_sep_token: expected false, got true, which is not supported")
    adds_bos_unless_said = ids["bos"] is not None and (
        model == "llama" or pre_tokenization.adds_bos(_get(fields, "pre", str, "default"))
    )
    prefix_ids = _affix(fields, "bos", ids["bos"], adds_bos_unless_said)
    suffix_ids = _affix(fields, "eos", ids["eos"], False)
    if prefix_ids or suffix_ids:  # so that a saved tokenizer.json says the same to other readers
        backend.post_processor = processors.TemplateProcessing(
            single=[*(tokens[i] for i in prefix_ids), "$A", *(tokens[i] for i in suffix_ids)],
            special_tokens=[(tokens[i], i) for i in {*prefix_ids, *suffix_ids}],
        )
    return GgufVocabulary(
        backend=backend,
        bos_token_id=ids["bos"],
        eos_token_ids=tuple(i for name in ("eos", "eot", "eom") if (i := ids[name]) is not None),
        chat_template=_chat_template(fields),
        prefix_ids=prefix_ids,
        suffix_ids=suffix_ids,
    )


def _byte_level(
    fields: Mapping[str, Any],
    tokens: Sequence[str],
    vocabulary: dict[str, int],
    types: Sequence[int],
    unknown_id: int | None,
) -> tokenizers.Tokenizer:
    del tokens, types, unknown_id
    if _get(fields, "add_space_prefix", bool, False):
        raise ValueError(f"{_PREFIX}add_space_prefix: expected false for a gpt2 vocabulary, got true; not supported")
    name = _get(fields, "pre", str, "default")
    normalizer, pre_tokenizer = pre_tokenization.find(name)
    merges: list[tuple[str, str]] = []
    for merge in _get_list(fields, "merges", str):
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ValueError(f"{_PREFIX}merges: expected two tokens that make a third, got {merge!r}")
        merges.append((left, right))
    model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre_tokenization.keeps_whole_words(name))
    backend = tokenizers.Tokenizer(model)
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizer
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(
    fields: Mapping[str, Any],
    tokens: Sequence[str],
    vocabulary: dict[str, int],
    types: Sequence[int],
    unknown_id: int | None,
) -> tokenizers.Tokenizer:
    if fields.get(f"{_PREFIX}precompiled_charsmap"):
        raise ValueError(f"{_PREFIX}precompiled_charsmap: expected none for a llama vocabulary, got one; not supported")
    if fields.get(f"{_PREFIX}remove_extra_whitespaces"):
        raise ValueError(f"{_PREFIX}remove_extra_whitespaces: expected false, got true, which is not supported")
    scores = _get_list(fields, "scores", float)
    if len(scores) != len(tokens):
        raise ValueError(f"{_PREFIX}scores: expected {len(tokens)}, one for each token, got {len(scores)}")
    has_all_bytes = all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    if not has_all_bytes and unknown_id is None:
        raise ValueError(f"{_PREFIX}tokens: expected the 256 byte tokens or an unknown token, got neither")
    model = models.BPE(
        vocab=vocabulary,
        merges=_merges_from_scores(tokens, scores, types),
        unk_token=None if unknown_id is None else tokens[unknown_id],
        fuse_unk=True,
        byte_fallback=has_all_bytes,
    )
    backend = tokenizers.Tokenizer(model)
    adds_space = _adds_space(fields)
    mark = token_bytes.SPACE_MARK
    spaces = normalizers.Replace(" ", mark)
    # Every piece between control tokens gets the space, as each is normalised on its own.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(mark), spaces]) if adds_space else spaces
    steps = [decoders.Replace(mark, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return backend


def _merges_from_scores(tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]) -> list[tuple[str, str]]:
    """Lists every split of every ordinary token into two ordinary tokens, best result first.

    Control, byte and unused tokens take no part, so no sequence of characters in a text can become one of them.
    Splits of one token are equals to sentencepiece, which takes the leftmost in the text. A BPE must rank them; their
    order here is that of the cut, and any order gave the same ids on random vocabularies over two letters.
    """
    mergeable = {token: i for i, token in enumerate(tokens) if types[i] in (_NORMAL, _USER_DEFINED)}
    ranked: list[tuple[float, int]] = []
    for token, token_id in mergeable.items():
        if len(token) > 1:
            if math.isnan(scores[token_id]):
                raise ValueError(f"{_PREFIX}scores: expected a number for token {token!r}, got NaN")
            ranked.append((-scores[token_id], token_id))
    ranked.sort()
    merges: list[tuple[str, str]] = []
    for _, token_id in ranked:
        token = tokens[token_id]
        splits = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [split for split in splits if split[0] in mergeable and split[1] in mergeable]
    return merges


def _token_types(
    fields: Mapping[str, Any],
    tokens: Sequence[str],
    ids: Mapping[str, int | None],
    control_strings: Sequence[str],
) -> list[int]:
    types = _get_list(fields, "token_type", int, [_NORMAL] * len(tokens))
    if len(types) != len(tokens):
        raise ValueError(f"{_PREFIX}token_type: expected {len(tokens)}, one for each token, got {len(types)}")
    types = list(types)
    for name in ("bos", "eos", "eot", "eom"):
        token_id = ids[name]
        if token_id is not None and types[token_id] == _NORMAL:
            types[token_id] = _CONTROL
    known = frozenset(control_strings)
    for token_id, token in enumerate(tokens):
        if token in known:
            types[token_id] = _CONTROL
    return types


def _adds_space(fields: Mapping[str, Any]) -> bool:
    return _get(fields, "add_space_prefix", bool, True)


def _add_tokens(
    backend: tokenizers.Tokenizer, tokens: Sequence[str], types: Sequence[int], *, is_normalized: bool
) -> None:
    """Makes control and user-defined tokens known, so that they are cut out of a text before anything else."""
    for wanted, is_special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        added = [
            tokenizers.AddedToken(token, normalized=is_normalized and not is_special, special=is_special)
            for token, token_type in zip(tokens, types, strict=True)
            if token_type in wanted and token
        ]
        backend.add_special_tokens(added) if is_special else backend.add_tokens(added)


def _chat_template(fields: Mapping[str, Any]) -> str | None:
    template = fields.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise ValueError(f"tokenizer.chat_template: expected text, got {type(template).__name__}")
    return template


def _affix(fields: Mapping[str, Any], name: str, token_id: int | None, unless_said: bool) -> tuple[int, ...]:
    adds = _get(fields, f"add_{name}_token", bool, unless_said)
    if adds and token_id is None:
        raise ValueError(f"{_PREFIX}{name}_token_id: expected an id, as add_{name}_token is true, got none")
    return (token_id,) if adds and token_id is not None else ()


def _get_id(fields: Mapping[str, Any], name: str, size: int) -> int | None:
    token_id = fields.get(f"{_PREFIX}{name}")
    if token_id is None:
        return None
    if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < size:
        raise ValueError(f"{_PREFIX}{name}: expected an id from 0 to {size - 1}, got {token_id!r}")
    return token_id


_REQUIRED = object()


def _get(fields: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = fields.get(f"{_PREFIX}{name}")
    if value is None:
        if default is _REQUIRED:
            raise ValueError(f"{_PREFIX}{name}: expected {kind.__name__}, got nothing; the file has no vocabulary")
        return default
    if not isinstance(value, kind):
        raise ValueError(f"{_PREFIX}{name}: expected {kind.__name__}, got {type(value).__name__}")
    return value


def _get_list(fields: Mapping[str, Any], name: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = fields.get(f"{_PREFIX}{name}")
    if value is None and default is not _REQUIRED:
        return default
    kinds = (int, float) if kind is float else (kind,)
    if value is None or isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        got = "nothing" if value is None else type(value).__name__
        raise ValueError(f"{_PREFIX}{name}: expected a list of {kind.__name__}, got {got}")
    wrong = next((entry for entry in value if not isinstance(entry, kinds)), None)
    if wrong is not None:
        raise ValueError(f"{_PREFIX}{name}: expected a list of {kind.__name__}, got one with {wrong!r}")
    return value
