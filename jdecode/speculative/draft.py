"""The contract of a draft: what proposes tokens."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import jax

from jdecode import sampling
from jdecode.cache import kv_cache
from jdecode.decode import state as state_lib
from jdecode.speculative import proposals as proposals_lib


@dataclasses.dataclass(frozen=True)
class Task:
    """What is the same for every call of a draft. Static.

    Attributes:
      chain: the transforms before the draw, the same that the target's logits pass.
      vocab_size: V of the target.
      most: G, the most tokens of a proposal.
      purpose: the ``PURPOSE_`` of the draft's draws.
      needs_law: whether the logits of the proposals are wanted.
    """

    chain: sampling.Transform
    vocab_size: int
    most: int
    purpose: int
    needs_law: bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Params:
    """Parameters of the two sides, each as its own model takes them; ``draft`` is empty for a draft without any."""

    target: Any
    draft: Any


@runtime_checkable
class Draft(Protocol):
    """Proposes tokens to follow each row's latest one. Static: hashable, without arrays.

    What a draft remembers of the rows is a pytree of its own, ``memory``. A draft can only cost time: whatever it
    proposes, the text keeps its law.
    """

    def begin(self, params: Params, prompts: Sequence[Sequence[int]], *, num_samples: int, max_len: int) -> Any:
        """Reads the prompts, on the host, and returns the memory.

        Args:
          params: of both sides.
          prompts: ids of each prompt, with whatever the rows held before it.
          num_samples: rows a prompt; rows stand prompt by prompt.
          max_len: the most tokens, prompt and output, that a row can hold.
        """
        ...

    def propose(
        self, task: Task, params: Params, memory: Any, state: state_lib.DecodeState, want_B: jax.Array
    ) -> tuple[proposals_lib.Proposals, Any, kv_cache.KVCache]:
        """Proposes at most ``want_B`` (int32, 0 to ``task.most``) tokens a row. Pure, and can be traced.

        With an adaptive length, to propose none counts as a proposal that was refused (see ``pace``).

        Args:
          task: static.
          params: of both sides.
          memory: as it was left by ``begin`` or ``settle``.
          state: the target's rows; their latest token is in no cache yet.

        Returns:
          The proposals; the memory after them; and the target's cache, as it was but for slots past its length.
        """
        ...

    def settle(self, memory: Any, before: state_lib.DecodeState, after: state_lib.DecodeState) -> Any:
        """Returns the memory after a round, in which the rows went from ``before`` to ``after``. Pure."""
        ...
