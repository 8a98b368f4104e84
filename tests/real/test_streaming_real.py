"""A real model past the length that it was trained for: with sinks inside the cache it goes on, without it does not."""

import pathlib

import numpy as np
import pytest

import jdecode

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[2]
TEXTS = ("README.md", "LICENSE", "docs/architecture.md", "docs/ledger.md", "docs/limits.md", "CHANGELOG.md")


def test_smollm2_past_its_trained_length(smollm2_gguf):
    lm = jdecode.load(smollm2_gguf, dtype="float32")
    trained, judged = lm.config.max_positions, 512
    ids = lm.encode("\n".join((ROOT / name).read_text(encoding="utf-8") for name in TEXTS))[: trained + judged]
    assert len(ids) == trained + judged
    sinks, window = lm.with_window(252, 4), lm.with_window(256, 0)
    perplexity = {
        name: float(np.exp(-own.score([ids])[0][-judged:].mean()))
        for name, own in (("sinks", sinks), ("window", window))
    }
    # English prose: some 20 to 40 a token for this model with a few hundred tokens of context.
    assert perplexity["sinks"] < 60, perplexity
    assert perplexity["window"] > 3 * perplexity["sinks"], perplexity
    caches = [sinks.init_cache(batch_size=1, capacity=capacity) for capacity in (500, len(ids), 10**6)]
    assert len({cache.num_bytes for cache in caches}) == 1
