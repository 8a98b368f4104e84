"""Prefix caches over real models: texts are those of cold runs, and what is shared is computed once."""

import operator
import pathlib

import pytest

import jdecode

pytestmark = [pytest.mark.slow, pytest.mark.real_model]
LICENSE = pathlib.Path(__file__).parents[2] / "LICENSE"
PREFIX_LEN = 600  # more than the window of Gemma's local layers, 512


def common_len(one: list[int], other: list[int]) -> int:
    return [*map(operator.eq, one, other), False].index(False)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_prompts_with_a_shared_prefix(name, request, tmp_path):
    lm = jdecode.load(request.getfixturevalue(f"{name}_gguf"))
    prefix = lm.encode(LICENSE.read_text(encoding="utf-8"))[:PREFIX_LEN]
    assert len(prefix) == PREFIX_LEN
    questions = ["\nIn short:", "\nThe third line says", "\nA contribution is"]
    own = [[token for token in lm.encode(question) if token != prefix[0]] for question in questions]
    prefixes = lm.init_prefix_cache(num_pages=80)
    reused = 0
    for number, ids in enumerate(own):
        cold = lm.generate([prefix + ids], max_new_tokens=12, ignore_eos=True)
        warm = lm.generate([prefix + ids], max_new_tokens=12, ignore_eos=True, prefix_cache=prefixes)
        assert warm.tokens.tolist() == cold.tokens.tolist()
        expected = max((PREFIX_LEN + common_len(ids, other) for other in own[:number]), default=0)
        assert warm.stats["prefix_tokens_reused"] == expected
        reused += expected
    assert prefixes.statistics.tokens_reused == reused
    prefixes.save(tmp_path)
    again = lm.load_prefix_cache(tmp_path)
    warm = lm.generate([prefix + own[-1]], max_new_tokens=12, ignore_eos=True, prefix_cache=again)
    assert warm.tokens.tolist() == cold.tokens.tolist()
    assert warm.stats["prefix_tokens_reused"] == len(prefix) + len(own[-1]) - 1
