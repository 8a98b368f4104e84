"""Prompts read cold and with a prefix cache, side by side, by a model with a ring, a ring with sinks and a full layer.

Its windows see four tokens. Prompts are read at one size of cache, and so with few programs.
"""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode import language_model
from jdecode.cache import kv_cache
from jdecode.decode import prompt_reader
from jdecode.models import transformer
from jdecode.serving import prefix_cache
from tests import tiny_models

VOCAB, CAPACITY, PAGE_LEN = 331, 64, 2  # ids past 8 bits; windows of two pages
CONFIG = dataclasses.replace(tiny_models.MIXED, vocab_size=VOCAB)
AUTO = config_lib.CacheConfig()
TAIL_LEN = 6
"""Tokens that are fed after the prompts, to see the whole cache: more than a window."""


def make_lm(config: config_lib.ModelConfig = CONFIG, seed: int = 1) -> language_model.LanguageModel:
    params = {"params": tiny_models.random_params(config, seed)}
    model = transformer.Transformer(config, dtype="float32")
    return language_model.LanguageModel(config=config, model=model, params=params, tokenizer=None)


LM = make_lm()


def text(length: int, seed: int = 2) -> list[int]:
    """Draws ids, none of them 0."""
    return tiny_models.random_rows([length], VOCAB, seed)[0]


def init(num_pages: int = 200, **options) -> prefix_cache.PrefixCache:
    return LM.init_prefix_cache(num_pages=num_pages, page_len=PAGE_LEN, **options)


def read(
    reader: prompt_reader.PromptReader,
    prompts: Sequence[Sequence[int]],
    cache: config_lib.CacheConfig,
    lm: language_model.LanguageModel = LM,
) -> tuple[list[np.ndarray], prompt_reader.PromptReading]:
    """Reads prompts; returns for each row the logits after it and after each token of a tail, and the reading."""
    empty = lm.init_cache(batch_size=len(prompts), capacity=CAPACITY, cache=cache)
    reading = reader.read(lm.model, lm.params, prompts, empty)
    first_BV = np.asarray(reading.logits_BV)
    tail_BT = jnp.asarray(tiny_models.random_rows([TAIL_LEN] * len(prompts), VOCAB, seed=5), jnp.int32)
    copy = jax.tree.map(jnp.copy, reading.cache)
    after_BTV, _ = tiny_models.apply(lm.model, lm.params["params"], tail_BT, copy)
    return [np.concatenate([first_BV[row, None], np.asarray(after_BTV)[row]]) for row in range(len(prompts))], reading


def check(
    prefixes: prefix_cache.PrefixCache,
    prompts: Sequence[Sequence[int]],
    cache: config_lib.CacheConfig = AUTO,
    lm: language_model.LanguageModel = LM,
) -> int:
    """Holds prompts that are read with a prefix cache against a cold reading; returns how many tokens were reused."""
    cold, _ = read(prompt_reader.PlainReader(), prompts, cache, lm)
    warm, reading = read(prefixes.reader(lm.model, lm.params, cache), prompts, cache, lm)
    tiny_models.assert_rows_close(warm, cold)
    assert [int(length) for length in reading.cache.length_B] == [len(prompt) for prompt in prompts]
    check_accounts(prefixes)
    return reading.stats["prefix_tokens_reused"]


def check_accounts(prefixes: prefix_cache.PrefixCache) -> None:
    """Checks tree and pool, and that nothing is held by anybody between two requests."""
    tree = prefixes._store.tree
    tree.check()
    assert tree.num_locks == 0 and tree.pool.num_used == 0
    assert tree.pool.num_free + tree.pool.num_cached == tree.pool.num_pages
    statistics = prefixes.statistics
    assert statistics.pages_held == tree.num_pages == tree.pool.num_cached
    assert 0 <= statistics.tokens_reused <= statistics.tokens_asked and 0 <= statistics.hits <= statistics.prompts


def poison_free_pages(prefixes: prefix_cache.PrefixCache) -> None:
    """Fills the pages that nothing is kept in: keys with NaN, values with 1e4, as a slot of nobody may hold."""
    device, pool = prefixes._store.device, prefixes._store.tree.pool
    free = jnp.asarray([page for page in range(pool.num_pages) if not pool.is_kept(page)], jnp.int32)

    def fill(rows, value: float):
        return jax.tree.map(lambda leaf: leaf.at[free].set(tiny_models.poison(leaf, value)), rows)

    device.stores = tuple(
        kv_cache.LayerStore(keys=fill(store.keys, np.nan), values=fill(store.values, 1e4)) for store in device.stores
    )
