"""The same loop on eight devices gives the tokens of one: any number of key/value heads, full caches and rings."""

import jax
import numpy as np
import pytest

import jdecode
from jdecode import config
from jdecode.decode import loop
from tests import tiny_model

SOURCE = tiny_model.GOLDEN / "tiny"
NUM_NEW = tiny_model.NUM_GREEDY


def load(name: str, data: int, model: int):
    return jdecode.load(SOURCE / name, dtype="float32", mesh=config.MeshConfig(data=data, model=model))


def run(lm, prompts, **options):
    """Returns the tokens of each row and the cache after them."""
    stream = lm.stream(prompts, max_new_tokens=NUM_NEW, ignore_eos=True, steps_per_look=loop.ALL_TOKENS, **options)
    list(stream)
    assert stream.result is not None
    return tiny_model.rows(stream.result), stream.cache


def shard_shape(array: jax.Array) -> tuple[int, ...]:
    return array.addressable_shards[0].data.shape


# Heads N and key/value heads K: llama_mha 8 and 8, llama_gqa 8 and 2, gemma3_text and mistral_w16 4 and 1,
# gemma3_scaled 6 and 3. Vocabularies 211, 288, 163, 160: some are not divisible.
MESHES = [
    ("llama_mha", 1, 8),
    pytest.param("llama_mha", 1, 2, marks=pytest.mark.slow),
    ("llama_gqa", 2, 4),
    ("gemma3_text", 2, 4),
    pytest.param("gemma3_scaled", 1, 2, marks=pytest.mark.slow),
    ("mistral_w16", 4, 2),
]


@pytest.mark.parametrize(("name", "data", "model"), MESHES)
def test_tokens_equal_those_of_one_device(name, data, model):
    lm = load(name, data, model)
    golden = tiny_model.greedy(name)
    prompts = [*tiny_model.prompts(name), tiny_model.prompts(name)[1]]
    tokens, cache = run(lm, prompts)
    assert tokens == [*golden, golden[1]]
    # It was really spread: rows along data, and heads along model where it divides them.
    data_BSX = cache.stores[0].keys.data_BSX  # pyright: ignore[reportAttributeAccessIssue]
    assert len(data_BSX.sharding.device_set) == data * model
    K, H = lm.config.num_kv_heads, lm.config.head_dim
    width = K * H // model if K % model == 0 else K * H
    assert shard_shape(data_BSX) == (4 // data, data_BSX.shape[1], width)
    # Every mate draws with its own seed; the same loop on one device is the reference.
    configs = [config.SamplingConfig(temperature=1.0, top_p=0.95, seed=seed) for seed in (21, 22, 23, 24)]
    on_mesh, _ = run(lm, prompts, sampling=configs)
    on_one_device, _ = run(tiny_model.load(name), prompts, sampling=configs)
    assert on_mesh == on_one_device
    assert on_mesh != tokens


def test_rows_that_the_mesh_does_not_divide():
    # Three rows on four: they stay whole on every device.
    lm = load("mistral_w16", 4, 2)
    tokens, _ = run(lm, tiny_model.prompts("mistral_w16"))
    assert tokens == tiny_model.greedy("mistral_w16")


def test_samples_on_a_mesh():
    lm = load("llama_gqa", 2, 4)
    sampling = config.SamplingConfig(temperature=1.0, seed=31)
    prompt = tiny_model.prompts("llama_gqa")[:1]
    on_mesh, _ = run(lm, prompt, num_samples=4, sampling=sampling)
    on_one_device, _ = run(tiny_model.load("llama_gqa"), prompt, num_samples=4, sampling=sampling)
    assert on_mesh == on_one_device
    assert len({tuple(tokens) for tokens in on_mesh}) == 4


def test_pages_on_a_mesh():
    lm = load("llama_mha", 1, 8)
    paged = config.CacheConfig(layout="paged", page_len=16)
    tokens, cache = run(lm, tiny_model.prompts("llama_mha"), num_samples=2, cache=paged)
    assert tokens == [row for row in tiny_model.greedy("llama_mha") for _ in range(2)]
    data_PZX = cache.stores[0].keys.data_BSX  # pyright: ignore[reportAttributeAccessIssue]
    assert shard_shape(data_PZX) == (*data_PZX.shape[:2], data_PZX.shape[2] // 8)  # a head on each device
    with pytest.raises(ValueError, match=r"layout paged: expected a mesh with data=1 .* got data=2"):
        load("llama_gqa", 2, 4).generate([[5]], cache=paged)


def test_weights_are_spread_and_scores_are_the_same():
    lm, alone = load("llama_gqa", 2, 4), tiny_model.load("llama_gqa")
    params = lm.params["params"]
    # N=8 over 4 devices; K=2 is not divisible by 4 and stays whole; F=64; V=288.
    assert shard_shape(params["layers_0"]["attention"]["query"]["weight"]) == (2, 12, 64)
    assert shard_shape(params["layers_0"]["attention"]["key"]["weight"]) == (2, 12, 64)
    assert shard_shape(params["layers_0"]["feed_forward"]["gate"]["weight"]) == (16, 64)
    assert shard_shape(params["embedding"]["weight"]) == (72, 64)
    prompts = tiny_model.prompts("llama_gqa")
    for ours, theirs in zip(lm.score(prompts), alone.score(prompts), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)


def test_last_slot_of_a_spread_cache():
    # Rows of 4, 19 and 43 tokens; the longest fills its cache to the last slot.
    lm = load("llama_gqa", 2, 4)
    prompts = tiny_model.prompts("llama_gqa")
    tokens, cache = run(lm, [*prompts, prompts[0]], capacity=43 + NUM_NEW)
    golden = tiny_model.greedy("llama_gqa")
    assert tokens == [*golden, golden[0]]
    assert cache.max_len == 67


@pytest.mark.parametrize("eviction", ["h2o", pytest.param("snapkv", marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_a_cache_that_keeps_a_part(eviction):
    lm = load("llama_mha", 2, 4)
    prompts = [*tiny_model.prompts("llama_mha"), tiny_model.prompts("llama_mha")[1]]
    cache = config.CacheConfig(budget=12, eviction=eviction, num_recent=4)
    on_mesh, spread = run(lm, prompts, cache=cache)
    on_one_device, _ = run(tiny_model.load("llama_mha"), prompts, cache=cache)
    assert on_mesh == on_one_device != tiny_model.greedy("llama_mha")
    data_BSX = spread.stores[0].keys.data_BSX  # pyright: ignore[reportAttributeAccessIssue]
    assert shard_shape(data_BSX) == (2, data_BSX.shape[1], data_BSX.shape[2] // 4)
    # Tables too: a row's bookkeeping lies where its keys do.
    assert all(shard_shape(position_BS)[0] == 2 for position_BS in spread.positions)
