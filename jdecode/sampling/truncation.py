"""The four filters that cut the tail of a law: top-k, top-p, min-p and typical-p.

Each sets what it drops to -inf and leaves the other logits as they are; the softmax of the result is the renormalised
law. Each keeps at least one token. Where two tokens tie for the last place, the lower id is kept.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from jdecode.sampling import protocol, selection


@dataclasses.dataclass(frozen=True)
class TopK:
    """Keeps the ``top_k_B`` greatest logits, exactly so many; 0, less, or V and more keeps all."""

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> jax.Array:
        """Returns ``top_k_B``."""
        del batch, vocab
        return params.top_k_B

    def used(self, state: jax.Array) -> jax.Array:
        """Says which rows cut their tail."""
        return state > 0

    def apply(self, logits_BV: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the logits, -inf where dropped."""
        is_used_B = self.used(state) & (state < logits_BV.shape[-1])

        def cut(logits_BV: jax.Array) -> jax.Array:
            kept_BV = selection.keep_leading(logits_BV, None, jnp.maximum(state, 1))
            return jnp.where(kept_BV | ~is_used_B[:, None], logits_BV, -jnp.inf)

        return lax.cond(jnp.any(is_used_B), cut, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: jax.Array, token_B: jax.Array, live_B: jax.Array) -> jax.Array:
        """Returns the state as it is."""
        del token_B, live_B
        return state


@dataclasses.dataclass(frozen=True)
class TopP:
    """Keeps the fewest, most likely tokens whose probabilities reach ``top_p_B`` (Holtzman et al. 2020, section 3.1).

    A token is kept iff the sum of the tokens before it, from the most likely down, is under p. Sums compare with a
    relative slack of 1e-6 (``selection.SUM_SLACK``), so a partial sum that equals p but for the rounding of float32
    keeps no extra token. 1 and more keeps all, 0 and less the argmax.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> jax.Array:
        """Returns ``top_p_B``."""
        del batch, vocab
        return params.top_p_B

    def used(self, state: jax.Array) -> jax.Array:
        """Says which rows cut their tail."""
        return state < 1

    def apply(self, logits_BV: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the logits, -inf where dropped."""
        is_used_B = self.used(state)

        def cut(logits_BV: jax.Array) -> jax.Array:
            mass_BV, total_B = selection.probability_masses(logits_BV)
            kept_BV = selection.keep_leading(logits_BV, mass_BV, selection.mass_limit(total_B, state))
            return jnp.where(kept_BV | ~is_used_B[:, None], logits_BV, -jnp.inf)

        return lax.cond(jnp.any(is_used_B), cut, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: jax.Array, token_B: jax.Array, live_B: jax.Array) -> jax.Array:
        """Returns the state as it is."""
        del token_B, live_B
        return state


@dataclasses.dataclass(frozen=True)
class MinP:
    """Keeps the tokens at least ``min_p_B`` times as likely as the likeliest (Nguyen et al. 2024, section 3).

    A ratio that falls short by a relative 1e-6, the rounding of float32, still counts. 0 and less keeps all.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> jax.Array:
        """Returns ``min_p_B``."""
        del batch, vocab
        return params.min_p_B

    def used(self, state: jax.Array) -> jax.Array:
        """Says which rows cut their tail."""
        return state > 0

    def apply(self, logits_BV: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the logits, -inf where dropped."""
        is_used_B = self.used(state)

        def cut(logits_BV: jax.Array) -> jax.Array:
            ratio_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))
            least_B = jnp.minimum(state, 1) * (1 - selection.SUM_SLACK)
            return jnp.where((ratio_BV >= least_B[:, None]) | ~is_used_B[:, None], logits_BV, -jnp.inf)

        return lax.cond(jnp.any(is_used_B), cut, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: jax.Array, token_B: jax.Array, live_B: jax.Array) -> jax.Array:
        """Returns the state as it is."""
        del token_B, live_B
        return state


@dataclasses.dataclass(frozen=True)
class TypicalP:
    """Keeps the tokens whose surprise is nearest to the expected one (Meister et al. 2023, section 3).

    They are taken by the distance of -log p from the entropy, the nearest first, until their probabilities reach
    ``typical_p_B``, with the same slack as ``TopP``. 1 and more keeps all.
    """

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> jax.Array:
        """Returns ``typical_p_B``."""
        del batch, vocab
        return params.typical_p_B

    def used(self, state: jax.Array) -> jax.Array:
        """Says which rows cut their tail."""
        return state < 1

    def apply(self, logits_BV: jax.Array, state: jax.Array) -> jax.Array:
        """Returns the logits, -inf where dropped."""
        is_used_B = self.used(state)

        def cut(logits_BV: jax.Array) -> jax.Array:
            log_p_BV = jax.nn.log_softmax(logits_BV, axis=-1)
            # A token of probability 0 adds nothing to the entropy, but 0 * -inf is NaN.
            terms_BV = jnp.where(log_p_BV == -jnp.inf, 0.0, jnp.exp(log_p_BV) * log_p_BV)
            entropy_B1 = -jnp.sum(terms_BV, axis=-1, keepdims=True)
            nearness_BV = -jnp.abs(log_p_BV + entropy_B1)
            mass_BV, total_B = selection.probability_masses(logits_BV)
            kept_BV = selection.keep_leading(nearness_BV, mass_BV, selection.mass_limit(total_B, state))
            return jnp.where(kept_BV | ~is_used_B[:, None], logits_BV, -jnp.inf)

        return lax.cond(jnp.any(is_used_B), cut, lambda logits_BV: logits_BV, logits_BV)

    def accept(self, state: jax.Array, token_B: jax.Array, live_B: jax.Array) -> jax.Array:
        """Returns the state as it is."""
        del token_B, live_B
        return state
