"""``--prompt-budget`` and what goes with it: the model reads the shorter prompt, and the run says so."""

import dataclasses
import json
import re
from typing import Any

import pytest

import jdecode
from jdecode import generate, prompt_arguments
from jdecode.prompt_compression import units
from tests import tiny_model
from tests.prompt_compression import small_prompts

WEIGHTS = str(tiny_model.GOLDEN / "gguf" / "llama_gqa.f32.gguf")
PROMPT = "the cat sat on the mat and the dog did not like it. why?"


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    assert generate.main(["--weights", WEIGHTS, "--max-new-tokens", "2", "--temperature", "0", *arguments]) == 0
    out, err = capsys.readouterr()
    return out, err


def small_model(seed: int, *, vocab_size: int, tokenizer: Any) -> jdecode.LanguageModel:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
    lm = tiny_model.make(seed, vocab_size=vocab_size, layers=(jdecode.LayerConfig(),), norm_eps=1e-5, **sizes)
    return dataclasses.replace(lm, tokenizer=tokenizer)


def test_json_gives_the_numbers_and_the_ids_that_were_read(capsys: pytest.CaptureFixture[str]):
    flags = ["--prompt", PROMPT, "--json", "--prompt-budget", "30", "--prompt-keep", "why?", "--prompt-unit", "word"]
    got = json.loads(run(capsys, *flags)[0])
    lm = jdecode.load(WEIGHTS)
    ids = lm.encode(PROMPT)
    stats = got["prompt_compression"]
    kept = got["prompt_token_ids"]
    assert stats["prompt_tokens"] == len(ids) and stats["budget_tokens"] == 30
    assert stats["kept_tokens"] == len(kept) <= 30 and stats["dropped_tokens"] == len(ids) - len(kept)
    assert kept == list(jdecode.compress_prompt(lm, ids, budget=30, protected="why?", unit="word").ids)
    assert got["token_ids"] == lm.generate([kept], max_new_tokens=2).tokens[0].tolist()
    # a budget that is large enough changes nothing but that it is said
    whole = json.loads(run(capsys, *flags[:3], "--prompt-budget", "1.0")[0])
    plain = json.loads(run(capsys, *flags[:3])[0])
    assert whole.pop("prompt_compression")["dropped_tokens"] == 0
    assert (whole["prompt_token_ids"], whole["text"]) == (plain["prompt_token_ids"], plain["text"])
    assert "prompt_compression" not in plain


def test_text_is_echoed_as_it_was_read_and_stderr_says_what_went(capsys: pytest.CaptureFixture[str]):
    out, err = run(capsys, "--prompt", PROMPT, "--prompt-budget", "0.9", "--prompt-question", "why?")
    lm = jdecode.load(WEIGHTS)
    short = jdecode.compress_prompt(lm, PROMPT, budget=0.9, protected="why?", question="why?")
    assert short.text is not None and out.startswith(short.text) and short.text.endswith("why?")
    num_tokens, num_left = len(short.prompt_ids), len(short.ids)
    line = rf"prompt {num_tokens} tokens, {num_tokens - num_left} left out, {num_left} kept, in \d+\.\d{{3}} s"
    assert re.fullmatch(line, err.splitlines()[0])
    assert f"prefill {num_left} tokens" in err


def test_of_a_chat_only_the_message_loses_tokens():
    tokenizer = small_prompts.byte_tokenizer(adds_start=True)
    lm = small_model(3, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    before, after = "<|turn|>system\nBe brief about words.<|stop|>\n<|turn|>user\n", "<|stop|>\n<|turn|>assistant\n"
    ids = lm.encode(before + "tell me about words" + after)
    asked = prompt_arguments.Shortening(budget=len(ids) - 8, keep=("tell",), unit="word")
    short = prompt_arguments.shorten(lm, ids, asked, message=" tell me about words\n", draft=None)
    assert short.text is not None
    assert short.text.startswith(before + "tell") and short.text.endswith(after)
    assert 8 <= short.stats["dropped_tokens"] <= 13
    with pytest.raises(ValueError, match="--prompt-budget: expected at least"):
        prompt_arguments.shorten(lm, ids, prompt_arguments.Shortening(budget=9), message="tell")
    with pytest.raises(ValueError, match="--prompt-budget: expected a chat template that writes the message as it is"):
        prompt_arguments.shorten(lm, ids, asked, message="other")


def test_the_draft_scores_where_it_is_a_model():
    lm, draft = (small_model(seed, vocab_size=29, tokenizer=None) for seed in (3, 4))
    ids = [(7 * n * n + 3) % 29 for n in range(24)]
    asked = prompt_arguments.Shortening(budget=0.5)
    by_draft = prompt_arguments.shorten(lm, ids, asked, draft=draft)
    assert by_draft.kept == jdecode.compress_prompt(draft, ids, budget=0.5).kept
    by_itself = prompt_arguments.shorten(lm, ids, asked, draft="ngram")
    assert by_itself.kept == jdecode.compress_prompt(lm, ids, budget=0.5).kept != by_draft.kept


def test_units_are_those_of_the_function():
    assert prompt_arguments.UNITS == units.UNITS


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompt-budget", "0"], "argument --prompt-budget: expected a number of tokens from 1, or a share"),
        (["--prompt-budget", "1.5"], "argument --prompt-budget: expected"),
        (["--prompt-budget", "nan"], "argument --prompt-budget: expected"),
        (["--prompt-keep", "x"], "--prompt-keep: acts on a budget, and there is none; add --prompt-budget"),
        (["--prompt-question", "x"], "--prompt-question: acts on a budget"),
        (["--prompt-unit", "word"], "--prompt-unit: acts on a budget"),
        (["--prompt-budget", "5", "--prompt-keep", "absent"], "--prompt-keep: expected a string that the prompt holds"),
        (
            ["--prompt-budget", "5", "--prompt-question", "absent"],
            "--prompt-question: expected a part of the prompt, got",
        ),
        (["--prompt-budget", "2", "--prompt-keep", PROMPT], "--prompt-budget: expected at least"),
    ],
)
def test_refused_in_one_line(flags: list[Any], message: str, capsys: pytest.CaptureFixture[str]):
    try:
        status = generate.main(["--weights", WEIGHTS, "--prompt", PROMPT, *flags])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "") and err.count("\n") == 1
    assert err.startswith(f"jdecode.generate: error: {message}")
