"""Batches by number: which sequences a step reads follows from a key and a count alone.

An epoch shuffles the documents, joins them, cuts the whole into sequences of T + 1 tokens (the last token of one is the
first of the next, so that each token is predicted once) from a random first place on, and shuffles the sequences. All
of this is drawn from a generator seeded by the key and the epoch's number. Nothing is consumed in order, so a run that
resumes at sequence 1,234 reads what it would have read without the pause.
"""

import functools
from collections.abc import Sequence

import jax
import numpy as np


class TokenStream:
    """Sequences cut from shuffled documents, addressed by their number.

    Attributes:
      sequence_len: T.
      num_tokens: of all documents.
      sequences_an_epoch: how many sequences an epoch has; up to two sequences of tokens are left out of each.
    """

    def __init__(self, documents: Sequence[np.ndarray], sequence_len: int) -> None:
        """Args: documents: int ids, each with its end token. sequence_len: T.

        Raises:
          ValueError: the documents are too short for one sequence.
        """
        self._documents = [np.asarray(document, np.int32) for document in documents]
        self.sequence_len = sequence_len
        self.num_tokens = sum(len(document) for document in self._documents)
        # Whatever the first place (under T), so many sequences fit.
        self.sequences_an_epoch = max((self.num_tokens - 1) // sequence_len - 1, 0)
        if not self.sequences_an_epoch:
            raise ValueError(
                f"corpus: expected at least {2 * sequence_len + 1} tokens for sequences of {sequence_len}, got "
                f"{self.num_tokens}; give more text or shorter sequences"
            )
        self._epoch = functools.lru_cache(maxsize=2)(self._cut_epoch)

    def sequences(self, key: jax.Array, first: int, count: int) -> np.ndarray:
        """Returns sequences ``first .. first + count - 1`` of the endless row of epochs: int32 (count, T + 1).

        Args:
          key: of the order. Addressed, not consumed.
          first: how many sequences have been read before.
        """
        key_data = tuple(np.asarray(jax.random.key_data(key)).tolist())
        rows = []
        for number in range(first, first + count):
            epoch, idx = divmod(number, self.sequences_an_epoch)
            tokens, starts = self._epoch(key_data, epoch)
            rows.append(tokens[starts[idx] : starts[idx] + self.sequence_len + 1])
        return np.stack(rows)

    def _cut_epoch(self, key_data: tuple[int, ...], epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns an epoch's joined tokens, and where each of its sequences starts."""
        rng = np.random.default_rng([*key_data, epoch])
        order = rng.permutation(len(self._documents))
        tokens = np.concatenate([self._documents[idx] for idx in order])
        first = int(rng.integers(self.sequence_len))
        starts = first + self.sequence_len * rng.permutation(self.sequences_an_epoch)
        return tokens, starts
