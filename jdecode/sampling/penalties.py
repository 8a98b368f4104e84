"""What a row pays for tokens that it already holds: repetition, presence, frequency, and repeated n-grams.

Prompt and output are remembered apart: presence and frequency look at the output alone, repetition and n-grams at
both. Padding of the prompt is never remembered.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jdecode.sampling import masks, protocol

# A place of the history that holds no token yet. Never compared: places past the row's length do not take part.
_NO_TOKEN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenPenaltiesState:
    """Holds the factors, float32 [B]; output counts, int32 [B, V]; and which tokens the prompt has, bool [B, V]."""

    repetition_B: jax.Array
    presence_B: jax.Array
    frequency_B: jax.Array
    output_count_BV: jax.Array
    in_prompt_BV: jax.Array


@dataclasses.dataclass(frozen=True)
class TokenPenalties:
    """Lowers the logits of tokens that the row holds.

    First repetition (Keskar et al. 2019, section 4.1, with the sign of the logit respected): the logit of a token in
    prompt or output is divided by the penalty if positive, multiplied by it if negative. Then, of tokens in the output
    only, presence is subtracted once, and frequency once an occurrence.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> TokenPenaltiesState:
        """Returns zero counts, and the tokens of the prompt."""
        return TokenPenaltiesState(
            repetition_B=params.repetition_penalty_B,
            presence_B=params.presence_penalty_B,
            frequency_B=params.frequency_penalty_B,
            output_count_BV=jnp.zeros((batch, vocab), jnp.int32),
            in_prompt_BV=masks.mark_ids(_prompt(params), batch, vocab),
        )

    def used(self, state: TokenPenaltiesState) -> jax.Array:
        """Says which rows have a penalty."""
        return (state.repetition_B != 1) | (state.presence_B != 0) | (state.frequency_B != 0)

    def apply(self, logits_BV: jax.Array, state: TokenPenaltiesState) -> jax.Array:
        """Returns the lowered logits."""
        repetition_B1 = state.repetition_B[:, None]
        repeats_B = state.repetition_B != 1
        subtracts_B = (state.presence_B != 0) | (state.frequency_B != 0)

        def repetition(logits_BV: jax.Array) -> jax.Array:
            is_held_BV = state.in_prompt_BV | (state.output_count_BV > 0)
            lowered_BV = jnp.where(logits_BV > 0, logits_BV / repetition_B1, logits_BV * repetition_B1)
            return jnp.where(is_held_BV & repeats_B[:, None], lowered_BV, logits_BV)

        def subtraction(logits_BV: jax.Array) -> jax.Array:
            count_BV = state.output_count_BV
            price_BV = state.presence_B[:, None] + state.frequency_B[:, None] * count_BV.astype(jnp.float32)
            return jnp.where((count_BV > 0) & subtracts_B[:, None], logits_BV - price_BV, logits_BV)

        logits_BV = lax.cond(jnp.any(repeats_B), repetition, lambda logits_BV: logits_BV, logits_BV)
        return lax.cond(jnp.any(subtracts_B), subtraction, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: TokenPenaltiesState, token_B: jax.Array, live_B: jax.Array) -> TokenPenaltiesState:
        """Counts the token of each live row; ids out of range are dropped."""
        at = state.output_count_BV.at[jnp.arange(token_B.shape[0]), token_B]
        count_BV = at.add(live_B.astype(jnp.int32), mode="drop", wrap_negative_indices=False)
        return dataclasses.replace(state, output_count_BV=count_BV)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class NoRepeatNgramState:
    """Holds n, int32 [B]; the tokens of prompt and output, int32 [B, S]; and how many they are, int32 [B]."""

    size_B: jax.Array
    history_BS: jax.Array
    history_len_B: jax.Array


@dataclasses.dataclass(frozen=True)
class NoRepeatNgram:
    """Bans each token that would end an n-gram which the row already holds (Paulus et al. 2018, section 2.5).

    A row in which that bans everything stays as it is.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> NoRepeatNgramState:
        """Returns the history with the prompt in it."""
        del vocab
        prompt_BT = _prompt(params)
        width = min(prompt_BT.shape[1], params.history_len)
        history_BS = jnp.full((batch, params.history_len), _NO_TOKEN, jnp.int32)
        return NoRepeatNgramState(
            size_B=params.no_repeat_ngram_size_B,
            history_BS=history_BS.at[:, :width].set(prompt_BT[:, :width]),
            history_len_B=params.prompt_len_B,
        )

    def used(self, state: NoRepeatNgramState) -> jax.Array:
        """Says which rows have an n."""
        return state.size_B > 0

    def apply(self, logits_BV: jax.Array, state: NoRepeatNgramState) -> jax.Array:
        """Returns the logits, -inf at tokens that would repeat an n-gram."""
        batch, vocab = logits_BV.shape

        def ban_repeats(logits_BV: jax.Array) -> jax.Array:
            ends_BS = _ends_of_matches(state)
            ids_BS = jnp.where(ends_BS, state.history_BS, protocol.PADDING_ID)
            return masks.ban(logits_BV, masks.mark_ids(ids_BS, batch, vocab))

        return lax.cond(jnp.any(self.used(state)), ban_repeats, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: NoRepeatNgramState, token_B: jax.Array, live_B: jax.Array) -> NoRepeatNgramState:
        """Appends the token of each live row; what is no token is dropped."""
        batch, capacity = state.history_BS.shape
        is_added_B = live_B & (token_B >= 0) & (state.history_len_B < capacity)
        slot_B = jnp.where(is_added_B, state.history_len_B, capacity)
        return dataclasses.replace(
            state,
            history_BS=state.history_BS.at[jnp.arange(batch), slot_B].set(token_B, mode="drop"),
            history_len_B=state.history_len_B + is_added_B.astype(jnp.int32),
        )


def _ends_of_matches(state: NoRepeatNgramState) -> jax.Array:
    """Returns bool [B, S]: the n - 1 tokens before this place equal the last n - 1 of the row."""
    history_BS, len_B = state.history_BS, state.history_len_B
    slot_BS = lax.broadcasted_iota(jnp.int32, history_BS.shape, 1)
    size_B1 = state.size_B[:, None]

    def match_one_back(back: jax.Array, match_BS: jax.Array) -> jax.Array:
        last_B1 = jnp.take_along_axis(history_BS, jnp.maximum(len_B - back, 0)[:, None], axis=1)
        before_BS = jnp.take_along_axis(history_BS, jnp.maximum(slot_BS - back, 0), axis=1)
        return match_BS & ((back >= size_B1) | (before_BS == last_B1))

    # Slots under n - 1 have too few tokens before them; then the clamped reads above never matter.
    is_candidate_BS = (size_B1 > 0) & (slot_BS >= size_B1 - 1) & (slot_BS < len_B[:, None])
    return lax.fori_loop(1, jnp.max(state.size_B), match_one_back, is_candidate_BS)


def _prompt(params: protocol.SamplingParams) -> jax.Array:
    """Returns the prompts, int32 [B, T], with ``PADDING_ID`` from each row's length on, whatever stood there."""
    slot_BT = lax.broadcasted_iota(jnp.int32, params.prompt_ids_BT.shape, 1)
    return jnp.where(slot_BT < params.prompt_len_B[:, None], params.prompt_ids_BT, protocol.PADDING_ID)
