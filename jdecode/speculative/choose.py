"""From what a caller names as a draft to a ``Speculation``."""

from typing import Any

import jax

from jdecode import config as config_lib
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import draft_layer_skip, draft_model, draft_ngram, pace, speculation, verify


def layer_skip(model: transformer.Transformer, num_layers: int | None = None) -> draft_layer_skip.LayerSkipDraft:
    """Makes a draft of a model's own first layers; ``None`` for a third of them."""
    if num_layers is None:
        num_layers = max(1, model.config.num_layers // 3)
    config = draft_layer_skip.first_layers(model.config, num_layers)
    return draft_layer_skip.LayerSkipDraft(transformer.Transformer(config, backend=model.backend, dtype=model.dtype))
