"""Logit bias, and the tokens that a row may or may not draw."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jdecode.sampling import protocol


def mark_ids(ids_BX: jax.Array, batch: int, vocab: int) -> jax.Array:
    """Returns bool [B, V], True at the ids of each row; ids out of range, negative ones too, mark nothing."""
    row_B1 = jnp.arange(batch)[:, None]
    marks_BV = jnp.zeros((batch, vocab), jnp.bool_)
    return marks_BV.at[row_B1, ids_BX].set(True, mode="drop", wrap_negative_indices=False)


def ban(logits_BV: jax.Array, banned_BV: jax.Array) -> jax.Array:
    """Sets banned logits to -inf, in the rows that keep a finite logit thereby; the others stay as they are."""
    kept_BV = jnp.where(banned_BV, -jnp.inf, logits_BV)
    is_empty_B1 = jnp.max(kept_BV, axis=-1, keepdims=True) == -jnp.inf
    return jnp.where(is_empty_B1, logits_BV, kept_BV)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LogitBiasState:
    """Holds the ids and the numbers to add to their logits, both [B, X]."""

    ids_BX: jax.Array
    values_BX: jax.Array


@dataclasses.dataclass(frozen=True)
class LogitBias:
    """Adds ``bias_values_BX`` to the logits of ``bias_ids_BX``; an id that comes twice gets both."""

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> LogitBiasState:
        """Returns the ids and values."""
        del batch, vocab
        return LogitBiasState(ids_BX=params.bias_ids_BX, values_BX=params.bias_values_BX)

    def used(self, state: LogitBiasState) -> jax.Array:
        """Says which rows name an id."""
        return jnp.any(state.ids_BX != protocol.PADDING_ID, axis=-1)

    def apply(self, logits_BV: jax.Array, state: LogitBiasState) -> jax.Array:
        """Returns the logits with the values added."""
        batch = logits_BV.shape[0]

        def add(logits_BV: jax.Array) -> jax.Array:
            at = logits_BV.at[jnp.arange(batch)[:, None], state.ids_BX]
            return at.add(state.values_BX, mode="drop", wrap_negative_indices=False)

        return lax.cond(jnp.any(self.used(state)), add, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: LogitBiasState, token_B: jax.Array, live_B: jax.Array) -> LogitBiasState:
        """Returns the state as it is."""
        del token_B, live_B
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PermittedTokensState:
    """Holds which tokens each row may draw, bool [B, V], and whether it forbids any, bool [B]."""

    permitted_BV: jax.Array
    is_used_B: jax.Array


@dataclasses.dataclass(frozen=True)
class PermittedTokens:
    """Forbids ``banned_ids_BX`` and, in rows with ``allowed_ids_BX``, whatever is not among them.

    A hard limit: a row in which the model gives no permitted token a finite logit comes out without a finite logit.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> PermittedTokensState:
        """Returns the marks."""
        allowed_BV = mark_ids(params.allowed_ids_BX, batch, vocab)
        limits_B1 = jnp.any(allowed_BV, axis=-1, keepdims=True)
        permitted_BV = (allowed_BV | ~limits_B1) & ~mark_ids(params.banned_ids_BX, batch, vocab)
        return PermittedTokensState(permitted_BV=permitted_BV, is_used_B=~jnp.all(permitted_BV, axis=-1))

    def used(self, state: PermittedTokensState) -> jax.Array:
        """Says which rows forbid a token."""
        return state.is_used_B

    def apply(self, logits_BV: jax.Array, state: PermittedTokensState) -> jax.Array:
        """Returns the logits, -inf where not permitted."""
        return lax.cond(
            jnp.any(self.used(state)),
            lambda logits_BV: jnp.where(state.permitted_BV, logits_BV, -jnp.inf),
            lambda logits_BV: logits_BV,
            logits_BV,
        )

    def accept(self, state: PermittedTokensState, token_B: jax.Array, live_B: jax.Array) -> PermittedTokensState:
        """Returns the state as it is."""
        del token_B, live_B
        return state


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MinNewTokensState:
    """Holds the stop ids, int32 [B, X], and how many tokens must still come before one of them, int32 [B]."""

    stop_ids_BX: jax.Array
    num_missing_B: jax.Array


@dataclasses.dataclass(frozen=True)
class MinNewTokens:
    """Bans ``stop_ids_BX`` until ``min_new_tokens_B`` tokens are out.

    Where nothing but stop tokens is left (n-gram bans took the rest), the row stays as it is.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> MinNewTokensState:
        """Returns the ids and counts."""
        del batch, vocab
        return MinNewTokensState(stop_ids_BX=params.stop_ids_BX, num_missing_B=params.min_new_tokens_B)

    def used(self, state: MinNewTokensState) -> jax.Array:
        """Says which rows are too short."""
        return state.num_missing_B > 0

    def apply(self, logits_BV: jax.Array, state: MinNewTokensState) -> jax.Array:
        """Returns the logits, -inf at stop ids in rows that are too short."""
        batch, vocab = logits_BV.shape
        is_short_B = self.used(state)

        def hold_back(logits_BV: jax.Array) -> jax.Array:
            return ban(logits_BV, mark_ids(state.stop_ids_BX, batch, vocab) & is_short_B[:, None])

        return lax.cond(jnp.any(is_short_B), hold_back, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: MinNewTokensState, token_B: jax.Array, live_B: jax.Array) -> MinNewTokensState:
        """Counts the token of each live row."""
        is_counted_B = live_B & (token_B >= 0) & (state.num_missing_B > 0)
        return dataclasses.replace(state, num_missing_B=state.num_missing_B - is_counted_B.astype(jnp.int32))
