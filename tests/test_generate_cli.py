"""``python -m jdecode.generate``: flags reach the model, output is what the contract says, errors are one line."""

import io
import json
import pathlib
import subprocess
import sys

import pytest

from jdecode import config, generate
from tests import fake_language_model


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> fake_language_model.FakeLanguageModel:
    return fake_language_model.install(monkeypatch)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command in this process; returns its one line on standard error."""
    try:
        status = generate.main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("jdecode.generate: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err.removeprefix("jdecode.generate: error: ").rstrip("\n")


def test_raw_prompt_is_echoed_before_its_continuation(lm, capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--weights", "w", "--prompt", "The capital of France is"]) == 0
    out, err = capsys.readouterr()
    assert out == "The capital of France is Paris.\n"
    # 24 prompt tokens in half a second, then seven tokens: see the fake's statistics
    assert err == (
        "prefill 24 tokens in 0.500 s (48.0 tokens/s), first token after 0.500 s\n"
        "decode 7 tokens in 2.000 s (3.5 tokens/s), ended by stop, seed 7\n"
        "cache 3.0 MiB, weights 5.0 MiB, compile 1.25 s\n"
    )


def test_chat_prints_the_reply_only(lm, capsys: pytest.CaptureFixture[str]):
    lm.reply = "Blue.\n"
    assert generate.main(["--weights", "w", "--chat", "Which colour?"]) == 0
    assert capsys.readouterr().out == "Blue.\n"  # no second line end
    assert lm.asked("encode_chat") == {"messages": [{"role": "user", "content": "Which colour?"}]}
    assert lm.asked("generate")["prompts"] == [[1, 2, 3]]


def test_prompt_ids_are_echoed_as_text(lm, capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--weights", "w", "--prompt-ids", "72, 105"]) == 0
    assert capsys.readouterr().out == "Hi Paris.\n"
    assert lm.asked("generate")["prompts"] == [[72, 105]]


def test_prompt_file_is_taken_to_the_last_byte(lm, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "p.txt").write_bytes("né\n".encode())
    assert generate.main(["--weights", "w", "--prompt-file", str(tmp_path / "p.txt")]) == 0
    assert lm.asked("generate")["prompts"] == [[ord("n"), 0xE9, ord("\n")]]
    assert capsys.readouterr().out == "né\n Paris.\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"ab")))
    lm.calls.clear()
    assert generate.main(["--weights", "w", "--prompt-file", "-"]) == 0
    assert lm.asked("generate")["prompts"] == [[97, 98]]


def test_every_flag_reaches_the_model(lm):
    flags = (
        "--weights w --prompt a --max-new-tokens 9 --temperature 0.5 --top-k 3 --top-p 0.75 --min-p 0.125 "
        "--typical-p 0.875 --repetition-penalty 1.5 --presence-penalty -0.25 --frequency-penalty 0.25 "
        "--no-repeat-ngram-size 4 --min-new-tokens 2 --seed 0 --stop x --stop yz --stop-token-id 6 --stop-token-id 8 "
        "--num-samples 2 --logprobs 5 --json --ignore-eos --kv-dtype bfloat16 --weight-dtype float32 --capacity 99 "
        "--mesh data=2,model=4 --draft d --num-draft-tokens 7 --verify coupled --no-adaptive-draft --no-stream"
    )
    assert generate.main(flags.split()) == 0
    mesh = config.MeshConfig(data=2, model=4)
    loads = [arguments for name, arguments in lm.calls if name == "load"]
    assert loads == [{"source": source, "dtype": "float32", "mesh": mesh} for source in ("d", "w")]
    assert lm.asked("generate") == {
        "prompts": [[97]],
        "max_new_tokens": 9,
        "sampling": config.SamplingConfig(
            temperature=0.5,
            top_k=3,
            top_p=0.75,
            min_p=0.125,
            typical_p=0.875,
            repetition_penalty=1.5,
            presence_penalty=-0.25,
            frequency_penalty=0.25,
            no_repeat_ngram_size=4,
            min_new_tokens=2,
            seed=0,
        ),
        "num_samples": 2,
        "stop": ("x", "yz"),
        "stop_token_ids": (6, 8),
        "ignore_eos": True,
        "logprobs": 5,
        "cache": config.CacheConfig(dtype="bfloat16"),
        "capacity": 99,
        "draft": lm,
        "num_draft_tokens": 7,
        "verify": "coupled",
        "adaptive_draft": False,
    }


def test_what_the_cache_keeps(lm, tmp_path: pathlib.Path, capsys):
    flags = ["--weights", "w", "--prompt", "a"]
    assert generate.main([*flags, "--cache-budget", "64", "--eviction", "h2o"]) == 0
    assert lm.asked("generate")["cache"] == config.CacheConfig(budget=64, eviction="h2o")
    lm.calls.clear()
    (tmp_path / "c.yaml").write_text("weights: w\ncache: {budget: 9, eviction: snapkv, num_recent: 2}\n")
    assert generate.main(["--config", str(tmp_path / "c.yaml"), "--prompt", "a", "--cache-budget", "64"]) == 0
    expected = config.CacheConfig(budget=64, eviction="snapkv", num_recent=2)
    assert lm.asked("generate")["cache"] == expected
    capsys.readouterr()
    assert refused(capsys, *flags, "--eviction", "h2o") == (
        "--eviction: expected --cache-budget beside it, got none; add it, or leave both out"
    )
    assert refused(capsys, *flags, "--cache-budget", "9").startswith("--cache-budget: expected --eviction beside it")
    assert "expected a whole number from 2" in refused(capsys, *flags, "--eviction", "h2o", "--cache-budget", "1")


def test_flag_wins_over_config_and_config_over_default(lm, tmp_path: pathlib.Path):
    (tmp_path / "c.yaml").write_text(
        "weights: from_config\nprompt: q\nmax_new_tokens: 5\nsampling: {temperature: 0.5, top_k: 3}\n"
        "cache: {layout: full, dtype: float16}\nmesh: {data: 2}\nspeculative: {draft: ngram, num_draft_tokens: 6}"
    )
    assert generate.main(["--config", str(tmp_path / "c.yaml"), "--temperature", "0"]) == 0
    assert lm.asked("load") == {"source": "from_config", "dtype": "auto", "mesh": config.MeshConfig(data=2)}
    asked = lm.asked("generate")
    assert asked["sampling"] == config.SamplingConfig(temperature=0.0, top_k=3)  # 0 is a value, not "not given"
    assert (asked["prompts"], asked["max_new_tokens"]) == ([[ord("q")]], 5)
    assert asked["cache"] == config.CacheConfig(layout="full", dtype="float16")
    drafting = ("draft", "num_draft_tokens", "verify", "adaptive_draft")
    assert [asked[name] for name in drafting] == ["ngram", 6, "rejection", True]
    lm.calls.clear()
    flags = ["--weights", "w", "--max-new-tokens", "6", "--draft", "none"]
    assert generate.main(["--config", str(tmp_path / "c.yaml"), *flags]) == 0
    assert "draft" not in lm.asked("generate")
    assert lm.asked("load")["source"] == "w"
    assert lm.asked("generate")["max_new_tokens"] == 6


def test_json_is_one_object_and_nothing_else(lm, capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--weights", "w", "--prompt", "ab", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert json.loads(out) == {
        "text": " Paris.",
        "token_ids": [32, 80, 97, 114, 105, 115, 46],  # the code points of the text, without padding
        "prompt_token_ids": [97, 98],
        "finish_reason": "stop",
        "seed": 7,
        "stats": fake_language_model.STATS,
    }


def test_json_of_several_samples_is_a_list_with_logprobs(lm, capsys: pytest.CaptureFixture[str]):
    lm.reply = "A"
    assert generate.main(["--weights", "w", "--prompt", "ab", "--json", "--num-samples", "3", "--logprobs", "2"]) == 0
    rows = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))
    assert [row["text"] for row in rows] == ["A", "A1", "A2"]
    assert [row["seed"] for row in rows] == [7, 8, 9]
    assert rows[1]["logprobs"] == [-0.5, -0.5]
    assert rows[1]["top_logprobs"] == [[[65, -0.25], [66, None]]] * 2  # JSON has no minus infinity


def test_several_samples_as_text(lm, capsys: pytest.CaptureFixture[str]):
    assert generate.main(["--weights", "w", "--prompt", "In", "--num-samples", "2"]) == 0
    out = capsys.readouterr().out
    assert out == "--- sample 1 of 2 ---\nIn Paris.\n--- sample 2 of 2 ---\nIn Paris.1\n"


@pytest.mark.parametrize("reply", [" Paris.", " Paris.\n", ""])
def test_terminal_streams_the_same_text(lm, reply: str, capsys, monkeypatch: pytest.MonkeyPatch):
    lm.reply = reply
    assert generate.main(["--weights", "w", "--prompt", "In"]) == 0
    whole, _ = capsys.readouterr()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    lm.calls.clear()
    assert generate.main(["--weights", "w", "--prompt", "In"]) == 0
    out, err = capsys.readouterr()
    assert out == whole
    assert "ended by stop" in err
    assert lm.asked("stream")["prompt"] == [73, 110]
    lm.calls.clear()
    assert generate.main(["--weights", "w", "--prompt", "In", "--no-stream"]) == 0
    assert [name for name, _ in lm.calls] == ["load", "generate"]


BAD_FLAGS = [
    ("--temperature nan", "--temperature: expected a finite number of at least 0, got nan"),
    ("--temperature -1", "--temperature: expected a finite number of at least 0, got -1.0"),
    ("--temperature warm", "argument --temperature: expected a number, got 'warm'"),
    ("--top-p 1.5", "--top-p: expected a number from 0 to 1, got 1.5"),
    ("--min-p -0.5", "--min-p: expected a number from 0 to 1, got -0.5"),
    ("--typical-p nan", "--typical-p: expected a number from 0 to 1, got nan"),
    ("--repetition-penalty 0", "--repetition-penalty: expected a finite number over 0, got 0.0"),
    ("--frequency-penalty inf", "--frequency-penalty: expected a finite number, got inf"),
    ("--max-new-tokens -3", "argument --max-new-tokens: expected a whole number from 1 to 16777216, got '-3'"),
    ("--max-new-tokens 0", "argument --max-new-tokens: expected a whole number from 1 to 16777216, got '0'"),
    ("--max-new-tokens 16777217", "argument --max-new-tokens: expected a whole number from 1 to 16777216"),
    ("--top-k 1.5", "argument --top-k: expected a whole number from 0 to 2147483647, got '1.5'"),
    ("--seed -1", "argument --seed: expected a whole number from 0 to 9223372036854775807, got '-1'"),
    ("--num-samples 0", "argument --num-samples: expected a whole number from 1"),
    ("--capacity 0", "argument --capacity: expected a whole number from 1"),
    ("--stop-token-id -1", "argument --stop-token-id: expected a whole number from 0"),
    ("--stop=", "argument --stop: expected some text, got none"),
    ("--mesh data=0", "argument --mesh: expected axes such as data=1,model=8, each once, got 'data=0'"),
    ("--mesh data=2,data=2", "argument --mesh: expected axes"),
    ("--mesh expert=2", "argument --mesh: expected axes"),
    (
        "--weight-dtype int8",
        "argument --weight-dtype: expected one of auto, float32, bfloat16, float16, got 'int8' (not in this version)",
    ),
    (
        "--kv-dtype float99",
        "argument --kv-dtype: expected one of auto, float32, bfloat16, float16, int8, fp8, int8_channel, int4, got",
    ),
    ("--verify coupled", "--verify: acts on a draft, and there is none; add --draft, or leave it out"),
    ("--num-draft-tokens 4", "--num-draft-tokens: acts on a draft, and there is none; add --draft, or leave it out"),
    ("--adaptive-draft", "--adaptive-draft: acts on a draft, and there is none; add --draft, or leave it out"),
    ("--no-adaptive-draft --draft none", "--no-adaptive-draft: acts on a draft, and there is none; add --draft, or"),
    (
        "--draft ngram --num-draft-tokens 0",
        "argument --num-draft-tokens: expected a whole number from 1 to 64, got '0'",
    ),
    ("--draft ngram --verify best", "argument --verify: invalid choice: 'best' (choose from"),
    ("--draft=", "argument --draft: expected some text, got none"),
    ("--logprobs 3", "--logprobs: printed with --json only; add --json, or leave it out"),
    ("--temp 1", "unrecognized arguments: --temp 1"),  # abbreviations would make each new flag a break
    ("--chat b", "argument --chat: not allowed with argument --prompt"),
]


@pytest.mark.parametrize(("flags", "message"), BAD_FLAGS, ids=[flags for flags, _ in BAD_FLAGS])
def test_bad_flag_is_one_line_before_the_weights_are_read(lm, capsys, flags: str, message: str):
    line = refused(capsys, "--weights", "w", "--prompt", "a", *flags.split())
    assert line.startswith(message)
    assert lm.calls == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("", "no model: expected --config or --weights, got neither; run the packaged model with"),
        ("--weights w", "no prompt: give --prompt, --prompt-file, --prompt-ids or --chat"),
        ("--weights w --prompt-file no/such/file", "no/such/file: No such file or directory"),
        ("--weights w --prompt-file /", "/: Is a directory"),
        ("--weights w --prompt-ids 1,,2", "argument --prompt-ids: expected token ids such as 1,2,3, got '1,,2'"),
        ("--weights w --prompt-ids=-1", "argument --prompt-ids: expected token ids such as 1,2,3, got '-1'"),
        ("--weights= --prompt a", "--weights: expected a folder, a .gguf file or a hub id, got an empty text"),
        ("--config smolm2_135m.yaml", "config 'smolm2_135m.yaml': no such file, here, in ./configs or in the package"),
    ],
)
def test_missing_input_is_one_line(lm, capsys, arguments: str, message: str):
    assert refused(capsys, *arguments.split()).startswith(message)
    assert lm.calls == []


def test_bytes_that_are_no_text_are_refused(lm, tmp_path: pathlib.Path, capsys):
    # what the shell gave as the byte 0xff reaches Python as a lone surrogate
    assert refused(capsys, "--weights", "w", "--prompt", "a\udcff").startswith(
        "argument --prompt: expected text in UTF-8"
    )
    (tmp_path / "bad").write_bytes(b"ab\xff")
    assert "expected text in UTF-8, got other bytes from byte 2" in refused(
        capsys, "--weights", "w", "--prompt-file", str(tmp_path / "bad")
    )


def test_unknown_config_key_names_the_nearest(lm, tmp_path: pathlib.Path, capsys):
    (tmp_path / "c.yaml").write_text("weights: w\nsampling: {temprature: 1}")
    line = refused(capsys, "--config", str(tmp_path / "c.yaml"))
    assert line.endswith("c.yaml: sampling.temprature: unknown key; did you mean temperature?")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("llama3_8b.yaml", "it holds shapes for planning"),
        ("llama3_70b.yaml", "it holds shapes for planning"),
    ],
)
def test_config_without_weights_is_refused_and_names_a_real_model(lm, capsys, name: str, reason: str):
    line = refused(capsys, "--config", name, "--prompt", "def f(n):")
    stem = name.removesuffix(".yaml")
    assert line == (
        f"config {stem}: {reason}, so there is nothing to run; "
        "run the packaged model with --config gqa_small.yaml, or another with --weights FILE.gguf"
    )
    assert lm.calls == []


ARCHITECTURE = """
prompt: a
architecture: {{vocab_size: {vocab}, hidden_size: 6, intermediate_size: 10, num_heads: 2, num_kv_heads: 1, head_dim: 4,
               norm_eps: {eps}, max_positions: 77, layers: [{{window: {window}}}, {{}}]}}
