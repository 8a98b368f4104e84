"""Greedy text of the real models and of ``gqa_small`` with every kind of draft: the same as without, on rings too."""

import dataclasses
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jdecode
from jdecode import config, language_model
from jdecode.cache import layout_ring
from jdecode.decode import prefill
from tests import tiny_model
from tests.real import golden_case
from tests.speculative import drafts_under_test

NUM_NEW = 40
GQA_SMALL = "gqa_small"
SMOLLM2, GEMMA3 = (pytest.param(name, marks=pytest.mark.real_model) for name in ("smollm2", "gemma3"))
GEMMA3_IN_SWEEPS = pytest.param("gemma3", marks=(pytest.mark.real_model, pytest.mark.exhaustive))  # a minute a test
WINDOWS = {"gqa_small": 64, "gemma3": 512}
NOISE = {"smollm2": 0.05, "gemma3": 0.01}  # of a draft that agrees often, not always: Gemma bears less of it

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True, kw_only=True)
class Subject:
    """A model, four ragged prompts for it, and what is computed once for all of its tests.

    Attributes:
      window: of its local layers, in tokens; ``None`` where it has none. The first row, prompt and output, is over
        three of them.
      draft: the model that proposes where the kind of draft is ``"model"``.
      plain: greedy tokens without a draft, by number of rows and layout.
      read: see ``read_once``.
    """

    lm: language_model.LanguageModel
    draft: language_model.LanguageModel
    prompts: list[list[int]]
    window: int | None
    plain: dict[tuple[int, str], list[list[int]]] = dataclasses.field(default_factory=dict)
    read: dict[Any, Any] = dataclasses.field(default_factory=dict)


def gqa_prompts(lm: language_model.LanguageModel) -> list[list[int]]:
    """Returns pieces of a source file."""
    source = pathlib.Path(jdecode.__file__).with_name("generation.py").read_text(encoding="utf-8")
    ids = lm.encode(source)
    return [ids[:180], ids[300:305], ids[400:470], ids[:1]]


def real_prompts(name: str) -> list[list[int]]:
    """Returns golden prompts. Those of SmolLM2, which has no windows, are short."""
    ids = {case: own["input_ids"] for case, own in golden_case.cases(name).items()}
    if name == "smollm2":
        return [ids["long_600"][:240], ids["code_python"], [1, 2], [5]]
    return [ids["long_1500"], ids["code_python"], ids["long_513"], [2, 5]]


@pytest.fixture(scope="module")
def subject(request) -> Subject:
    """The model that a test names, in float32."""
    name = request.param
    if name == GQA_SMALL:
        lm, draft = (jdecode.load(own, dtype="float32") for own in (name, "gqa_draft"))
        prompts = gqa_prompts(lm)
    else:
        lm = jdecode.load(request.getfixturevalue(f"{name}_gguf"), dtype="float32")
        draft, prompts = drafts_under_test.noisy(lm, NOISE[name]), real_prompts(name)
    return Subject(lm=lm, draft=draft, prompts=prompts, window=WINDOWS.get(name))


@pytest.fixture(autouse=True)
def forget_each_program():
    """Drops the programs of each test: all of this module's together would take more memory maps than a process has."""
    yield
    jax.clear_caches()


@pytest.fixture(autouse=True)
def read_once(monkeypatch, subject):
    """Lets a model read its prompts once for each cache, not once for each kind of draft: it takes longest of all."""
    read, whole = subject.read, prefill.prefill

    def copied(model, params, prompts, cache):
        # Layouts, codec and shapes: two caches of one layout may differ in dtype or capacity.
        kind = jax.tree.structure(cache), tuple((leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(cache))
        key = (id(params), cache.layouts, kind, str(prompts))
        if any(cache.layouts != layouts for _, layouts, *_ in read):
            read.clear()  # the tests of one cache stand together: the others are not needed again
        if key not in read:
            read[key] = params, whole(model, params, prompts, cache)  # with the parameters, an id stands for one object
        return jax.tree.map(jnp.copy, read[key][1])

    monkeypatch.setattr(prefill, "prefill", copied)


def plain_rows(subject: Subject, num_rows: int, layout: str) -> list[list[int]]:
    """Returns what the model writes without a draft."""
    key = (num_rows, layout)
    if key not in subject.plain:
        cache = config.CacheConfig(layout=layout)
        prompts = subject.prompts[:num_rows]
        result = subject.lm.generate(prompts, max_new_tokens=NUM_NEW, ignore_eos=True, logprobs=2, cache=cache)
        # Blocks of other widths sum in another order: the texts can be compared where no token is a near tie.
        assert tiny_model.least_gap(result) > golden_case.LEAST_GAP
        subject.plain[key] = tiny_model.rows(result)
    return subject.plain[key]


def check(subject: Subject, num_rows: int, kind: str, num_draft_tokens: int, layout: str = "auto") -> None:
    """Compares the text with a draft with that without; some proposals must be accepted, and some refused."""
    plain = plain_rows(subject, num_rows, layout)
    stream = subject.lm.stream(
        subject.prompts[:num_rows],
        max_new_tokens=NUM_NEW,
        ignore_eos=True,
        cache=config.CacheConfig(layout=layout),
        draft=subject.draft if kind == "model" else kind,
        num_draft_tokens=num_draft_tokens,
        adaptive_draft=False,
    )
    for _ in stream:
        pass
    assert stream.result is not None
    assert tiny_model.rows(stream.result) == plain
    stats = stream.result.stats
    assert stats["drafted"] >= stats["tested"] > stats["accepted"] > 0
    rings = [own for own in stream.cache.layouts if isinstance(own, layout_ring.RingLayout)]
    assert [(own.window, own.slack) for own in rings] == (
        [(subject.window, num_draft_tokens)] if subject.window and layout == "auto" else []
    )
    if subject.window:
        assert len(subject.prompts[0]) + NUM_NEW > 3 * subject.window


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", drafts_under_test.blocks(1, 8))
@pytest.mark.parametrize("subject", [GQA_SMALL, SMOLLM2], indirect=True, scope="module")
def test_ragged_rows(subject, num_draft_tokens, kind):
    check(subject, 4, kind, num_draft_tokens)


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", drafts_under_test.blocks(4))
@pytest.mark.parametrize("subject", [GEMMA3], indirect=True, scope="module")
def test_ragged_rows_of_gemma(subject, num_draft_tokens, kind):
    check(subject, 4, kind, num_draft_tokens)


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", drafts_under_test.blocks(4))
@pytest.mark.parametrize("subject", [GQA_SMALL, GEMMA3_IN_SWEEPS], indirect=True, scope="module")
def test_ragged_rows_without_rings(subject, num_draft_tokens, kind):
    check(subject, 4, kind, num_draft_tokens, layout="full")


@pytest.mark.parametrize("kind", drafts_under_test.KINDS)
@pytest.mark.parametrize("num_draft_tokens", drafts_under_test.blocks(4))
@pytest.mark.parametrize("subject", [GQA_SMALL, SMOLLM2, GEMMA3_IN_SWEEPS], indirect=True, scope="module")
def test_one_row(subject, num_draft_tokens, kind):
    check(subject, 1, kind, num_draft_tokens)
