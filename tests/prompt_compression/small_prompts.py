"""Prompts, tokenizers and scorers whose numbers are known."""

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdecode.text import token_bytes
from jdecode.text import tokenizer as tokenizer_lib

V = 11
START, TURN, STOP = 0, 1, 2  # the control tokens of ``byte_tokenizer``


def byte_tokenizer(merges: Sequence[str] = (), *, adds_start: bool = False) -> tokenizer_lib.Tokenizer:
    """Makes a byte-level tokenizer: three control tokens, byte b as id b + 3, then the merged pairs in order.

    Args:
      merges: pairs such as ``"t h"``, with ``Ġ`` for a space.
      adds_start: whether ``encode`` begins with ``<|start|>``.
    """
    alias = {byte: char for char, byte in token_bytes.byte_aliases().items()}
    vocabulary = {"<|start|>": START, "<|turn|>": TURN, "<|stop|>": STOP}
    vocabulary.update({alias[byte]: byte + 3 for byte in range(256)})
    pairs = [(left, right) for left, right in (pair.split(" ") for pair in merges)]
    for left, right in pairs:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=pairs))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|turn|>", "<|stop|>"])
    return tokenizer_lib.Tokenizer(backend, bos_token_id=START, prefix_ids=(START,) if adds_start else ())


def language_model(tokenizer: tokenizer_lib.Tokenizer | None = None, vocab_size: int = V) -> Any:
    """Makes what ``compress_prompt`` needs of a language model beside its scores."""
    if tokenizer is not None:
        vocab_size = tokenizer.vocab_size

    def encode(text: str) -> list[int]:
        assert tokenizer is not None
        return tokenizer.encode(text)

    sizes = types.SimpleNamespace(vocab_size=vocab_size, max_positions=64)
    return types.SimpleNamespace(tokenizer=tokenizer, config=sizes, encode=encode)


@dataclasses.dataclass(frozen=True)
class TableScorer:
    """Knows how surprising each id is, wherever it stands.

    Attributes:
      table: nats, by id.
      window_len: see ``TokenScorer``; a longer question fails.
      asked: the windows, as they came.
    """

    table: Sequence[float] | dict[int, float]
    window_len: int = 1000
    asked: list[list[int]] = dataclasses.field(default_factory=list)

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        assert 2 <= len(ids) <= self.window_len
        self.asked.append(list(ids))
        return np.array([self.table[token_id] for token_id in ids[1:]])


@dataclasses.dataclass(frozen=True)
class EchoScorer:
    """Finds an id that the window holds before much less surprising: 1 nat, not 5."""

    window_len: int = 1000

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        return np.array([1.0 if ids[idx] in ids[:idx] else 5.0 for idx in range(1, len(ids))])


class SilentScorer:
    """Fails when it is asked."""

    window_len = 1000

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        raise AssertionError(f"asked about {ids}")