"""


def test_weights_of_another_architecture_are_refused(lm, tmp_path: pathlib.Path, capsys):
    path = tmp_path / "c.yaml"
    # 9.99999974e-06 is 1e-5 as a file with 32-bit floats holds it; max_positions is information
    path.write_text(ARCHITECTURE.format(vocab=11, eps="9.99999974e-06", window=5))
    assert generate.main(["--config", str(path), "--weights", "w"]) == 0
    capsys.readouterr()
    path.write_text(ARCHITECTURE.format(vocab=12, eps="1e-5", window=5))
    assert refused(capsys, "--config", str(path), "--weights", "w") == (
        "--weights w: config c expected vocab_size 12, got 11; leave out --config, or give the config of these weights"
    )
    path.write_text(ARCHITECTURE.format(vocab=11, eps="1e-6", window=5))
    assert "expected norm_eps 1e-06, got 1e-05" in refused(capsys, "--config", str(path), "--weights", "w")
    path.write_text(ARCHITECTURE.format(vocab=11, eps="1e-5", window=4))
    assert "other layers than the 2 of the weights" in refused(capsys, "--config", str(path), "--weights", "w")


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("weights: expected this,\n  got that"), "weights: expected this, got that"),
        (FileNotFoundError("w: no such file"), "w: no such file"),
        (PermissionError(13, "Permission denied", "w"), "w: Permission denied"),
        (ImportError("hub ids need huggingface-hub: pip install 'jdecode[hub]'"), "hub ids need huggingface-hub"),
        (MemoryError(), "out of memory; a smaller --capacity, --num-samples or --weight-dtype needs less"),
        (RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes"), "out of memory; a smaller --capacity"),
    ],
)
def test_error_of_the_model_is_one_line(lm, capsys, error: BaseException, line: str):
    lm.error = error
    assert refused(capsys, "--weights", "w", "--prompt", "a").startswith(line)


def test_fault_of_ours_keeps_its_traceback(lm, monkeypatch: pytest.MonkeyPatch):
    lm.error = RuntimeError("a fault")
    with pytest.raises(RuntimeError, match="a fault"):
        generate.main(["--weights", "w", "--prompt", "a"])
    lm.error = ValueError("a user's mistake")
    monkeypatch.setenv("JDECODE_TRACEBACK", "1")
    with pytest.raises(ValueError, match="a user's mistake"):
        generate.main(["--weights", "w", "--prompt", "a"])


def test_interrupt_ends_with_130_and_without_words(lm, capsys):
    lm.error = KeyboardInterrupt()
    assert generate.main(["--weights", "w", "--prompt", "a"]) == 130
    assert capsys.readouterr() == ("", "")


class ClosedPipe(io.StringIO):
    def write(self, text: str) -> int:
        del text
        raise BrokenPipeError(32, "Broken pipe")


def test_reader_that_went_away_ends_quietly(lm, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "stdout", ClosedPipe())
    assert generate.main(["--weights", "w", "--prompt", "a"]) == 0
    assert capsys.readouterr().err == ""


def test_usage_errors_answer_without_jax():
    program = (
        "import sys\nfrom jdecode import chat, generate\n"
        "status = generate.main(['--weights', 'w', '--prompt', 'a', '--top-p', '2'])\n"
        "assert status == 2, status\nassert 'jax' not in sys.modules, 'jax was imported'\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr == "jdecode.generate: error: --top-p: expected a number from 0 to 1, got 2.0\n"


def test_help_names_every_flag():
    command = [sys.executable, "-m", "jdecode.generate", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stderr == ""
    for flag in ("--config", "--prompt-ids", "--min-p", "--verify", "--kv-dtype", "--mesh", "--no-stream"):
        assert flag in done.stdout


def test_longest_output_is_the_librarys():
    from jdecode import command_line, request

    assert command_line.MOST_NEW_TOKENS == request.MOST_NEW_TOKENS
