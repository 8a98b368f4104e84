"""A training run small enough for tests: words in some order, a model of two layers, a dozen steps."""

import dataclasses
import functools
import pathlib
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config as config_lib
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus, train_config, vocabulary
from jdecode.training import task as task_lib

# A ring and a full layer; every size another.
ARCHITECTURE = config_lib.ModelConfig(
    vocab_size=290,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layers=(config_lib.LayerConfig(window=4), config_lib.LayerConfig()),
    tie_embeddings=True,
)
CONFIG = train_config.TrainConfig(
    name="tiny",
    architecture=ARCHITECTURE,
    corpus=train_config.CorpusConfig(source="words", suffixes=(".txt",), held_out_share=0.25),
    optimizer=train_config.OptimizerConfig(learning_rate=1e-2, warmup_steps=2),
    sequence_len=11,
    batch_size=3,
    accumulation_steps=2,
    num_steps=7,
    seed=5,
    evaluate_every=3,
    checkpoint_every=2,
    weight_dtype="float32",
)
WORDS = (
    *("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while"),
    *("seven", "grey", "cats", "sleep", "under", "some", "old", "tree", "né"),
)


def text(seed: int, num_words: int) -> str:
    """Returns some words, a line end now and then."""
    rng = random.Random(seed)
    return "".join(rng.choice(WORDS) + rng.choice([" ", " ", "\n"]) for _ in range(num_words))


def files() -> corpus.Corpus:
    """Returns texts of different lengths: nine to train on, four held out, one of which is one word."""
    texts = [corpus.Document(f"{idx}.txt", text(idx, 20 + 7 * idx)) for idx in range(12)]
    one_word = corpus.Document("one.txt", "fox")
    return corpus.Corpus(description="words", train=tuple(texts[:9]), held_out=(*texts[9:], one_word))


def write_files(folder: pathlib.Path) -> None:
    """Writes texts as files: at a held-out share of 0.25 some lie on each side."""
    for idx in range(16):
        path = folder / f"sub{idx % 2}" / f"{idx}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text(idx, 20 + 7 * idx), encoding="utf-8")


@functools.cache
def tokenizer() -> tokenizer_lib.Tokenizer:
    """Trains the tokenizer of ``files``."""
    return vocabulary.train_tokenizer((document.text for document in files().train), ARCHITECTURE.vocab_size)


def task(teacher: task_lib.Teacher | None = None, **changes: Any) -> task_lib.Task:
    """Puts the run together, with some fields of its config changed."""
    return task_lib.make_task(dataclasses.replace(CONFIG, **changes), files(), tokenizer(), teacher)


def assert_equal(got: Any, expected: Any) -> None:
    """Compares two trees bit for bit."""
    assert jax.tree.structure(got) == jax.tree.structure(expected)
    for (path, one), other in zip(jax.tree.leaves_with_path(got), jax.tree.leaves(expected), strict=True):
        if jnp.issubdtype(one.dtype, jax.dtypes.prng_key):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other, err_msg=jax.tree_util.keystr(path))


def max_difference(got: Any, expected: Any) -> float:
    """Returns the greatest difference of two trees of arrays."""
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True)
    return max(float(np.abs(np.asarray(one) - np.asarray(other)).max()) for one, other in pairs)
