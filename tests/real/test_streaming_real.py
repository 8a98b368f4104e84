"""A real model past the length that it was trained for: with sinks inside the cache it goes on as at the beginning."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

import jdecode
from jdecode import language_model
from jdecode.decode import prefill

pytestmark = [pytest.mark.real_model, pytest.mark.slow]

ROOT = pathlib.Path(__file__).parents[2]
SINKS, LEN, JUDGED = 4, 1024, 512


def _perplexity(lm: language_model.LanguageModel, ids: list[int], start: int) -> float:
    """Judges a text's last tokens, where all but the sinks stand at ``start`` and after it: nothing is between them."""
    cache = lm.init_cache(batch_size=1, capacity=start + len(ids))
    cache, _ = prefill.prefill(lm.model, lm.params, [ids[:SINKS]], cache)
    cache = dataclasses.replace(cache, length_B=jnp.asarray([start], jnp.int32))
    (logprobs,) = prefill.score(lm.model, lm.params, [ids[SINKS:]], cache)
    return float(np.exp(-logprobs[-JUDGED:].mean()))


def test_smollm2_past_its_trained_length(smollm2_gguf):
    lm = jdecode.load(smollm2_gguf, dtype="float32")
    ids = lm.encode((ROOT / "LICENSE").read_text(encoding="utf-8"))[:LEN]
    past = 5 * lm.config.max_positions // 2
    sinks = lm.with_window(252, SINKS)
    near, far = _perplexity(sinks, ids, SINKS), _perplexity(sinks, ids, past)
    assert near < 25  # a licence in English
    assert far == pytest.approx(near, rel=0.05)
    # A window alone has left the first tokens behind.
    assert _perplexity(lm.with_window(256, 0), ids, SINKS) > 1.2 * near
    assert len({sinks.init_cache(batch_size=1, capacity=size).num_bytes for size in (500, past, 10**6)}) == 1
