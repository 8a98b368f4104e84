"""The two rules by which a target accepts a draft's tokens. Both leave the law of the text as it is without a draft.

A block has G proposals and P = G + 1 places. After the block has run through the target, place i has the target's own
logits given the proposals before it, and the whole chain of transforms was applied to them: p is their softmax, q that
of the draft's. A rule says what stands at each place and how many places are open: those whose every earlier proposal
was accepted.

``Rejection`` (Leviathan et al. 2023, Algorithm 1; Chen et al. 2023): a proposal y is accepted with probability
min(1, p(y) / q(y)); in place of the first one that is not stands a draw from the normalised max(0, p - q). It accepts
as often as any rule can: with probability sum min(p, q).

``Coupled`` (Daliri et al. 2025, Gumbel coupling): draft and target draw with the same noise, which is addressed by
position; a proposal is accepted iff it is the target's own draw. Every place then holds just the token that decoding
without a draft draws, so the text of a seed does not depend on the draft at all. It accepts with probability
sum_i 1 / sum_j max(p_j / p_i, q_j / q_i).

Where a row does not draw (temperature 0), both accept a proposal iff it is the argmax of the target.
"""

import dataclasses
import functools
from typing import Protocol

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.sampling import draw, selection
from jdecode.speculative import proposals as proposals_lib


