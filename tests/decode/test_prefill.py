"""Reading prompts in chunks."""

import numpy as np
import pytest

from jdecode import config
from jdecode.decode import prefill
from tests import tiny_model

ATOL = 2e-4
"""On logits of about ten, between float32 implementations; the goldens' own noise is under 2e-5."""


def read(name: str, prompts, capacity: int = 80, cache_config=config.CacheConfig(), **options):
    lm = tiny_model.load(name)
    cache = lm.init_cache(batch_size=len(prompts), capacity=capacity, cache=cache_config)
    return prefill.prefill(lm.model, lm.params, prompts, cache, **options)


# The window of the gemma model is 16 and that of mistral too: chunks of one, of W - 1, W, W + 1, and past 2 W.
@pytest.mark.parametrize("chunk_len", [1, 15, 16, 17, 35, 512])
@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text", "mistral_w16"])
def test_chunks_give_the_golden_logits(name, chunk_len):
    prompts = tiny_model.prompts(name)
    cache, logits_BV = read(name, prompts, chunk_len=chunk_len)
    for row in range(3):
        golden_V = tiny_model.golden(name)[f"logits_full_{row}"][-1]
        np.testing.assert_allclose(logits_BV[row], golden_V, atol=ATOL, rtol=0)
    assert cache.length_B.tolist() == [len(prompt) for prompt in prompts]


@pytest.mark.parametrize("slack", [0, 4])
@pytest.mark.parametrize("cut", [1, 16, 40, 60])
def test_second_prefill_continues_where_the_cache_ends(cut, slack):
    lm, prompt = tiny_model.load("gemma3_text"), tiny_model.prompts("gemma3_text")[2]
    cache = lm.init_cache(batch_size=1, capacity=80, cache=config.CacheConfig(slack=slack))
    cache, _ = prefill.prefill(lm.model, lm.params, [prompt[:cut]], cache)
    cache, logits_BV = prefill.prefill(lm.model, lm.params, [prompt[cut:]], cache)
    np.testing.assert_allclose(logits_BV[0], tiny_model.golden("gemma3_text")["logits_full_2"][-1], atol=ATOL, rtol=0)
    assert cache.length_B.tolist() == [61]


def test_chunks_are_padded_to_few_widths():
    rows = [list(range(1, 21)), [30]]
    cut = list(prefill.chunks(rows, 16))
    assert [tokens_BT.shape for tokens_BT, _ in cut] == [(2, 16), (2, 16)]
    assert [num_tokens_B.tolist() for _, num_tokens_B in cut] == [[16, 1], [4, 0]]
    assert [token for tokens_BT, num in cut for token in tokens_BT[0, : num[0]]] == rows[0]
    assert cut[0][0][1, 0] == 30
    # The last chunk: the least power of two, at least 16, at most the length of a chunk.
    widths = {num: [tokens.shape[1] for tokens, _ in prefill.chunks([[7] * num], 100)] for num in (1, 16, 17, 64, 70)}
    assert widths == {1: [16], 16: [16], 17: [32], 64: [64], 70: [100]}
    assert [tokens.shape[1] for tokens, _ in prefill.chunks([[7] * 133], 100)] == [100, 64]
    assert [tokens.shape[1] for tokens, _ in prefill.chunks([[7] * 3], 1)] == [1, 1, 1]


def test_what_does_not_fit_is_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"expected room for 6 tokens in row 1 \(0 held, 6 more\), got 5 slots"):
        read("llama_gqa", [[5] * 5, [6] * 6], capacity=5)
    lm = tiny_model.load("llama_gqa")
    cache, _ = read("llama_gqa", [[5, 6, 7], [8]], capacity=5)
    with pytest.raises(ValueError, match=r"expected room for 6 tokens in row 0 \(3 held, 3 more\), got 5 slots"):
        prefill.prefill(lm.model, lm.params, [[5] * 3, [6] * 4], cache)
    # The refusal came before the cache was touched: what fits goes in, to the last slot.
    cache, logits_BV = prefill.prefill(lm.model, lm.params, [[9, 10], [11, 12, 13, 14]], cache)
    assert cache.length_B.tolist() == [5, 5]
    _, whole_BV = read("llama_gqa", [[5, 6, 7, 9, 10], [8, 11, 12, 13, 14]], capacity=64)
    np.testing.assert_allclose(logits_BV, whole_BV, atol=ATOL, rtol=0)
    # Rings of windows alone have no last slot.
    cache, _ = read("mistral_w16", [[5] * 100], capacity=20)
    assert cache.max_len is None and cache.length_B.tolist() == [100]


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[5], []], "prompt of row 1: expected at least one token, got none"),
        ([[5]], "prompts: expected 2, one for each row of the cache, got 1"),
        ([[5], [6], [7]], "prompts: expected 2, one for each row of the cache, got 3"),
    ],
)
def test_prompts_that_do_not_match_the_cache_are_refused(prompts, message):
    lm = tiny_model.load("llama_gqa")
    for function in (prefill.prefill, prefill.score):
        with pytest.raises(ValueError, match=f"^{message}"):
            function(lm.model, lm.params, prompts, lm.init_cache(batch_size=2, capacity=9))


def test_padding_is_neither_seen_nor_stored(monkeypatch):
    # Another filler changes no bit, and no slot holds a position that was not fed.
    prompts = tiny_model.prompts("gemma3_text")
    _, expected_BV = read("gemma3_text", prompts)
    monkeypatch.setattr(prefill, "PADDING_TOKEN", 77)
    lm = tiny_model.load("gemma3_text")
    cache = lm.init_cache(batch_size=3, capacity=80)
    cache, logits_BV = prefill.prefill(lm.model, lm.params, prompts, cache)
    np.testing.assert_array_equal(logits_BV, expected_BV)
    full = next(idx for idx, layout in enumerate(cache.layouts) if layout.max_len == 80)
    held = [sorted(p for p in row if 0 <= p < 80) for row in np.asarray(cache.positions[full]).tolist()]
    assert held == [list(range(len(prompt))) for prompt in prompts]
