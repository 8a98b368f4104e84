"""The drafts that the equalities are tested with, and one whose every proposal a test decides."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import language_model
from jdecode.speculative import proposals

KINDS = ("model", "ngram", "layer_skip")


def blocks(*ordinary: int) -> list[Any]:
    """Returns numbers of proposals to parametrize with, 1 to 8: all but those named are ``exhaustive``."""
    return [num if num in ordinary else pytest.param(num, marks=pytest.mark.exhaustive) for num in range(1, 9)]


def noisy(lm: language_model.LanguageModel, share: float = 0.15) -> language_model.LanguageModel:
    """Returns a model that mostly agrees with another: its weights plus noise of a share of their deviation."""
    leaves, structure = jax.tree.flatten(lm.params)
    random = np.random.default_rng(1)
    changed = [
        leaf + jnp.asarray(random.normal(size=leaf.shape), leaf.dtype) * (share * jnp.std(leaf)) for leaf in leaves
    ]
    return dataclasses.replace(lm, params=jax.tree.unflatten(structure, changed))


def make(kind: str, lm: language_model.LanguageModel) -> Any:
    """Returns what ``generate`` takes as ``draft``."""
    return noisy(lm) if kind == "model" else kind


@dataclasses.dataclass(frozen=True)
class ScriptedDraft:
    """Proposes what ``tiny_model.RepeatPrompt`` makes a row write, but for one wrong token.

    Attributes:
      num_right: a round's proposals before the wrong one, round after round; the last one holds for all that follow.
      num_proposed: likewise, the proposals of the round; at most what is wanted.
    """

    num_right: tuple[int, ...]
    num_proposed: tuple[int, ...] = (64,)

    def begin(self, params, prompts: Sequence[Sequence[int]], *, num_samples: int, max_len: int) -> dict[str, Any]:
        del params
        token_BM = np.zeros((len(prompts) * num_samples, 2 * max_len), np.int32)
        for row in range(len(token_BM)):
            token_BM[row, : len(prompts[row // num_samples])] = prompts[row // num_samples]
        return {"script_BM": jnp.asarray(token_BM), "round": jnp.int32(0)}

    def propose(self, task, params, memory, state, want_B):
        del params
        idx_G = jnp.arange(task.most, dtype=jnp.int32)
        place_BG = state.num_new_B[:, None] + idx_G[None, :]
        right_BG = jnp.take_along_axis(memory["script_BM"], place_BG, axis=1, mode="clip")
        num_right = jnp.asarray(self.num_right)[jnp.minimum(memory["round"], len(self.num_right) - 1)]
        num = jnp.asarray(self.num_proposed)[jnp.minimum(memory["round"], len(self.num_proposed) - 1)]
        wrong_BG = jnp.where(right_BG == 7, 8, 7)
        token_BG = jnp.where(idx_G[None, :] == num_right, wrong_BG, right_BG)
        found = proposals.Proposals(token_BG=token_BG, num_B=jnp.minimum(want_B, num), logits_BGV=None)
        return found, {**memory, "round": memory["round"] + 1}, state.cache

    def settle(self, memory, before, after):
        del before, after
        return memory
