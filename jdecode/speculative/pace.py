"""How many tokens to propose: as many as pay, judged by what was accepted lately, inside the device loop.

Each row keeps a decayed count of the proposals that were tested and accepted. From the share α it proposes the n that
makes the most of a round: the expected tokens of a round are 1 + α + … + αⁿ (Leviathan et al. 2023, equation 1), and
``Costs`` says what the round takes. If no n beats plain decoding, the row pauses: it decodes plainly for a number of
rounds, then probes with a short block, and pauses twice as long each time that the probe does not change the verdict.

A row's pace depends on that row alone, and on nothing measured by a clock: the same seed gives the same text under
``rejection``, whatever the batch and the machine's load.
"""

import dataclasses

import jax
import jax.numpy as jnp

DECAY = 0.9
"""Weight of the past, a round."""

PRIOR_ACCEPTED, PRIOR_TESTED = 1.5, 2.0
"""What is believed before anything is tested: as if 1.5 of 2 had been accepted."""

PROBE_LEN = 2
"""Proposals of a probe."""

LEAST_PAUSE, MOST_PAUSE = 8, 128
"""Plain rounds after a first verdict against speculation, and after many."""


BLOCK_COSTS, PLACE_COSTS = {"cpu": 1.05}, {"cpu": 0.12}
"""By platform: of a block of several places, and of each proposal in it, in plain steps."""


DRAWING_COST = 0.03
"""Of one proposal beside its model: transforms, draw, and what a small model does besides reading weights."""


@dataclasses.dataclass(frozen=True)
class Costs:
    """What a round takes, in plain steps of the target. Static.

    Attributes:
      draft: of one proposed token.
      block: of the target's call over a whole block of G + 1 places, at least 1.
    """

    draft: float
    block: float


def block_cost(platform: str, num_draft_tokens: int) -> float:
    """Estimates ``Costs.block`` for one row: an accelerator reads the weights once for all places, a CPU computes."""
    return BLOCK_COSTS.get(platform, 1.05) + PLACE_COSTS.get(platform, 0.0) * num_draft_tokens


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Where each row stands.

    Attributes:
      accepted_B, tested_B: float32, decayed counts.
      pause_B: int32, plain rounds that are left.
      next_pause_B: int32, rounds of the next pause.
    """

    accepted_B: jax.Array
    tested_B: jax.Array
    pause_B: jax.Array
    next_pause_B: jax.Array


def begin(batch: int) -> Pace:
    """Returns the pace of rows about which nothing is known."""
    return Pace(
        accepted_B=jnp.zeros(batch, jnp.float32),
        tested_B=jnp.zeros(batch, jnp.float32),
        pause_B=jnp.zeros(batch, jnp.int32),
        next_pause_B=jnp.full(batch, LEAST_PAUSE, jnp.int32),
    )


def best_len(pace: Pace, costs: Costs, most: int) -> jax.Array:
    """Returns int32 (B,), the number of proposals, 0 to ``most``, with the most expected tokens for the time."""
    alpha_B = (pace.accepted_B + PRIOR_ACCEPTED) / (pace.tested_B + PRIOR_TESTED)
    rates = [jnp.ones_like(alpha_B)]  # a plain step: one token in one unit
    expected_B = power_B = jnp.ones_like(alpha_B)
    for num in range(1, most + 1):
        power_B = power_B * alpha_B
        expected_B = expected_B + power_B
        rates.append(expected_B / (costs.block + num * costs.draft))
    return jnp.argmax(jnp.stack(rates, axis=1), axis=1).astype(jnp.int32)


def want(pace: Pace, costs: Costs, most: int) -> jax.Array:
    """Returns int32 (B,), how many tokens to propose: none in a pause, at least a probe outside of one."""
    want_B = jnp.maximum(best_len(pace, costs, most), min(PROBE_LEN, most))
    return jnp.where(pace.pause_B > 0, 0, want_B)


def update(pace: Pace, costs: Costs, most: int, accepted_B: jax.Array, tested_B: jax.Array) -> Pace:
    """Returns the pace after a round.

    Args:
      costs, most: static.
      accepted_B, tested_B: int32, of the round. A round that tested nothing (a pause, or a draft that had nothing to
        propose) says nothing of the acceptance.
    """
    is_tested_B = tested_B > 0
    decay_B = jnp.where(is_tested_B, DECAY, 1.0)
    counted = dataclasses.replace(
        pace,
        accepted_B=pace.accepted_B * decay_B + accepted_B,
        tested_B=pace.tested_B * decay_B + tested_B,
        pause_B=jnp.maximum(pace.pause_B - 1, 0),
    )
    gives_up_B = is_tested_B & (best_len(counted, costs, most) == 0)
    pays_B = is_tested_B & ~gives_up_B
    longer_B = jnp.minimum(2 * pace.next_pause_B, MOST_PAUSE)
    return dataclasses.replace(
        counted,
        pause_B=jnp.where(gives_up_B, pace.next_pause_B, counted.pause_B),
        next_pause_B=jnp.where(gives_up_B, longer_B, jnp.where(pays_B, LEAST_PAUSE, pace.next_pause_B)),
    )
