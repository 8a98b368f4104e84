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

    def perplexity(logprobs: np.ndarray) -> float:
        return float(np.exp(-logprobs[-judged:].mean()))

    sinks = lm.with_window(252, 4)
    (logprobs,) = sinks.score([ids])
    # Prose and tables about software: some tens a token for this model with a few hundred tokens of context.
    assert perplexity(logprobs) < 100
    # A window alone breaks down as soon as it has left the first token.
    (window,) = lm.with_window(256, 0).score([ids[:1536]])
    assert perplexity(window) > 3 * perplexity(logprobs[: len(window)])
    caches = [sinks.init_cache(batch_size=1, capacity=capacity) for capacity in (500, len(ids), 10**6)]
    assert len({cache.num_bytes for cache in caches}) == 1
