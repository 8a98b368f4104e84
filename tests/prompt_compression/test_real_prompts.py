"""With real models: what is dropped is what the model finds likely, and a question finds its fact."""

import pathlib

import numpy as np
import pytest

import jdecode
from benchmarks import compression_quality

CODE = "def read(path, mode):\n\twith open(path, mode) as file:\n\t\treturn file.read()\n"


def test_the_packaged_model_keeps_what_surprises_it():
    lm = jdecode.load("gqa_small")
    assert lm.tokenizer is not None
    ids = lm.encode(CODE)
    short = jdecode.compress_prompt(lm, CODE, budget=0.5, unit="token", keep_structure=False)
    nats = -lm.score([ids])[0].astype(np.float64)  # of tokens 1, 2, ...; token 0 is what starts every text
    assert lm.tokenizer.prefix_ids == (ids[0],)
    order = sorted(range(1, len(ids)), key=lambda idx: (-nats[idx - 1], idx))
    assert list(short.kept) == sorted([0, *order[: len(ids) // 2 - 1]])
    assert short.text == lm.tokenizer.decode(short.ids[1:])


@pytest.mark.slow
@pytest.mark.real_model
def test_a_question_keeps_its_fact_at_half_the_tokens(smollm2_gguf: pathlib.Path):
    """Sentences chosen blindly would keep each of the ten facts with probability 1/2: nine or ten in 1 % of runs."""
    lm = jdecode.load(smollm2_gguf, dtype="float32")
    assert lm.tokenizer is not None
    num_found = 0
    for case in compression_quality.read_cases(lm, 10):
        rest = range(len(case.text_ids), len(case.ids))
        short = jdecode.compress_prompt(lm, case.ids, budget=0.5, protected=rest, question=case.question)
        assert len(short.ids) <= len(case.ids) // 2
        assert list(short.ids[-len(rest) :]) == case.rest_ids
        answer = lm.tokenizer.decode(case.answer_ids)
        assert answer not in lm.tokenizer.decode(case.rest_ids)
        num_found += answer in (short.text or "")
    assert num_found >= 9
