"""The tiny models of tests/golden, and a transform that makes any of them write a given text."""

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdecode
from jdecode import config, generation, language_model, sampling
from jdecode.models import panels, transformer

GOLDEN = pathlib.Path(__file__).parent / "golden"
NUM_GREEDY = 24
"""Tokens of each golden continuation."""


@functools.cache
def load(name: str) -> language_model.LanguageModel:
    """Loads a random checkpoint; it has no tokenizer."""
    return jdecode.load(GOLDEN / "tiny" / name, dtype="float32")


@functools.cache
def load_text() -> language_model.LanguageModel:
    """Loads a random model with a tokenizer: 256 bytes and 29 pieces, V=288, end token 2."""
    return jdecode.load(GOLDEN / "gguf" / "llama_gqa.f32.gguf", dtype="float32")


@functools.cache
def golden(name: str) -> dict[str, np.ndarray]:
    """Reads prompts (``input_ids_j``), logits and greedy tokens of an independent implementation, j = 0, 1, 2."""
    return dict(np.load(GOLDEN / "tiny" / name / "golden.npz"))


def prompts(name: str) -> list[list[int]]:
    """Returns the three golden prompts."""
    return [golden(name)[f"input_ids_{idx}"].tolist() for idx in range(3)]


def greedy(name: str) -> list[list[int]]:
    """Returns the greedy continuations of the three prompts; end tokens may stand inside."""
    return [golden(name)[f"greedy_ids_{idx}"].tolist() for idx in range(3)]


def make(seed: int = 3, dtype: str = "float32", **shapes: Any) -> language_model.LanguageModel:
    """Makes a model of random weights without a tokenizer."""
    model_config = config.ModelConfig(**shapes)
    model = transformer.Transformer(model_config, dtype=dtype)
    params = jax.jit(model.init)(jax.random.key(seed), jnp.zeros((1, 2), jnp.int32))
    params = jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    return language_model.LanguageModel(config=model_config, model=model, params=params, tokenizer=None)


def with_nan(
    lm: language_model.LanguageModel, path: tuple[str, str], row: int | None = None
) -> language_model.LanguageModel:
    """Returns the model with a matrix, or one row of it, of NaN."""
    module, name = path
    matrix = lm.params["params"][module][name]
    matrix = matrix.rows() if isinstance(matrix, panels.Panels) else matrix
    broken = matrix.at[slice(None) if row is None else row].set(np.nan)
    changed = {**lm.params["params"], module: {name: broken}}
    return dataclasses.replace(lm, params={"params": changed})


def rows(result: generation.GenerateResult) -> list[list[int]]:
    """Returns the new tokens of each row."""
    return [tokens[:length].tolist() for tokens, length in zip(result.tokens, result.lengths, strict=True)]


def least_gap(result: generation.GenerateResult) -> float:
    """Returns how far apart (nats) the two most likely tokens are where they are nearest; needs ``logprobs=2``."""
    assert result.top_logprobs is not None
    return min(best - second for row in result.top_logprobs for (_, best), (_, second) in row)


@dataclasses.dataclass(frozen=True)
class RepeatPrompt:
    """Makes each row write its own prompt again, whatever the model says; after that the model goes on alone.

    So a test says in the prompt what comes out, and no script is compiled into a program.
    """

    def init(self, params: sampling.SamplingParams, batch: int, vocab: int) -> dict[str, jax.Array]:
        del vocab
        num_B = jnp.zeros(batch, jnp.int32)
        return {"ids_BT": params.prompt_ids_BT, "len_B": params.prompt_len_B, "num_B": num_B}

    def apply(self, logits_BV: jax.Array, state: dict[str, jax.Array]) -> jax.Array:
        place_B = jnp.minimum(state["num_B"], state["ids_BT"].shape[1] - 1)
        forced_B1 = jnp.take_along_axis(state["ids_BT"], place_B[:, None], axis=1)
        is_other_BV = jnp.arange(logits_BV.shape[1])[None, :] != forced_B1
        is_forced_B1 = (state["num_B"] < state["len_B"])[:, None]
        return jnp.where(is_forced_B1 & is_other_BV, -jnp.inf, logits_BV)

    def accept(self, state: dict[str, jax.Array], token_B: jax.Array, live_B: jax.Array) -> dict[str, jax.Array]:
        del token_B
        return {**state, "num_B": state["num_B"] + live_B}
