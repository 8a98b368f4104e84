"""What an independent float32 implementation computed on the real models: reading it, and comparing with it."""

import json
import pathlib
from typing import Any

import numpy as np

from jdecode import config, language_model
from jdecode.cache import kv_cache
from jdecode.decode import prefill

GOLDEN = pathlib.Path(__file__).parent.parent / "golden" / "real"

# Two float32 implementations differ by about 1e-4 on a logit of these models. A wrong window, position or scale moves
# logits by 1e-2 and more.
LOGIT_ATOL = 2e-3
LOGPROB_ATOL = 2e-3
LOGPROB_SUM_RTOL = 1e-3
# A greedy step is decided where the two best logits are further apart than implementations are.
LEAST_GAP = 1e-3


def cases(name: str) -> dict[str, dict[str, Any]]:
    """Returns the cases of one model by name."""
    return {case["name"]: case for case in json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))}


def check_greedy(
    lm: language_model.LanguageModel, case: dict[str, Any], cache: config.CacheConfig = config.CacheConfig()
) -> kv_cache.KVCache:
    """Compares greedy tokens, text and finish reason; returns the cache after the run."""
    assert min(case["top2_gaps"]) > LEAST_GAP
    stream = lm.stream(case["input_ids"], max_new_tokens=case["max_new_tokens"], cache=cache)
    streamed = "".join(chunk.text for chunk in stream)
    result = stream.result
    assert result is not None
    assert result.tokens[0, : result.lengths[0]].tolist() == case["greedy_ids"]
    assert result.finish_reasons == ["stop" if case["stopped"] == "eos" else "length"]
    if lm.tokenizer is not None:
        assert result.texts == [case["greedy_text"]]
        assert streamed == case["greedy_text"]
    return stream.cache


def logit_difference(
    lm: language_model.LanguageModel, case: dict[str, Any], cache: config.CacheConfig = config.CacheConfig()
) -> float:
    """Returns the largest difference of the twenty best logits after the prompt."""
    needed = language_model.capacity_for(case["n_prompt"] + case["max_new_tokens"])
    empty = lm.init_cache(batch_size=1, capacity=needed, cache=cache)
    _, logits_BV = prefill.prefill(lm.model, lm.params, [case["input_ids"]], empty)
    logits_V, golden = np.asarray(logits_BV)[0], case["last_logits_top20"]
    assert int(logits_V.argmax()) == golden["ids"][0]
    # The twenty best of ours, whichever they are, must score what the golden twenty score.
    best_20 = np.sort(logits_V)[::-1][:20]
    return max(np.abs(logits_V[golden["ids"]] - golden["logits"]).max(), np.abs(best_20 - golden["logits"]).max())


def logprob_differences(lm: language_model.LanguageModel, case: dict[str, Any]) -> tuple[float, float]:
    """Returns the largest difference of a prompt token's log-probability (nats), and the sum's, relative."""
    (scores,) = lm.score(case["input_ids"])
    assert scores.shape == (case["num_scored_tokens"],)
    if not case["num_scored_tokens"]:
        return 0.0, 0.0
    difference = float(np.abs(scores - case["prompt_logprobs"]).max())
    total = float(scores.astype(np.float64).sum())
    return difference, abs(total - case["logprob_sum"]) / abs(case["logprob_sum"])
