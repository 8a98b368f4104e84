"""How well a model predicts held-out files: nats a token, perplexity, and bits a byte, which compares tokenizers.

Every token of a file is predicted once, its end included, from at least half a sequence of what stands before it (or
all there is): a file longer than a sequence is cut into overlapping pieces, and the overlap is not counted again.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.models import transformer

BATCH_SIZE = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Piece:
    """Some of a file.

    Attributes:
      tokens: int32, at most T + 1 of them.
      num_context: the first so many are only seen, not predicted; at least 1.
    """

    tokens: np.ndarray
    num_context: int

    @property
    def predicted(self) -> np.ndarray:
        """The tokens that are predicted."""
        return self.tokens[self.num_context :]


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeldOutLoss:
    """A sum over held-out text.

    Attributes:
      nats: of all predicted tokens.
      num_tokens: predicted tokens, ends of files included.
      num_bytes: that they stand for, ends of files not.
    """

    nats: float
    num_tokens: int
    num_bytes: int

    @property
    def nats_a_token(self) -> float:
        """The mean loss."""
        return self.nats / self.num_tokens

    @property
    def perplexity(self) -> float:
        """``exp`` of the mean loss a token, infinite where that is more than a float can hold."""
        try:
            return math.exp(self.nats_a_token)
        except OverflowError:
            return math.inf

    @property
    def bits_per_byte(self) -> float:
        """What one byte of text costs."""
        return self.nats / math.log(2) / self.num_bytes

    def check_finite(self, what: str) -> None:
        """Refuses to go on with a broken model.

        Args:
          what: starts the message.

        Raises:
          FloatingPointError: the loss is not finite, or its perplexity is not.
        """
        if not math.isfinite(self.nats) or not math.isfinite(self.perplexity):
            raise FloatingPointError(
                f"{what}: expected a finite loss and perplexity, got {self.nats_a_token:g} nats a token; lower the "
                "learning_rate, lengthen the warm-up, or store the weights in a wider dtype"
            )


def pieces(documents: Sequence[np.ndarray], sequence_len: int, end_token_id: int) -> list[Piece]:
    """Cuts documents for judging.

    Args:
      documents: int ids, each with its end token.
      sequence_len: T.
      end_token_id: stands before a document's first token, as it does in training.
    """
    stride = max(sequence_len // 2, 1)
    cut = []
    for document in documents:
        tokens = np.asarray([end_token_id, *document], np.int32)
        start, num_seen = 0, 1
        while num_seen < len(tokens):
            end = min(start + sequence_len + 1, len(tokens))
            cut.append(Piece(tokens=tokens[start:end], num_context=num_seen - start))
            start, num_seen = start + stride, end
    return cut


def some(all_pieces: Sequence[Piece], count: int) -> list[Piece]:
    """Returns ``count`` pieces, evenly spread, or all where there are fewer."""
    step = max(len(all_pieces) / count, 1.0)
    return [all_pieces[int(idx * step)] for idx in range(min(count, len(all_pieces)))]


def evaluate(
    model: transformer.Transformer, params: Any, judged: Sequence[Piece], token_num_bytes: np.ndarray
) -> HeldOutLoss:
    """Computes the loss on pieces, all of it in the model's own dtype, without a cache.

    Args:
      judged: see ``pieces``.
      token_num_bytes: int, (V,), how many bytes each token stands for.
    """
    width = max(len(piece.tokens) for piece in judged)
    nats = []
    for first in range(0, len(judged), BATCH_SIZE):
        tokens_BT = np.zeros((BATCH_SIZE, width), np.int32)
        is_counted_BT = np.zeros((BATCH_SIZE, width), bool)
        for row, piece in enumerate(judged[first : first + BATCH_SIZE]):
            tokens_BT[row, : len(piece.tokens)] = piece.tokens
            is_counted_BT[row, piece.num_context : len(piece.tokens)] = True
        loss_BT = np.asarray(_losses(model, params, jnp.asarray(tokens_BT)))
        nats.append(float(loss_BT.sum(where=is_counted_BT[:, 1:], dtype=np.float64)))
    return _total(sum(nats), judged, token_num_bytes)


def evaluate_by(
    score: Callable[[list[list[int]]], list[np.ndarray]], judged: Sequence[Piece], token_num_bytes: np.ndarray
) -> HeldOutLoss:
    """Computes the same by a function that scores rows of tokens, such as ``lm.score``.

    Args:
      score: given rows of ids, returns the log-probability of each token but the first, in nats.
      judged, token_num_bytes: as ``evaluate`` takes them.
    """
    nats = []
    for first in range(0, len(judged), BATCH_SIZE):
        rows = judged[first : first + BATCH_SIZE]
        scores = score([piece.tokens.tolist() for piece in rows])
        counted = (-row[piece.num_context - 1 :].sum(dtype=np.float64) for piece, row in zip(rows, scores, strict=True))
        nats.append(float(sum(counted)))
    return _total(sum(nats), judged, token_num_bytes)


@functools.partial(jax.jit, static_argnums=0)
def _losses(model: transformer.Transformer, params: Any, tokens_BT: jax.Array) -> jax.Array:
    """Returns -log p of every token but the first: float32, (B, T - 1)."""
    logits_BTV, _ = model.apply(params, tokens_BT[:, :-1])
    chosen_BT = jnp.take_along_axis(logits_BTV, tokens_BT[:, 1:, None], axis=2)[:, :, 0]
    return jax.nn.logsumexp(logits_BTV, axis=-1) - chosen_BT


def _total(nats: float, judged: Sequence[Piece], token_num_bytes: np.ndarray) -> HeldOutLoss:
    return HeldOutLoss(
        nats=nats,
        num_tokens=sum(len(piece.predicted) for piece in judged),
        num_bytes=int(sum(token_num_bytes[piece.predicted].sum() for piece in judged)),
    )
