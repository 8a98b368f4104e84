"""A tokenizer of its own for a corpus: byte-level byte pair encoding (Sennrich et al. 2016; Radford et al. 2019)."""

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from jdecode.text import tokenizer as tokenizer_lib

END_OF_TEXT = "<|endoftext|>"
"""Stands after every document."""

END_OF_TEXT_ID = 0
"""Its id: special tokens come first."""

_NEWLINE = "Ċ"  # as byte-level vocabularies write it

LEAST_SIZE = 1 + 256
"""The end of text, and a token for every byte: whatever the text, it can be written."""

MOST_SIZE = 2**24
"""Far over any vocabulary: the trainer takes memory for all entries at once, and ends the process where it cannot."""


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> tokenizer_lib.Tokenizer:
    """Learns the merges that shorten the texts most. The same texts give the same tokenizer.

    The tokenizer starts a prompt with a newline. Training sequences begin anywhere, also in the middle of a line, so
    the bare text of a first line would leave open how far it is indented; after a newline it is not.

    Args:
      texts: to learn from.
      vocab_size: V, entries in all, from ``LEAST_SIZE`` to ``MOST_SIZE``.

    Returns:
      A tokenizer whose end token is ``END_OF_TEXT``. It has fewer entries where the texts are too short for so many
      merges.

    Raises:
      ValueError: ``vocab_size`` is too small or too large.
    """
    if vocab_size < LEAST_SIZE:
        raise ValueError(f"vocab_size: expected at least {LEAST_SIZE} (every byte and an end), got {vocab_size}")
    if vocab_size > MOST_SIZE:
        raise ValueError(f"vocab_size: expected at most {MOST_SIZE}, got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    newline_id = backend.token_to_id(_NEWLINE)
    assert newline_id is not None  # it is in the alphabet
    backend.post_processor = processors.TemplateProcessing(
        single=f"{_NEWLINE} $A", special_tokens=[(_NEWLINE, newline_id)]
    )
    return tokenizer_lib.Tokenizer(backend, eos_token_ids=(END_OF_TEXT_ID,), prefix_ids=(newline_id,))
