"""The draw itself, with keys that are addressed and never consumed in order.

The key of a draw is ``fold_in(fold_in(key of the request, position), purpose)``. It depends on nothing else: not on
the other rows, the slot, the chunk, or what was drawn before. Draws of different purposes at one position never share
a key.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jdecode.sampling import selection

# What a draw is for. The numbers are part of the meaning of a seed: changing one changes every seeded text.
PURPOSE_TOKEN = 0  # the emitted token
PURPOSE_DRAFT = 1  # a draft's proposal
PURPOSE_ACCEPT = 2  # whether the proposal is accepted
PURPOSE_RESIDUAL = 3  # the token in place of a rejected proposal

# Stands for the token of a row whose greatest logit is not a finite number (NaN, or nothing left to draw). The caller
# must end such a row with an error; as an index it would silently mean the last token.
INVALID_TOKEN = -1

# Just under 1, where the noise's uniform numbers end.
_GREATEST_BELOW_ONE = 1 - 2.0**-24


def request_keys(seeds: Sequence[int], sample_idx: Sequence[int]) -> jax.Array:
    """Returns the key of each row: that of its request's seed, folded with the number of its sample.

    Args:
      seeds: whole numbers from 0 to 2**63 - 1; all their bits count.
      sample_idx: which of several samples of one request the row is, from 0.

    Returns:
      Typed threefry keys [B].

    Raises:
      ValueError: for lists of different lengths, and numbers out of range.
    """
    if len(seeds) != len(sample_idx):
        raise ValueError(f"sample_idx: expected one for each of {len(seeds)} seeds, got {len(sample_idx)}")
    for seed in seeds:
        if not 0 <= seed < 2**63:
            raise ValueError(f"seed: expected a whole number from 0 to 2**63 - 1, got {seed}")
    for idx in sample_idx:
        if not 0 <= idx < 2**32:
            raise ValueError(f"sample_idx: expected a whole number from 0 to 2**32 - 1, got {idx}")
    # In two words of 32 bits: without 64-bit mode jax.random.key would drop the upper one.
    words = np.asarray([(seed >> 32, seed & 0xFFFFFFFF) for seed in seeds], np.uint32).reshape(-1, 2)
    return _fold_samples(jnp.asarray(words), jnp.asarray(np.asarray(sample_idx, np.uint32)))


@jax.jit
def _fold_samples(words_B2: jax.Array, sample_idx_B: jax.Array) -> jax.Array:
    key_B = jax.random.wrap_key_data(words_B2, impl="threefry2x32")
    return jax.vmap(jax.random.fold_in)(key_B, sample_idx_B)


def keys_at(key_B: jax.Array, position_B: jax.Array, purpose: int | jax.Array) -> jax.Array:
    """Returns the keys [B] of the draws for ``purpose`` (one, or one a row) at the positions ``position_B`` (int32)."""
    purpose_B = jnp.broadcast_to(jnp.asarray(purpose, jnp.int32), position_B.shape)
    return jax.vmap(lambda key, position, purpose: jax.random.fold_in(jax.random.fold_in(key, position), purpose))(
        key_B, position_B, purpose_B
    )


def draw(
    logits_BV: jax.Array,
    key_B: jax.Array,
    position_B: jax.Array,
    is_random_B: jax.Array,
    *,
    purpose: int | jax.Array = PURPOSE_TOKEN,
) -> jax.Array:
    """Draws one token a row from the softmax of its logits, or takes the argmax.

    The draw is the argmax of the logits plus independent Gumbel noise (Maddison et al. 2014, section 2), so no sum and
    no sort is needed, and equal noise on similar logits gives mostly equal tokens. A batch without random rows makes
    no noise.

    Args:
      logits_BV: any float dtype; summed with the noise in float32.
      key_B: of ``request_keys``.
      position_B: int32, the absolute position of the token that is drawn.
      is_random_B: bool; the other rows take the argmax, the lowest id of a tie.
      purpose: a ``PURPOSE_`` constant, or int32 [B], one a row.

    Returns:
      int32 [B], ``INVALID_TOKEN`` for a row whose greatest logit is not finite.
    """
    logits_BV = logits_BV.astype(jnp.float32)
    vocab = logits_BV.shape[-1]

    def add_noise(logits_BV: jax.Array) -> jax.Array:
        with jax.named_scope("noise"):
            draw_bits = jax.vmap(lambda key: jax.random.bits(key, (vocab,), jnp.uint32))
            noise_BV = _gumbel(draw_bits(keys_at(key_B, position_B, purpose)))
        return jnp.where(is_random_B[:, None], logits_BV + noise_BV, logits_BV)

    with jax.named_scope("draw"):
        score_BV = lax.cond(jnp.any(is_random_B), add_noise, lambda logits_BV: logits_BV, logits_BV)
        is_valid_B = jnp.isfinite(jnp.max(logits_BV, axis=-1))
        return jnp.where(is_valid_B, selection.first_argmax(score_BV), INVALID_TOKEN)


def argmax(logits_BV: jax.Array) -> jax.Array:
    """Returns what ``draw`` takes in a row that is not random, int32 [B]; the logits are float32."""
    is_valid_B = jnp.isfinite(jnp.max(logits_BV, axis=-1))
    return jnp.where(is_valid_B, selection.first_argmax(logits_BV), INVALID_TOKEN)


def _gumbel(bits: jax.Array) -> jax.Array:
    """Turns uniform uint32 into standard Gumbel noise, float32, with an upper tail fine enough for long vocabularies.

    The upper tail decides an argmax. From 23 random bits, the resolution of ``jax.random.gumbel``, the greatest
    of 262,144 equal logits ties about once in thirty draws, and ties favour low ids. Here the tail comes from uniform
    numbers near 0, where float32 resolves all 32 bits. All of it is finite.
    """
    uniform = jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, _GREATEST_BELOW_ONE)
    return -jnp.log(-jnp.log1p(-uniform))
