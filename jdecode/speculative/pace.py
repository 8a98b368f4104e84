"""How many tokens to propose: as many as pay, judged by what was accepted lately, inside the device loop.

Each row keeps a decayed count of the proposals that were tested and accepted. From the share α it proposes the n that
makes the most of a round: the expected tokens of a round are 1 + α + … + αⁿ (Leviathan et al. 2023, equation 1), and
``Costs`` says what the round takes. If every n is clearly slower than plain decoding, the row pauses: it decodes
plainly for a number of rounds, then tries again, and pauses twice as long each time that this changes nothing.

A draft that is asked and proposes nothing (its logits are not finite, say) has cost its time all the same: that counts
as one proposal that was refused. Only with a look-up it counts as nothing, for to find nothing is next to free, and
the next token may be found.

A row's pace depends on that row alone, and on nothing measured by a clock: the same seed gives the same text under
``rejection``, whatever the batch and the machine's load. All of it is traced, so that no value compiles anything.
"""

import dataclasses

import jax
import jax.numpy as jnp

DECAY = 0.9
"""Weight of the past, a round."""

PRIOR_ACCEPTED, PRIOR_TESTED = 1.5, 2.0
"""What is believed before anything is tested: as if 1.5 of 2 had been accepted."""

LEAST_SPEED = 0.95
"""A row pauses when it is expected to be slower than this; plain decoding is 1."""

LEAST_PAUSE, MOST_PAUSE = 4, 64
"""Plain rounds after a first verdict against speculation, and after many."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """What decides the cost of a round on a kind of device. Estimates, in seconds and bytes a second.

    Attributes:
      bandwidth: at which a plain step reads the weights.
      block, place: the model's part of a block: so many plain steps, and so many more for each proposal in it.
      greedy, random: of the transforms and the choice of one token, of a row that takes the argmax and one that draws.
    """

    bandwidth: float
    block: float
    place: float
    greedy: float
    random: float


MACHINES = {"cpu": Machine(bandwidth=25e9, block=1.05, place=0.12, greedy=4e-5, random=2.5e-4)}
"""By platform. A CPU computes the places of a block one by one; of products it is only the reading that they share."""

ACCELERATOR = Machine(bandwidth=1e12, block=1.05, place=0.0, greedy=1e-5, random=2e-5)
"""Every other platform: reading the weights decides, and a block reads them once."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
    """What rounds take, in plain steps of the target's model.

    Attributes:
      draft: of the draft's model, for one proposal.
      block, place: see ``Machine``.
      greedy, random: of one choice, see ``Machine``.
      is_drawn: whether the draft draws its proposals, as the target does.
      is_look_up: whether a round in which the draft is asked and finds nothing is as good as a plain one.
    """

    draft: float
    block: float
    place: float
    greedy: float
    random: float
    is_drawn: bool
    is_look_up: bool = False


def estimate(
    platform: str, *, target_bytes: int, draft_share: float, is_drawn: bool, is_look_up: bool = False
) -> Costs:
    """Estimates the costs from sizes alone.

    Args:
      platform: as ``jax.Device.platform`` names it.
      target_bytes: of the target's weights.
      draft_share: the draft's model as a share of the target's; 0 for a draft that has none.
      is_drawn, is_look_up: see ``Costs``.
    """
    machine = MACHINES.get(platform, ACCELERATOR)
    step_seconds = target_bytes / machine.bandwidth
    return Costs(
        draft=draft_share,
        block=machine.block,
        place=machine.place,
        greedy=machine.greedy / step_seconds,
        random=machine.random / step_seconds,
        is_drawn=is_drawn,
        is_look_up=is_look_up,
    )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Pace:
    """Where each row stands.

    Attributes:
      round_cost_BG: float32, what a round of 1 … G proposals takes; 1 is a plain step.
      is_adaptive_B: bool; other rows always propose G tokens.
      counts_nothing_B: bool; whether nothing, where something was asked for, is a refused proposal.
      accepted_B, tested_B: float32, decayed counts.
      pause_B: int32, plain rounds that are left.
      next_pause_B: int32, rounds of the next pause.
    """

    round_cost_BG: jax.Array
    is_adaptive_B: jax.Array
    counts_nothing_B: jax.Array
    accepted_B: jax.Array
    tested_B: jax.Array
    pause_B: jax.Array
    next_pause_B: jax.Array


