"""Tiny checkpoints of several families: logits and greedy tokens that another implementation computed."""

import dataclasses
import functools
import json
import pathlib
from typing import Any

import numpy as np
import pytest

from jdecode.models import transformer
from jdecode.weights import load
from tests import tiny_models

TINY = pathlib.Path(__file__).parents[1] / "golden" / "tiny"
INDEX = json.loads((TINY / "index.json").read_text())["families"]
FAMILIES = sorted(INDEX)
WINDOWED = ["gemma3_scaled", "gemma3_text", "mistral_w16"]
NUM_NEW = 24


@functools.cache
def golden(family: str) -> tuple[transformer.Transformer, Any, dict[str, np.ndarray]]:
    weights = load.load_weights(TINY / family)
    with np.load(TINY / family / "golden.npz") as file:
        return transformer.Transformer(weights.config), weights.params, dict(file)


def _prompts(values: dict[str, np.ndarray]) -> list[list[int]]:
    return [values[f"input_ids_{idx}"].tolist() for idx in range(3)]


def _longest(family: str) -> int:
    return max(INDEX[family]["prompt_lengths"])


def _check(family: str, got: list[np.ndarray]) -> None:
    values = golden(family)[2]
    tiny_models.assert_rows_close(
        got, [values[f"logits_full_{idx}"] for idx in range(3)], INDEX[family]["suggested_atol"]
    )


def test_every_family_is_here():
    assert {path.name for path in TINY.iterdir() if path.is_dir()} == set(FAMILIES)
    lengths = [[len(prompt) for prompt in _prompts(golden(family)[2])] for family in FAMILIES]
    assert lengths == [INDEX[family]["prompt_lengths"] for family in FAMILIES]
    windows = {family: {layer.window for layer in golden(family)[0].config.layers} for family in FAMILIES}
    assert [family for family in FAMILIES if windows[family] != {None}] == WINDOWED
    # The middle prompt and the last are past every window.
    assert all(
        max(window or 0 for window in windows[family]) < lengths[FAMILIES.index(family)][1] for family in WINDOWED
    )


# Two families are enough for the reference: both backends pass one contract suite.
ONE_BLOCK = [(family, "blockwise") for family in FAMILIES]
ONE_BLOCK += [(family, "reference") for family in ("llama3_rope", "gemma3_text")]


@pytest.mark.parametrize(("family", "backend"), ONE_BLOCK)
def test_logits_in_one_block(family, backend):
    model, params, values = golden(family)
    model = dataclasses.replace(model, backend=backend)
    _check(family, tiny_models.whole(model, params, _prompts(values), _longest(family)))


# (chunk length, ring slack): longer than the window of 16, and short enough to be written before it attends.
CASES = [(family, 17, 0) for family in FAMILIES] + [(family, 4, 3) for family in WINDOWED]


@pytest.mark.parametrize(("family", "chunk_len", "slack"), CASES)
def test_logits_and_greedy_tokens_through_cache(family, chunk_len, slack):
    model, params, values = golden(family)
    cache = tiny_models.empty_cache(model.config, 3, slack=slack, capacity=_longest(family) + NUM_NEW)
    logits, cache = tiny_models.feed(model, params, _prompts(values), cache, chunk_len)
    _check(family, logits)
    tokens = [[int(row[-1].argmax())] for row in logits]
    for _ in range(NUM_NEW - 1):
        logits, cache = tiny_models.feed(model, params, [row[-1:] for row in tokens], cache, 1)
        for row, last in zip(tokens, logits, strict=True):
            row.append(int(last[-1].argmax()))
    assert tokens == [values[f"greedy_ids_{idx}"].tolist() for idx in range(3)]
