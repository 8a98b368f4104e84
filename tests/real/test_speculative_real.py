"""Greedy text of SmolLM2 and of ``gqa_small`` with every kind of draft: the same as without, on rings too."""

import pathlib

import jax
import pytest

import jdecode
from jdecode import language_model
from tests import tiny_model
from tests.real import golden_case
from tests.speculative import drafts_under_test

NUM_NEW = 40


@pytest.fixture(autouse=True)
def forget_each_program():
    """Drops the programs of each test: all of this module's together would take more memory maps than a process has."""
    yield
    jax.clear_caches()


def check(lm: language_model.LanguageModel, prompts: list[list[int]], draft, num_draft_tokens: int, **options) -> None:
    """Compares a ragged batch, and its first row alone, with plain decoding."""
    for rows in (prompts, prompts[:1]):
        plain = lm.generate(rows, max_new_tokens=NUM_NEW, ignore_eos=True, **options)
        given = {"draft": draft, "num_draft_tokens": num_draft_tokens, "adaptive_draft": False}
        result = lm.generate(rows, max_new_tokens=NUM_NEW, ignore_eos=True, **given, **options)
        assert tiny_model.rows(result) == tiny_model.rows(plain)
        assert result.stats["drafted"] > 0


def gqa_prompts(lm: language_model.LanguageModel) -> list[list[int]]:
    """Returns four prompts of different lengths; the first with its output is over three windows of 64."""
    source = pathlib.Path(jdecode.__file__).with_name("generation.py").read_text(encoding="utf-8")
    ids = lm.encode(source)
    return [ids[:180], ids[300:305], ids[400:470], ids[:1]]


@pytest.mark.slow
@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", range(1, 9))
def test_gqa_small(kind, num_draft_tokens):
    lm = jdecode.load("gqa_small", dtype="float32")
    draft = jdecode.load("gqa_draft", dtype="float32") if kind == "model" else kind
    check(lm, gqa_prompts(lm), draft, num_draft_tokens)


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("kind", ["ngram"])
def test_smollm2(smollm2_gguf, kind):
    lm = jdecode.load(smollm2_gguf, dtype="float32")
    cases = golden_case.cases("smollm2")
    prompts = [cases[name]["input_ids"] for name in ("long_600", "code_python")] + [[1, 2], [5]]
    check(lm, prompts, kind, 4)