def begin(is_random_B: jax.Array, costs: Costs | None, num_draft_tokens: int) -> Pace:
    """Returns the pace of rows about which nothing is known.

    Args:
      is_random_B: bool, the rows that draw.
      costs: ``None`` for rows that always propose.
      num_draft_tokens: G.
    """
    num_1G = jnp.arange(1, num_draft_tokens + 1, dtype=jnp.float32)[None, :]
    shape = (is_random_B.shape[0], num_draft_tokens)
    round_cost_BG = jnp.ones(shape, jnp.float32)
    if costs is not None:
        choice_B1 = jnp.where(is_random_B, costs.random, costs.greedy)[:, None]
        proposing_BG = (costs.draft + choice_B1 * costs.is_drawn) * num_1G
        # The block has its G + 1 places whatever is proposed, and a choice is made at each.
        block_B1 = costs.block + costs.place * num_draft_tokens + choice_B1 * (num_draft_tokens + 1)
        round_cost_BG = (proposing_BG + block_B1) / (1 + choice_B1)
    zeros_B = jnp.zeros(shape[0], jnp.float32)
    return Pace(
        round_cost_BG=round_cost_BG,
        is_adaptive_B=jnp.full(shape[0], costs is not None),
        counts_nothing_B=jnp.full(shape[0], costs is not None and not costs.is_look_up),
        accepted_B=zeros_B,
        tested_B=zeros_B,
        pause_B=jnp.zeros(shape[0], jnp.int32),
        next_pause_B=jnp.full(shape[0], LEAST_PAUSE, jnp.int32),
    )


def expected_speed(pace: Pace) -> jax.Array:
    """Returns float32 (B, G), how fast rounds of 1 … G proposals are expected to be; plain decoding is 1."""
    alpha_B1 = ((pace.accepted_B + PRIOR_ACCEPTED) / (pace.tested_B + PRIOR_TESTED))[:, None]
    num_1P = jnp.arange(pace.round_cost_BG.shape[1] + 1)[None, :]
    expected_BP = jnp.cumsum(alpha_B1**num_1P, axis=1)
    return expected_BP[:, 1:] / pace.round_cost_BG


def want(pace: Pace) -> jax.Array:
    """Returns int32 (B,), how many tokens to propose: none in a pause, else as many as are expected to be fastest."""
    best_B = jnp.argmax(expected_speed(pace), axis=1).astype(jnp.int32) + 1
    return jnp.where(pace.is_adaptive_B, jnp.where(pace.pause_B > 0, 0, best_B), pace.round_cost_BG.shape[1])


def update(pace: Pace, accepted_B: jax.Array, tested_B: jax.Array, is_nothing_B: jax.Array) -> Pace:
    """Returns the pace after a round.

    Args:
      accepted_B, tested_B: int32, of the round. A round that tested nothing says nothing of the acceptance.
      is_nothing_B: bool; whether the draft was asked for tokens and had none. False in a pause.
    """
    tested_B = jnp.where(is_nothing_B & pace.counts_nothing_B, 1, tested_B)
    is_tested_B = tested_B > 0
    decay_B = jnp.where(is_tested_B, DECAY, 1.0)
    counted = dataclasses.replace(
        pace,
        accepted_B=pace.accepted_B * decay_B + accepted_B,
        tested_B=pace.tested_B * decay_B + tested_B,
        pause_B=jnp.maximum(pace.pause_B - 1, 0),
    )
    gives_up_B = is_tested_B & (jnp.max(expected_speed(counted), axis=1) < LEAST_SPEED)
    longer_B = jnp.minimum(2 * pace.next_pause_B, MOST_PAUSE)
    return dataclasses.replace(
        counted,
        pause_B=jnp.where(gives_up_B, pace.next_pause_B, counted.pause_B),
        next_pause_B=jnp.where(gives_up_B, longer_B, jnp.where(is_tested_B, LEAST_PAUSE, pace.next_pause_B)),
    )
