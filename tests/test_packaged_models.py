"""The models of the package: they are there, they are what their cards say, and what they write is Python."""

import dataclasses
import functools
import json
import pathlib
import shutil
from typing import Any

import jax
import numpy as np
import pytest

import jdecode
from jdecode import config_file
from jdecode.training import corpus, held_out, train_config
from jdecode.training import task as task_lib
from jdecode.weights import packaged

ROOT = pathlib.Path(__file__).parent.parent
NAMES = ("gqa_draft", "gqa_small")
PROMPTS = ("def read_file(path):", "class Stack:", "import os\n\ndef main(")
NUM_TOKENS = 100


@functools.cache
def load(name: str) -> jdecode.LanguageModel:
    return jdecode.load(name)


def folder(name: str) -> pathlib.Path:
    found = packaged.find(name)
    assert found is not None
    return found


def test_names():
    assert packaged.names() == list(NAMES)
    assert packaged.find("./gqa_small") is None
    assert packaged.find("gqa") is None


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_those_of_the_config(name: str):
    run = config_file.load(name)
    lm = jdecode.load(name, dtype="float32", weight_layout="rows")
    assert run.weights == name and run.architecture == lm.config
    in_panels = jdecode.load(name)  # on a CPU float32, unless asked
    assert {leaf.dtype for leaf in jax.tree.leaves(in_panels.params)} == {np.dtype("float32")}
    assert in_panels.weight_bytes == lm.weight_bytes
    half = jdecode.load(name, dtype="bfloat16")
    for stored, loaded in zip(jax.tree.leaves(half.params), jax.tree.leaves(lm.params), strict=True):
        np.testing.assert_array_equal(np.asarray(stored, np.float32), loaded)  # bfloat16 is what is stored


def test_all_of_it_is_under_14_megabytes():
    sizes = [path.stat().st_size for name in NAMES for path in folder(name).rglob("*") if path.is_file()]
    assert 12e6 < sum(sizes) < 14e6


def test_draft_shares_the_tokens_and_has_a_ninth_of_the_parameters():
    draft, small = load("gqa_draft"), load("gqa_small")
    assert draft.tokenizer is not None and small.tokenizer is not None
    assert draft.tokenizer.first_difference(small.tokenizer) is None
    assert 8 < small.weight_bytes / draft.weight_bytes < 10


def assert_holds(described: Any, recorded: Any) -> None:
    """Checks that a config holds what was recorded; options that came later are in the config alone."""
    if isinstance(recorded, dict):
        assert set(recorded) <= set(described)
        for name, value in recorded.items():
            assert_holds(described[name], value)
    elif isinstance(recorded, list):
        assert len(described) == len(recorded)
        for one, other in zip(described, recorded, strict=True):
            assert_holds(one, other)
    else:
        assert described == recorded


@pytest.mark.parametrize("name", NAMES)
def test_card_and_record_agree_with_the_training_config(name: str):
    record = json.loads((folder(name) / "training.json").read_text())
    card = (folder(name) / "README.md").read_text()
    described = config_file.load(name, train_config.TrainConfig, "training")
    assert_holds(task_lib.jsonable(dataclasses.asdict(described)), record["config"])
    assert record["history"][-1]["step"] == described.num_steps
    assert f"**{record['final']['bits_per_byte']:.3f} bits a byte**" in card
    for words in (record["command"], record["corpus"]["sha256"], f"seed {described.seed}", "## Limits"):
        assert words in card
    assert ("teacher" in record) == (name == "gqa_draft")


def test_held_out_bits_a_byte():
    bits = {name: json.loads((folder(name) / "training.json").read_text())["final"]["bits_per_byte"] for name in NAMES}
    assert bits["gqa_small"] < 1.45 < bits["gqa_draft"] < 2.1  # xz of the same files needs 1.86


def test_a_name_is_the_package_s_whatever_the_working_folder_holds(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(ROOT / "tests/golden/tiny/llama_gqa", tmp_path / "gqa_small")
    monkeypatch.chdir(tmp_path)
    assert jdecode.load("gqa_small").config.vocab_size == 4096
    assert jdecode.load("./gqa_small").config.vocab_size != 4096


def test_greedy_text_is_python():
    """The function's body is indented, and the lines up to some statement of it are a program."""
    result = load("gqa_small").generate([PROMPTS[0]], max_new_tokens=NUM_TOKENS)
    lines = (PROMPTS[0] + result.texts[0]).splitlines()
    assert lines[1].startswith("    ") and lines[1].strip()
    assert longest_program(lines) >= 3


def longest_program(lines: list[str]) -> int:
    """Returns how many of the first lines are a Python program."""
    for count in range(len(lines), 0, -1):
        try:
            compile("\n".join(lines[:count]) + "\n", "text", "exec")
        except SyntaxError:
            continue
        return count
    return 0


def repeats(ids: list[int]) -> int:
    """Returns the most tokens that one phrase takes which stands at least three times in a row."""
    most = 0
    for period in range(1, len(ids) // 3 + 1):
        run = 0
        for before, after in zip(ids, ids[period:], strict=False):
            run = run + 1 if before == after else 0
            if run >= 2 * period:
                most = max(most, run + period)
    return most


def test_repeats_by_hand():
    assert repeats([1, 2, 3, 4, 5, 6]) == 0
    assert repeats([9, 1, 2, 1, 2, 8]) == 0  # twice
    assert repeats([9, 1, 2, 1, 2, 1, 2, 8]) == 6
    assert repeats([7, 7, 7, 7, 5]) == 4


@pytest.mark.parametrize("prompt", PROMPTS)
def test_default_sampling_does_not_loop(prompt: str):
    sampling = config_file.load("gqa_small").sampling
    seeds = [dataclasses.replace(sampling, seed=seed) for seed in range(1, 6)]
    result = load("gqa_small").generate([prompt] * 5, max_new_tokens=NUM_TOKENS, sampling=seeds)
    rows = [row[:length].tolist() for row, length in zip(result.tokens, result.lengths, strict=True)]
    assert len({tuple(row) for row in rows}) == 5
    # Twelve tokens: code repeats short things (`]]]`, a row of dashes) for good reasons.
    assert max(map(repeats, rows)) < 12


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_library_s_own_evaluation_gives_the_training_s_loss(name: str):
    record = json.loads((folder(name) / "training.json").read_text())
    files = corpus.read(train_config.CorpusConfig())
    if files.digest != record["corpus"]["sha256"]:
        pytest.skip(f"the model was trained on {record['corpus']['description']}, this is {files.description}")
    lm = load(name)
    assert lm.tokenizer is not None
    end = lm.end_token_ids[0]
    pieces = held_out.pieces(task_lib.encode(lm.tokenizer, files.held_out, end), record["config"]["sequence_len"], end)
    token_num_bytes = np.asarray([len(lm.tokenizer.token_bytes(idx)) for idx in range(lm.config.vocab_size)])
    loss = held_out.evaluate_by(lm.score, pieces, token_num_bytes)
    final = record["final"]
    assert (loss.num_tokens, loss.num_bytes) == (final["num_tokens"], final["num_bytes"])
    # Sums of 94,000 float32 losses, each good to some 1e-5 relative, by two ways of computing them.
    assert loss.perplexity == pytest.approx(final["perplexity"], rel=1e-4)
