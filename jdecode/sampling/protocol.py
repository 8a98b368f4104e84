"""The numbers of a batch's sampling, and the contract that every transform of logits keeps.

Two kinds of object meet here. A transform is static: a frozen, hashable dataclass that says *what* is done and goes
into ``jax.jit`` by closure or as a static argument. ``SamplingParams`` is traced: it says *how much*, one entry a row,
so rows differ freely and no value compiles anything again.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax

# Fills up lists of token ids to a common width. No vocabulary reaches it, and scatters drop it; a negative filler
# would not do, because jax counts negative indices from the end.
PADDING_ID = 2**31 - 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """Holds the numbers of a batch's sampling: one entry a row, all traced, so that no value recompiles.

    ``standard.params_from_configs`` builds it. X is the padded width of a list of ids (each list has its own), T that
    of the prompts. ``SamplingConfig`` says what each number means.

    Attributes:
      temperature_B, top_p_B, min_p_B, typical_p_B, repetition_penalty_B, presence_penalty_B, frequency_penalty_B:
        float32.
      top_k_B, no_repeat_ngram_size_B, min_new_tokens_B: int32, 0 is off.
      bias_ids_BX: int32, padded with ``PADDING_ID``; ``bias_values_BX``: float32, added to the logits of those ids.
      allowed_ids_BX: int32, padded; a row without any allows every token.
      banned_ids_BX: int32, padded.
      stop_ids_BX: int32, padded; what ``min_new_tokens_B`` holds back.
      prompt_ids_BT: int32, padded; ``prompt_len_B``: int32, how many of them are real.
      history_len: how many tokens, prompt and output together, a row can ever hold. Static.
    """

    temperature_B: jax.Array
    top_k_B: jax.Array
    top_p_B: jax.Array
    min_p_B: jax.Array
    typical_p_B: jax.Array
    repetition_penalty_B: jax.Array
    presence_penalty_B: jax.Array
    frequency_penalty_B: jax.Array
    no_repeat_ngram_size_B: jax.Array
    min_new_tokens_B: jax.Array
    bias_ids_BX: jax.Array
    bias_values_BX: jax.Array
    allowed_ids_BX: jax.Array
    banned_ids_BX: jax.Array
    stop_ids_BX: jax.Array
    prompt_ids_BT: jax.Array
    prompt_len_B: jax.Array
    history_len: int = dataclasses.field(metadata={"static": True})


@runtime_checkable
class Transform(Protocol):
    """Changes logits before a token is drawn from them, and may remember the tokens that were.

    The contract, which ``tests/contracts/test_transforms.py`` checks of every transform of this package:

    - It is a frozen dataclass without arrays: hashable, and equal to another one that was built in the same way.
    - All three methods are pure and can be traced. The tree, shapes and dtypes of the state depend on ``batch``,
      ``vocab`` and the shapes in ``params`` alone, never on values.
    - The first axis of every leaf of the state is the rows. So a row is put into a slot, or rolled back, by one
      ``jax.tree.map`` whatever the transform.
    - A row's result depends on that row alone. A row that does not use the transform comes out bit for bit as it
      went in.
    - A row with a finite logit keeps one, unless the caller's own hard limits (allowed and banned ids) forbid it.
    """

    def init(self, params: SamplingParams, batch: int, vocab: int) -> Any:
        """Returns the state, a pytree, before the first token of the output."""
        ...

    def apply(self, logits_BV: jax.Array, state: Any) -> jax.Array:
        """Returns the changed logits: float32 [B, V] in, float32 [B, V] out."""
        ...

    def accept(self, state: Any, token_B: jax.Array, live_B: jax.Array) -> Any:
        """Returns the state after ``token_B`` (int32) was emitted; rows with ``live_B`` False keep theirs."""
        ...


@runtime_checkable
class SkippableTransform(Transform, Protocol):
    """Says by itself which rows it changes; a chain skips such neighbours together while no row uses any of them."""

    def used(self, state: Any) -> jax.Array:
        """Returns bool [B]; a row without it comes out of ``apply`` as it went in."""
        ...
