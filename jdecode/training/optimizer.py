"""The optimiser of a run, from its config."""

import jax
import optax

from jdecode.training import train_config


def learning_rate(config: train_config.OptimizerConfig, num_steps: int) -> optax.Schedule:
    """Returns the schedule: linear from 0 to the peak, then a cosine to its final share at ``num_steps``."""
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0 if config.warmup_steps else config.learning_rate,
        peak_value=config.learning_rate,
        warmup_steps=config.warmup_steps,
        decay_steps=num_steps,
        end_value=config.learning_rate * config.final_share,
    )


def make_optimizer(config: train_config.OptimizerConfig, num_steps: int) -> optax.GradientTransformation:
    """Returns clipping and AdamW. Only matrices decay, not norm scales and biases."""
    adamw = optax.adamw(
        learning_rate(config, num_steps),
        b1=config.beta1,
        b2=config.beta2,
        eps=config.epsilon,
        weight_decay=config.weight_decay,
        mask=_matrices,
    )
    if config.clip_norm is None:
        return adamw
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), adamw)


def _matrices(params):
    return jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key == "weight", params)