class Verify(Protocol):
    """A rule of acceptance. Static."""

    @property
    def draft_purpose(self) -> int:
        """The ``PURPOSE_`` of the noise with which a draft draws."""
        ...

    @property
    def needs_law(self) -> bool:
        """Whether ``choose`` looks at the draft's logits."""
        ...

    def choose(
        self,
        processed_BPV: jax.Array,
        proposals: proposals_lib.Proposals,
        key_B: jax.Array,
        position_BP: jax.Array,
        is_random_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Fills the places of a block.

        Args:
          processed_BPV: float32, the target's logits after the whole chain.
          proposals: of at most G = P - 1 tokens.
          key_B: of ``sampling.request_keys``.
          position_BP: int32, the absolute position of each place.
          is_random_B: bool; other rows take the argmax.

        Returns:
          int32 (B, P), the token of each open place, or ``INVALID_TOKEN``; and int32 (B,), how many proposals are
          accepted, one after another from the first: as many places and one more are open.
        """
        ...


@dataclasses.dataclass(frozen=True)
class Coupled:
    """Accepts what the target would have drawn itself. See ``Verify``."""

    draft_purpose: int = sampling.PURPOSE_TOKEN
    needs_law: bool = False

    def choose(
        self,
        processed_BPV: jax.Array,
        proposals: proposals_lib.Proposals,
        key_B: jax.Array,
        position_BP: jax.Array,
        is_random_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Draws at every place, and compares."""
        B, P, V = processed_BPV.shape
        own_BP = draw.draw(
            processed_BPV.reshape(B * P, V),
            jnp.repeat(key_B, P),
            position_BP.reshape(B * P),
            jnp.repeat(is_random_B, P),
        ).reshape(B, P)
        return own_BP, _num_leading(own_BP[:, :-1] == proposals.token_BG, proposals.num_B)


@dataclasses.dataclass(frozen=True)
class Rejection:
    """Accepts by the ratio of the laws, and draws from what is left. See ``Verify``."""

    draft_purpose: int = sampling.PURPOSE_DRAFT
    needs_law: bool = True

    def choose(
        self,
        processed_BPV: jax.Array,
        proposals: proposals_lib.Proposals,
        key_B: jax.Array,
        position_BP: jax.Array,
        is_random_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        """Tests the proposals in order, and draws one token for the place after the accepted ones."""
        if processed_BPV.shape[1] == 1:  # nothing to test
            return Coupled().choose(processed_BPV, proposals, key_B, position_BP, is_random_B)
        by_ratio = functools.partial(_choose_by_ratio, processed_BPV, proposals, key_B, position_BP, is_random_B)
        by_argmax = functools.partial(_choose_by_argmax, processed_BPV, proposals)
        return jax.lax.cond(jnp.any(is_random_B), by_ratio, by_argmax)


def _choose_by_argmax(processed_BPV: jax.Array, proposals: proposals_lib.Proposals) -> tuple[jax.Array, jax.Array]:
    """Does what both rules do where no row draws: no law is needed."""
    B, P, V = processed_BPV.shape
    own_BP = draw.argmax(processed_BPV.reshape(B * P, V)).reshape(B, P)
    return own_BP, _num_leading(own_BP[:, :-1] == proposals.token_BG, proposals.num_B)


def _choose_by_ratio(
    processed_BPV: jax.Array,
    proposals: proposals_lib.Proposals,
    key_B: jax.Array,
    position_BP: jax.Array,
    is_random_B: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Does what ``Rejection.choose`` says, over two places and more."""
    B, P, V = processed_BPV.shape
    token_BG, G = proposals.token_BG, P - 1
    target_BGV = processed_BPV[:, :G]
    is_best_BG = selection.first_argmax(target_BGV.reshape(B * G, V)).reshape(B, G) == token_BG
    with jax.named_scope("accept"):
        p_BG = _probability(target_BGV, token_BG)
        q_BG = jnp.ones_like(p_BG)
        if proposals.logits_BGV is not None:
            q_BG = _probability(proposals.logits_BGV, token_BG)
        uniform_BG = _uniform(key_B, position_BP[:, :G])
        is_passed_BG = jnp.where(is_random_B[:, None], uniform_BG * q_BG < p_BG, is_best_BG)
        num_accepted_B = _num_leading(is_passed_BG, proposals.num_B)
    last_BV = _at_place(processed_BPV, num_accepted_B)
    is_refused_B = num_accepted_B < proposals.num_B
    left_BV = jnp.where(is_refused_B[:, None], _residual(last_BV, proposals, num_accepted_B), last_BV)
    last_B = draw.draw(
        jnp.where(is_random_B[:, None], left_BV, last_BV),
        key_B,
        jnp.take_along_axis(position_BP, num_accepted_B[:, None], axis=1)[:, 0],
        is_random_B,
        purpose=jnp.where(is_refused_B, sampling.PURPOSE_RESIDUAL, sampling.PURPOSE_TOKEN),
    )
    is_accepted_BP = jnp.arange(P)[None, :] < num_accepted_B[:, None]
    return jnp.where(is_accepted_BP, jnp.pad(token_BG, ((0, 0), (0, 1))), last_B[:, None]), num_accepted_B


def _num_leading(is_passed_BG: jax.Array, num_B: jax.Array) -> jax.Array:
    """Counts the proposals of a row that pass, one after another from the first."""
    is_real_BG = jnp.arange(is_passed_BG.shape[1])[None, :] < num_B[:, None]
    return jnp.sum(jnp.cumprod((is_passed_BG & is_real_BG).astype(jnp.int32), axis=1), axis=1)


def _probability(logits_BGV: jax.Array, token_BG: jax.Array) -> jax.Array:
    """Returns the softmax of the logits at the tokens."""
    logit_BG = jnp.take_along_axis(logits_BGV, token_BG[:, :, None], axis=2)[:, :, 0]
    return jnp.exp(logit_BG - jax.nn.logsumexp(logits_BGV, axis=-1))


def _uniform(key_B: jax.Array, position_BG: jax.Array) -> jax.Array:
    """Draws numbers from 0 up to, and without, 1, one for each position."""
    B, G = position_BG.shape
    keys = draw.keys_at(jnp.repeat(key_B, G), position_BG.reshape(B * G), sampling.PURPOSE_ACCEPT)
    return jax.vmap(lambda key: jax.random.uniform(key, dtype=jnp.float32))(keys).reshape(B, G)


def _at_place(values_BPV: jax.Array, place_B: jax.Array) -> jax.Array:
    return jax.vmap(lambda row_PV, place: row_PV[place])(values_BPV, place_B)


def _residual(target_BV: jax.Array, proposals: proposals_lib.Proposals, place_B: jax.Array) -> jax.Array:
    """Returns the logarithm of max(0, p - q) at a refused place, not normalised.

    Args:
      target_BV: the target's logits there.
      place_B: int32, which proposal was refused.
    """
    place_B = jnp.minimum(place_B, proposals.token_BG.shape[1] - 1)
    p_BV = jax.nn.softmax(target_BV, axis=-1)
    if proposals.logits_BGV is None:
        refused_B1 = jnp.take_along_axis(proposals.token_BG, place_B[:, None], axis=1)
        left_BV = jnp.where(jnp.arange(p_BV.shape[1])[None, :] == refused_B1, 0.0, p_BV)
    else:
        left_BV = jnp.maximum(p_BV - jax.nn.softmax(_at_place(proposals.logits_BGV, place_B), axis=-1), 0.0)
    # Laws that are equal but for rounding can refuse, and leave nothing: then the target's own law is as good. And a
    # row with a NaN stays one.
    is_something_B1 = jnp.max(left_BV, axis=-1, keepdims=True) > 0
    return jnp.where(is_something_B1, jnp.log(left_BV), target_BV)


RULES: dict[str, Verify] = {"rejection": Rejection(), "coupled": Coupled()}
"""The rules by name."""
