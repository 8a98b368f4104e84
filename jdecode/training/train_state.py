"""The state of a run, and the one function that advances it."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

from jdecode.models import transformer
from jdecode.training import objective as objective_lib
from jdecode.training import optimizer as optimizer_lib
from jdecode.training import train_config

_INIT_PURPOSE, _ORDER_PURPOSE = 0, 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """Everything that the next step depends on, but for the corpus and the config.

    Attributes:
      params: of the model, float32.
      opt_state: of the optimiser.
      step: int32, steps taken.
      num_sequences: int32, sequences read: the position in the data.
      key: of the order of the data (``TokenStream.sequences``); a typed key.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    num_sequences: jax.Array
    key: jax.Array


def init_state(model: transformer.Transformer, config: train_config.TrainConfig, params: Any = None) -> TrainState:
    """Makes the state before the first step.

    Args:
      model: to train.
      config: of the run; its seed makes the weights and the order of the data.
      params: float32, to start from instead of fresh weights.
    """
    root = jax.random.key(config.seed)
    if params is None:
        params = init_params(model, jax.random.fold_in(root, _INIT_PURPOSE))
    optimizer = optimizer_lib.make_optimizer(config.optimizer, config.num_steps)
    return TrainState(
        params=params,
        opt_state=optimizer.init(params),
        step=jnp.int32(0),
        num_sequences=jnp.int32(0),
        key=jax.random.fold_in(root, _ORDER_PURPOSE),
    )


def init_params(model: transformer.Transformer, key: jax.Array) -> Any:
    """Draws fresh weights: ``{"params": tree}``, float32."""
    tokens_BT = jnp.zeros((1, 1), jnp.int32)
    return nn.meta.unbox(jax.jit(model.init)(key, tokens_BT))


def train_step(
    objective: objective_lib.Objective,
    config: train_config.OptimizerConfig,
    num_steps: int,
    state: TrainState,
    teacher_params: Any,
    tokens_ABT: jax.Array,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes one step of the optimiser.

    Args:
      objective, config, num_steps: static. ``num_steps`` ends the learning rate's cosine.
      state: donated.
      teacher_params: for the objective.
      tokens_ABT: int32, A micro-batches of B sequences; their gradients are averaged.

    Returns:
      The state after the step, and float32 scalars: ``loss``, what the objective records, ``gradient_norm`` (before
      clipping) and ``learning_rate`` of this step.
    """
    total = None
    # A loop on the host: XLA's CPU backend runs what is inside a loop of its own on fewer threads.
    for tokens_BT in tokens_ABT:
        total = _add_gradient(objective, state.params, teacher_params, tokens_BT, total)
    return _update(config, num_steps, state, total, *tokens_ABT.shape[:2])


@functools.partial(jax.jit, static_argnums=0, donate_argnums=4)
def _add_gradient(
    objective: objective_lib.Objective, params: Any, teacher_params: Any, tokens_BT: jax.Array, total: Any
) -> tuple[Any, dict[str, jax.Array]]:
    """Returns a micro-batch's gradient and scalars, added to ``total`` (donated) where it is not ``None``."""
    (loss, scalars), gradient = jax.value_and_grad(objective, has_aux=True)(params, teacher_params, tokens_BT)
    result = gradient, {"loss": loss, **scalars}
    return result if total is None else jax.tree.map(jnp.add, total, result)


@functools.partial(jax.jit, static_argnums=(0, 1, 4, 5), donate_argnums=2)
def _update(
    config: train_config.OptimizerConfig,
    num_steps: int,
    state: TrainState,
    total: Any,
    num_micro_batches: int,
    batch_size: int,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Takes the optimiser's step with the mean of the micro-batches' gradients."""
    gradient, scalars = jax.tree.map(lambda leaf: leaf / num_micro_batches, total)
    optimizer = optimizer_lib.make_optimizer(config, num_steps)
    updates, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    scalars["gradient_norm"] = optax.tree.norm(gradient)
    scalars["learning_rate"] = optimizer_lib.learning_rate(config, num_steps)(state.step)
    after = TrainState(
        params=optax.apply_updates(state.params, updates),
        opt_state=opt_state,
        step=state.step + 1,
        num_sequences=state.num_sequences + num_micro_batches * batch_size,
        key=state.key,
    )
    return after, scalars
