"""A window, and sinks, for models that were trained without: text of any length in constant memory.

StreamingLLM (Xiao et al. 2024): a layer that sees everything is made to see the latest W positions and the first N. The
window's keys need nothing, since rope is relative; of the sinks see ``models.sinks``. What leaves the window is
forgotten.
"""

import dataclasses

from jdecode import config as config_lib


def with_window(model: config_lib.ModelConfig, streaming: config_lib.StreamingConfig) -> config_lib.ModelConfig:
    """Returns the model with the window and the sinks on every layer that has no window; others keep their own."""
    layers = tuple(
        dataclasses.replace(layer, window=streaming.window, num_sinks=streaming.num_sinks)
        if layer.window is None
        else layer
        for layer in model.layers
    )
    return dataclasses.replace(model, layers=layers)


def check(model: config_lib.ModelConfig, streaming: config_lib.StreamingConfig) -> None:
    """Refuses what would be no use.

    Raises:
      ValueError: no layer would get a window, or one would see further than the model was trained for.
    """
    if not is_wanting(model):
        raise ValueError(
            "window: expected a model with layers that have no window, got one whose every layer has one; leave it out"
        )
    if streaming.window + streaming.num_sinks > model.max_positions:
        raise ValueError(
            f"window: expected window and sinks of at most {model.max_positions:,} positions together, as the model "
            f"was trained for, got {streaming.window:,} and {streaming.num_sinks:,}; give a smaller window"
        )


def is_wanting(model: config_lib.ModelConfig) -> bool:
    """Says whether some layer has no window."""
    return any(layer.window is None for layer in model.layers)


def is_endless(model: config_lib.ModelConfig) -> bool:
    """Says whether a text may go on for ever: no query is further from a key that it sees than in training."""
    return not is_wanting(model) and all(
        (layer.window or 0) + layer.num_sinks <= model.max_positions
        and (not layer.num_sinks or layer.turns_sinks or layer.rope is None)
        for layer in model.layers
    )
