"""The one step that every driver runs: feed the latest tokens, draw the next ones."""

import dataclasses
from typing import Any, Protocol, TypeVar

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.decode import emission
from jdecode.decode import state as state_lib
from jdecode.models import transformer


class Rows(Protocol):
    """What a driver looks at in a state. ``state.DecodeState`` is one; speculation carries more beside it."""

    @property
    def status_B(self) -> jax.Array:
        """int32, how each row stands."""
        ...

    @property
    def num_new_B(self) -> jax.Array:
        """int32, how many tokens each row has emitted."""
        ...


State = TypeVar("State", bound=Rows)


class Step(Protocol[State]):
    """Advances every running row by at least one token, or ends it. Static: hashable, without arrays.

    A row that is not running changes nothing, and no row depends on another.
    """

    def __call__(self, params: Any, state: State) -> State:
        """Returns the state after the step. Pure, and can be traced.

        Args:
          params: of the models that the step runs.
          state: at least one row should be running.
        """
        ...


@dataclasses.dataclass(frozen=True)
class PlainStep:
    """Advances every running row by one token. See ``Step``; its params are those of ``model``.

    Attributes:
      model: as ``model.apply`` takes its params.
      chain: the transforms before the draw.
    """

    model: transformer.Transformer
    chain: sampling.Transform

    def __call__(self, params: Any, state: state_lib.DecodeState) -> state_lib.DecodeState:
        """Feeds the latest tokens and emits the next ones."""
        is_live_B = state.status_B == state_lib.RUNNING
        logits_B1V, cache = self.model.apply(
            params, state.token_B[:, None], state.cache, num_tokens_B=is_live_B.astype(jnp.int32)
        )
        return emission.emit(self.chain, dataclasses.replace(state, cache=cache), logits_B1V[:, 0])
