"""What a run of speculative decoding counts. Only what was tested counts as tested.

The counts are of the device loop, before the host cuts a text at a stop string: the loop learns of the string at the
next look, and what it drafted, tested, accepted and emitted until then was real work and a real test of the draft. So
``accepted`` may hold tokens that are not in the result. An end token, which the loop sees itself, ends the counts.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Sums over the rounds so far.

    A proposal is tested if all before it in its block were accepted and the row did not end at one of them; it is
    accepted if it was emitted. So a proposal after an end token is neither, though it was drafted.

    Attributes:
      target_calls: int32 scalar, calls of the target, whatever the rows.
      target_places: int32 scalar, positions a row that those calls computed.
      rounds_B: int32, rounds in which the row was running.
      drafted_B: int32, proposed tokens.
      tested_BG, accepted_BG: int32, by place in the block.
    """

    target_calls: jax.Array
    target_places: jax.Array
    rounds_B: jax.Array
    drafted_B: jax.Array
    tested_BG: jax.Array
    accepted_BG: jax.Array


def no_counts(batch: int, most: int) -> Counts:
    """Returns zeros for B rows and blocks of at most G = ``most`` proposals."""
    return Counts(
        target_calls=jnp.int32(0),
        target_places=jnp.int32(0),
        rounds_B=jnp.zeros(batch, jnp.int32),
        drafted_B=jnp.zeros(batch, jnp.int32),
        tested_BG=jnp.zeros((batch, most), jnp.int32),
        accepted_BG=jnp.zeros((batch, most), jnp.int32),
    )


def add_round(
    counts: Counts,
    is_live_B: jax.Array,
    num_places: int,
    *,
    drafted_B: jax.Array,
    tested_B: jax.Array,
    accepted_B: jax.Array,
) -> Counts:
    """Adds a round, which is one call of the target over ``num_places`` positions a row.

    Args:
      is_live_B: bool, the rows that took part; the others have zeros in what follows.
      drafted_B, tested_B, accepted_B: int32, how many proposals, from the first place on.
    """
    place_1G = jnp.arange(counts.tested_BG.shape[1])[None, :]
    return Counts(
        target_calls=counts.target_calls + 1,
        target_places=counts.target_places + num_places,
        rounds_B=counts.rounds_B + is_live_B,
        drafted_B=counts.drafted_B + drafted_B,
        tested_BG=counts.tested_BG + (place_1G < tested_B[:, None]),
        accepted_BG=counts.accepted_BG + (place_1G < accepted_B[:, None]),
    )


def summary(counts: Counts) -> dict[str, Any]:
    """Sums up for people, over all rows. All of it is of the device loop, see the module's text.

    Returns:
      ``drafted``, ``tested``, ``accepted``, ``target_calls``, ``target_places``; ``acceptance_rate``, accepted of
      drafted (0 where nothing was drafted); ``tested_by_place``; and ``acceptance_by_place``, for each place of the
      block the share of the tested proposals that were accepted (``None`` where none was tested).
    """
    counts = jax.tree.map(np.asarray, counts)
    tested_G, accepted_G = counts.tested_BG.sum(axis=0).tolist(), counts.accepted_BG.sum(axis=0).tolist()
    drafted, accepted = int(counts.drafted_B.sum()), sum(accepted_G)
    return {
        "drafted": drafted,
        "tested": sum(tested_G),
        "accepted": accepted,
        "target_calls": int(counts.target_calls),
        "target_places": int(counts.target_places),
        "acceptance_rate": accepted / drafted if drafted else 0.0,
        "tested_by_place": tested_G,
        "acceptance_by_place": [
            hits / tests if tests else None for hits, tests in zip(accepted_G, tested_G, strict=True)
        ],
    }
