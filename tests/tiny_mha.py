"""A random multi-head model with a tokenizer of its own, and texts to train it on."""

import dataclasses
import functools
import pathlib
import random

import jax

from jdecode import config
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus, vocabulary
from jdecode.weights import safetensors_save
from tests import tiny_models

# One key/value head for each query head; a ring and a full layer.
MODEL = dataclasses.replace(
    tiny_models.MIXED,
    vocab_size=290,
    num_kv_heads=4,
    max_positions=20,
    layers=(config.LayerConfig(window=4), config.LayerConfig()),
)
_WORDS = ("the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "while", "seven", "grey", "cats", "né")


def text(seed: int) -> str:
    """Returns some words, more of them for a greater seed."""
    rng = random.Random(seed)
    return " ".join(rng.choice(_WORDS) for _ in range(20 + 5 * seed))


def files() -> corpus.Corpus:
    """Returns texts of different lengths: six to train on, two held out."""
    documents = [corpus.Document(f"{idx}.txt", text(idx)) for idx in range(8)]
    return corpus.Corpus(description="words", train=tuple(documents[2:]), held_out=tuple(documents[:2]))


@functools.cache
def tokenizer(vocab_size: int = MODEL.vocab_size) -> tokenizer_lib.Tokenizer:
    """Trains a tokenizer on the texts: end token 0."""
    return vocabulary.train_tokenizer((document.text for document in files().train), vocab_size)


def write_files(folder: pathlib.Path) -> None:
    """Writes the texts as ``.txt`` files, of which the last two are held out by their names."""
    folder.mkdir()
    names = [f"{number}.txt" for number in range(400)]
    train = [name for name in names if not corpus.is_held_out(name, 0.05)][:6]
    held_out = [name for name in names if corpus.is_held_out(name, 0.05)][:2]
    for seed, name in enumerate(train + held_out):
        (folder / name).write_text(text(seed), encoding="utf-8")


def write_model(folder: pathlib.Path, dtype: str) -> None:
    """Writes the model as a Hugging Face folder, with a second end token and a generation configuration."""
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), tiny_models.random_params(MODEL))
    tokenizer().save(folder)
    defaults = {"top_p": 0.75}
    safetensors_save.save_hugging_face(folder, params, MODEL, eos_token_ids=(0, 7), generation_defaults=defaults)
