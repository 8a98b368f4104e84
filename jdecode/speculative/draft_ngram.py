"""Prompt lookup as the draft: what followed the latest tokens where they stood before (Saxena 2023; no model).

A proposal looks for the latest tokens earlier in the
text, as many of them as possible and at most ``longest``; of several places with equally many, the latest one counts.
What followed there is proposed.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode import shapes
from jdecode.cache import kv_cache
from jdecode.decode import state as state_lib
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import proposals as proposals_lib

NO_TOKEN = -1
"""A place after the text."""

LEAST_WIDTH = 256
"""The shortest S; longer ones are powers of two, so that few programs serve every length."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptText:
    """What stood in each row before the output.

    Attributes:
      token_BS: int32, ``NO_TOKEN`` after the prompt; S is at least the most tokens, prompt and output, of a row.
      length_B: int32, tokens of the prompt.
    """

    token_BS: jax.Array
    length_B: jax.Array


@dataclasses.dataclass(frozen=True)
class NgramDraft:
    """Proposes what followed the latest tokens before. See ``draft.Draft``; its memory is a ``PromptText``.

    Attributes:
      longest: the most latest tokens that are looked for.
      shortest: the fewest that are enough.
    """

    longest: int = 3
    shortest: int = 1

    def __post_init__(self) -> None:
        config_lib.check_count("ngram shortest", self.shortest, 1)
        config_lib.check_count("ngram longest", self.longest, self.shortest)

    def begin(
        self, params: draft_lib.Params, prompts: Sequence[Sequence[int]], *, num_samples: int, max_len: int
    ) -> PromptText:
        """Pads the prompts."""
        del params
        width = max(LEAST_WIDTH, shapes.power_of_two_at_least(max_len))
        token_BS = np.full((len(prompts) * num_samples, width), NO_TOKEN, np.int32)
        for row in range(len(token_BS)):
            prompt = prompts[row // num_samples]
            token_BS[row, : len(prompt)] = prompt
        lengths = [len(prompt) for prompt in prompts for _ in range(num_samples)]
        return PromptText(token_BS=jnp.asarray(token_BS), length_B=jnp.asarray(lengths, jnp.int32))

    def propose(
        self,
        task: draft_lib.Task,
        params: draft_lib.Params,
        memory: PromptText,
        state: state_lib.DecodeState,
        want_B: jax.Array,
    ) -> tuple[proposals_lib.Proposals, PromptText, kv_cache.KVCache]:
        """Looks the latest tokens up."""
        del params
        with jax.named_scope("draft"):
            token_BS, length_B = _text(memory, state)
            num_matching_BS = _num_matching(token_BS, length_B, self.longest)
            slot_1S = jnp.arange(token_BS.shape[1], dtype=jnp.int32)[None, :]
            # More tokens first, then later places: one number to take the maximum of.
            rank_BS = jnp.where(num_matching_BS >= self.shortest, num_matching_BS * token_BS.shape[1] + slot_1S, -1)
            rank_B = jnp.max(rank_BS, axis=1)
            start_B = rank_B % token_BS.shape[1] + 1  # the place after the match
            place_BG = start_B[:, None] + jnp.arange(task.most, dtype=jnp.int32)[None, :]
            num_B = jnp.where(rank_B < 0, 0, jnp.minimum(want_B, length_B - start_B))
            token_BG = jnp.take_along_axis(token_BS, jnp.minimum(place_BG, token_BS.shape[1] - 1), axis=1)
        proposals = proposals_lib.Proposals(token_BG=jnp.maximum(token_BG, 0), num_B=num_B, logits_BGV=None)
        return proposals, memory, state.cache

    def settle(self, memory: PromptText, before: state_lib.DecodeState, after: state_lib.DecodeState) -> PromptText:
        """Has nothing to cut back: the output is read where it is."""
        del before, after
        return memory


def _text(prompt: PromptText, state: state_lib.DecodeState) -> tuple[jax.Array, jax.Array]:
    """Returns prompt and output as one: int32 (B, S), ``NO_TOKEN`` after it, and its length, int32 (B,)."""
    place_BS = jnp.arange(prompt.token_BS.shape[1], dtype=jnp.int32)[None, :] - prompt.length_B[:, None]
    output_BS = jnp.take_along_axis(state.tokens_BM, place_BS, axis=1, mode="clip")
    is_output_BS = (place_BS >= 0) & (place_BS < state.num_new_B[:, None])
    return jnp.where(is_output_BS, output_BS, prompt.token_BS), prompt.length_B + state.num_new_B


def _num_matching(token_BS: jax.Array, length_B: jax.Array, longest: int) -> jax.Array:
    """Counts, up to ``longest``, how many tokens up to and with each place equal the latest ones of the row.

    The row's own end is no place: what follows it is not known.
    """
    batch, width = token_BS.shape
    slot_1S = jnp.arange(width, dtype=jnp.int32)[None, :]
    num_BS = jnp.zeros((batch, width), jnp.int32)
    is_equal_BS = slot_1S < length_B[:, None] - 1
    for back in range(longest):
        latest_B1 = jnp.take_along_axis(token_BS, jnp.maximum(length_B - 1 - back, 0)[:, None], axis=1)
        shifted_BS = jnp.pad(token_BS, ((0, 0), (back, 0)), constant_values=NO_TOKEN)[:, :width]
        is_equal_BS &= (shifted_BS == latest_B1) & (slot_1S >= back)
        num_BS += is_equal_BS
    return num_BS
