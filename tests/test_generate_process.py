"""``python -m jdecode.generate`` as a process of its own, with weights: text, refusals, and a pipe that closes."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from tests import fake_language_model

TINY_GGUF = pathlib.Path(__file__).parent / "golden" / "gguf" / "llama_gqa.f32.gguf"


def run_command(*arguments: str, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "jdecode.generate", *arguments], capture_output=True, text=True, timeout=300, **options
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "abc", "--capacity", "2"], "capacity"),
        (["--prompt-ids", "999999"], "999999"),
        (["--prompt-ids", "5", "--stop-token-id", "999999"], "999999"),
    ],
)
def test_request_that_the_tiny_model_refuses(arguments: list[str], message: str):
    done = run_command("--weights", str(TINY_GGUF), "--max-new-tokens", "3", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("jdecode.generate: error: ") and done.stderr.count("\n") == 1
    assert message in done.stderr


@pytest.mark.slow
def test_damaged_weights_are_one_line(tmp_path: pathlib.Path):
    data = TINY_GGUF.read_bytes()
    (tmp_path / "cut.gguf").write_bytes(data[: len(data) // 2])
    (tmp_path / "other.gguf").write_bytes(b"not a model at all" * 9)
    for name in ("cut.gguf", "other.gguf", "absent.gguf"):
        done = run_command("--weights", str(tmp_path / name), "--prompt", "a")
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("jdecode.generate: error: ") and done.stderr.count("\n") == 1, done.stderr
        assert name in done.stderr


@pytest.mark.slow
def test_closed_pipe_of_the_real_command_is_quiet():
    command = [sys.executable, "-m", "jdecode.generate", "--weights", str(TINY_GGUF), "--prompt-ids", "5,7"]
    process = subprocess.Popen(
        [*command, "--max-new-tokens", "4"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None
    process.stdout.close()
    err = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=300) == 0
    assert "Traceback" not in err and "BrokenPipe" not in err


@pytest.mark.slow
@pytest.mark.real_model
def test_the_capital_of_france(smollm2_gguf: pathlib.Path):
    # The stored greedy continuation (another implementation, float32) is " Paris.\n\nThe answer is: ...".
    arguments = ("--weights", str(smollm2_gguf), "--prompt", "The capital of France is", "--stop", "\n")
    done = run_command("--config", "smollm2_135m.yaml", *arguments, env=os.environ | {"JAX_PLATFORMS": "cpu"})
    assert done.returncode == 0, done.stderr
    assert done.stdout == "The capital of France is Paris.\n"
    assert "tokens/s" in done.stderr and "cache" in done.stderr and "compile" in done.stderr
    found = json.loads(run_command(*arguments, "--json").stdout)
    assert (found["text"], found["finish_reason"]) == (" Paris.", "stop")
    assert set(fake_language_model.STATS) <= set(found["stats"])
