"""``python -m jdecode.train``: from a folder of text to a model that writes; errors are one line."""

import dataclasses
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import time
import types

import numpy as np
import pytest
import tokenizers

import jdecode
from jdecode import language_model, train
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import checkpoints, corpus, export, held_out, teacher_text, train_state
from tests.training import tiny_run

CONFIG = """
description: Words in some order.
architecture:
  vocab_size: 290
  hidden_size: {hidden_size}
  intermediate_size: 20
  num_heads: 4
  num_kv_heads: 2
  head_dim: 6
  layers: {{count: 2, pattern: [{{window: 4}}, {{}}]}}
  tie_embeddings: true
corpus: {{suffixes: [.txt], held_out_share: 0.25}}
optimizer: {{learning_rate: 1e-2, warmup_steps: 2}}
distill: {{teacher_share: 0.75, generated_tokens: {generated_tokens}, generated_share: 0.4}}
sequence_len: 11
batch_size: 5
num_steps: 6
seed: 5
evaluate_every: 4
checkpoint_every: 2
"""


def write_config(path: pathlib.Path, more: str = "", hidden_size: int = 12, generated_tokens: int = 0) -> str:
    text = CONFIG.format(hidden_size=hidden_size, generated_tokens=generated_tokens)
    path.write_text(text + more, encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    """A folder of texts, a config, and the run of it that nobody stopped. Tests write elsewhere."""
    folder = tmp_path_factory.mktemp("work")
    tiny_run.write_files(folder / "texts")
    config = write_config(folder / "tiny.yaml")
    flags = ["--config", config, "--corpus", str(folder / "texts")]
    assert train.main([*flags, "--output", str(folder / "run")]) == 0
    return types.SimpleNamespace(
        folder=folder, flags=flags, texts=str(folder / "texts"), run=folder / "run", model=folder / "run" / "model"
    )


def record_of(run: pathlib.Path) -> dict:
    return json.loads((run / export.MODEL_FOLDER / "training.json").read_text())


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Runs the command in this process; returns its error: one line, the last on standard error."""
    capsys.readouterr()
    try:
        status = train.main(arguments)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    *before, last = err.splitlines()
    assert last.startswith("jdecode.train: error: ") and err.endswith("\n"), err
    assert all(re.fullmatch(r"\d+ files, \d+ tokens to learn from; .*", line) for line in before), err
    return last.removeprefix("jdecode.train: error: ")


def test_the_model_writes_and_has_the_recorded_loss(work):
    lm = jdecode.load(work.model, dtype="float32")
    result = lm.generate(["the quick"], max_new_tokens=5, ignore_eos=True)
    assert result.lengths.tolist() == [5]
    files, tokenizer = record_of(work.run)["corpus"], lm.tokenizer
    assert tokenizer is not None
    # The held-out files by hand: those of the folder whose names' hashes say so.
    names = sorted(path.relative_to(work.texts).as_posix() for path in pathlib.Path(work.texts).rglob("*.txt"))
    held = [name for name in names if corpus.is_held_out(name, 0.25)]
    assert files["held_out_files"] == len(held) and files["train_files"] == len(names) - len(held)
    texts = [(pathlib.Path(work.texts) / name).read_text(encoding="utf-8") for name in held]
    documents = [np.asarray([*tokenizer.encode(text, add_special_tokens=False), 0]) for text in texts]
    num_bytes = np.asarray([len(tokenizer.token_bytes(idx)) for idx in range(tokenizer.vocab_size)])
    model = dataclasses.replace(lm.model, backend="reference")
    loss = held_out.evaluate(model, lm.params, held_out.pieces(documents, 11, 0), num_bytes)
    final = record_of(work.run)["final"]
    assert loss.num_bytes == final["num_bytes"] == sum(len(text.encode()) for text in texts)
    # Means of some 800 float32 losses along two paths. tests/training/test_export.py has that of the cache.
    np.testing.assert_allclose(loss.nats_a_token, final["nats_a_token"], rtol=0, atol=5e-5)
    np.testing.assert_allclose(loss.bits_per_byte, final["bits_per_byte"], rtol=1e-4)


def test_what_a_run_leaves(work):
    pytest.importorskip("matplotlib")
    assert sorted(path.name for path in work.run.iterdir()) == ["checkpoints", "model", "tokenizer"]
    assert (work.model / "losses.png").stat().st_size > 1000
    record = record_of(work.run)
    assert record["config"]["name"] == "tiny"
    assert [look["step"] for look in record["held_out"]] == [4, 6]
    command = record["command"].split()
    assert command == [
        "python",
        "-m",
        "jdecode.train",
        "--config",
        work.flags[1],
        "--output",
        str(work.run),
        "--corpus",
        work.texts,
    ]
    assert f"`{record['command']}`" in (work.model / "README.md").read_text()


def test_what_is_said(work, tmp_path, capsys: pytest.CaptureFixture[str]):
    assert train.main([*work.flags, "--output", str(tmp_path / "run")]) == 0
    out, err = capsys.readouterr()
    final = record_of(tmp_path / "run")["final"]
    assert out == (
        f"{tmp_path / 'run' / 'model'}: held out {final['nats_a_token']:.4f} nats a token, perplexity "
        f"{final['perplexity']:.2f}, {final['bits_per_byte']:.4f} bits a byte\n"
    )
    lines = [line.split(":")[0] for line in err.splitlines() if line.startswith("step ")]
    assert lines == ["step 4 of 6", "step 6 of 6"]
    # The same run again, in another folder: the same weights and losses.
    for name in ("model.safetensors", "tokenizer.json"):
        assert (tmp_path / "run" / "model" / name).read_bytes() == (work.model / name).read_bytes()
    assert {**record_of(tmp_path / "run"), "command": ""} == {**record_of(work.run), "command": ""}


def test_flags_win_over_the_config(work, tmp_path):
    texts = tmp_path / "other"
    tiny_run.write_files(texts)
    for path in texts.rglob("*.txt"):
        path.rename(path.with_suffix(".md"))
    flags = ["--corpus", str(texts), "--suffix", ".md", "--suffix", ".rst", "--steps", "3", "--seed", "0"]
    assert train.main([*work.flags[:2], "--output", str(tmp_path / "run"), *flags]) == 0
    record = record_of(tmp_path / "run")
    assert record["config"]["corpus"] == {"source": str(texts), "suffixes": [".md", ".rst"], "held_out_share": 0.25}
    assert (record["config"]["num_steps"], record["config"]["seed"]) == (3, 0)
    assert record["command"].endswith(f"--corpus {texts} --steps 3 --seed 0 --suffix .md --suffix .rst")


def stop_before_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = train_state.train_step

    def until(objective, config, num_steps, state, *rest):
        if int(state.step) == step:
            raise KeyboardInterrupt
        return whole(objective, config, num_steps, state, *rest)

    monkeypatch.setattr(train_state, "train_step", until)


def assert_resumes_to(work, flags: list[str], folder: pathlib.Path, whole: pathlib.Path) -> None:
    assert train.main([*flags, "--output", str(folder), "--resume"]) == 0
    assert (folder / "model/model.safetensors").read_bytes() == (whole / "model/model.safetensors").read_bytes()
    assert {**record_of(folder), "command": ""} == {**record_of(whole), "command": ""}


def test_interrupted_and_resumed(work, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        stop_before_step(patch, 3)
        assert train.main([*work.flags, "--output", str(tmp_path / "run")]) == 130
    assert not (tmp_path / "run" / "model").exists()
    assert_resumes_to(work, work.flags, tmp_path / "run", work.run)


@pytest.mark.slow
def test_killed_and_resumed(work, tmp_path):
    """By SIGKILL, in the middle of whatever it does, and again while it goes on."""
    command = [sys.executable, "-m", "jdecode.train", *work.flags, "--output", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    for step, more in (("2", []), ("4", ["--resume"])):
        process = subprocess.Popen([*command, *more], env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 240
        while not (tmp_path / "run" / checkpoints.FOLDER / step).is_dir() and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert (tmp_path / "run" / checkpoints.FOLDER / step).is_dir()
    shutil.rmtree(tmp_path / "run" / "model", ignore_errors=True)  # should it have been faster than the signal
    assert_resumes_to(work, work.flags, tmp_path / "run", work.run)


DIE_WHILE_RENAMING = """
import os, pathlib, signal, sys
from jdecode import train

rename = os.rename

def die(path, target, **options):
    if pathlib.Path(target).name == "4":
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target, **options)

os.rename = die
train.main(sys.argv[1:])
"""


@pytest.mark.slow
def test_killed_while_it_writes_a_checkpoint(work, tmp_path):
    """All of checkpoint 4 is on the disk but its name: it is not taken for one."""
    command = [sys.executable, "-c", DIE_WHILE_RENAMING, *work.flags, "--output", str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    done = subprocess.run(command, env=environment, stderr=subprocess.DEVNULL, check=False)
    assert done.returncode == -signal.SIGKILL
    names = {path.name for path in (tmp_path / "run" / checkpoints.FOLDER).iterdir()}
    assert "2" in names and "4" not in names and len(names) == 2
    assert_resumes_to(work, work.flags, tmp_path / "run", work.run)


# Users' mistakes.


def test_a_config_that_says_too_much(work, tmp_path, capsys):
    config = write_config(tmp_path / "c.yaml", "optimiser: {}\n")
    assert refused(capsys, "--config", config, "--output", str(tmp_path / "run")) == (
        f"{config}: optimiser: unknown key; did you mean optimizer?"
    )
    assert "did you mean gqa_small.yaml" in refused(capsys, "--config", "gqa_smal", "--output", str(tmp_path / "run"))
    config = write_config(tmp_path / "c.yaml", "accumulation_steps: 0\n")
    message = refused(capsys, "--config", config, "--output", str(tmp_path / "run"))
    assert message == f"{config}: accumulation_steps: expected a count of at least 1, got 0"
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--steps", "2"],
            "warmup_steps: expected fewer than num_steps 2, got 2; give more steps or a shorter warm-up",
        ),
        (["--steps", "0"], "argument --steps: expected a whole number from 1 to 2147483647, got '0'"),
        (["--seed", "-1"], "argument --seed: expected a whole number from 0 to 2147483647, got '-1'"),
        (["--suffix", "txt"], "corpus suffixes: expected suffixes such as .txt, got 'txt'"),
        (["--distill", ""], "argument --distill: expected some text, got none"),
        (["--suffix", ".\udcff"], "argument --suffix: expected text in UTF-8, got other bytes at character 1"),
        (["--config", "\udcff.yaml"], "argument --config: expected text in UTF-8, got other bytes at character 0"),
        (["--corpus", "/no/such"], "corpus: expected standard_library or a folder, got '/no/such'"),
    ],
)
def test_flags_that_cannot_be(work, tmp_path, capsys, flags, message):
    assert refused(capsys, *work.flags, "--output", str(tmp_path / "run"), *flags) == message
    assert not (tmp_path / "run").exists()


def test_no_output_or_config(capsys):
    assert "--output" in refused(capsys, "--config", "gqa_small")
    assert "--config" in refused(capsys, "--output", "run")


def test_a_corpus_without_files(work, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    message = refused(capsys, *work.flags[:2], "--output", str(tmp_path / "run"), "--corpus", str(tmp_path / "empty"))
    assert message.startswith(
        "corpus: expected files with text on both sides of the split, got 0 to train on and 0 held"
    )
    assert not (tmp_path / "run").exists()


def test_a_corpus_that_is_too_short(work, tmp_path, capsys):
    (tmp_path / "short").mkdir()
    for idx in range(8):
        (tmp_path / "short" / f"{idx}.txt").write_text("a")
    message = refused(capsys, *work.flags[:2], "--output", str(tmp_path / "run"), "--corpus", str(tmp_path / "short"))
    assert message.startswith("corpus: expected at least 23 tokens for sequences of 11, got ")
    assert list((tmp_path / "run").iterdir()) == []  # so that the same folder may be given again


def test_folders_with_and_without_a_run(work, tmp_path, capsys):
    run = str(work.run)
    assert refused(capsys, *work.flags, "--output", run) == (
        f"{run}: expected a folder without a run, got one with checkpoints; resume it, or give another"
    )
    nothing = str(tmp_path / "nothing")
    assert refused(capsys, *work.flags, "--output", nothing, "--resume") == (
        f"{nothing}: expected a run to resume, got no checkpoint in it; start one without --resume, in a new folder"
    )
    assert not (tmp_path / "nothing").exists()
    message = refused(capsys, *work.flags, "--output", run, "--resume", "--seed", "6")
    assert "expected to resume the same run, got another config.seed (6, before 5)" in message
    (tmp_path / "file").write_text("x")
    assert str(tmp_path / "file") in refused(capsys, *work.flags, "--output", str(tmp_path / "file"))


def test_a_vocabulary_under_every_byte(work, tmp_path, capsys):
    config = pathlib.Path(write_config(tmp_path / "c.yaml"))
    config.write_text(config.read_text().replace("vocab_size: 290", "vocab_size: 200"))
    message = refused(capsys, "--config", str(config), *work.flags[2:], "--output", str(tmp_path / "run"))
    assert message == "vocab_size: expected at least 257 (every byte and an end), got 200"
    config.write_text(config.read_text().replace("vocab_size: 200", "vocab_size: 16777217"))
    message = refused(capsys, "--config", str(config), *work.flags[2:], "--output", str(tmp_path / "run"))
    assert message == "vocab_size: expected at most 16777216, got 16777217"


# Starting from weights, and learning from a teacher.


def test_a_run_that_starts_from_weights(work, tmp_path):
    flags = [*work.flags, "--steps", "3", "--init", str(work.model)]
    assert train.main([*flags, "--output", str(tmp_path / "run")]) == 0
    record = record_of(tmp_path / "run")
    assert record["start"] == {"weights": str(work.model)}
    assert f"--init {work.model}" in record["command"]
    # It goes on where the other ended: a fresh model is at log(290) = 5.67.
    assert record["history"][0]["loss"] < record_of(work.run)["history"][0]["loss"] - 0.1
    assert (tmp_path / "run/model/tokenizer.json").read_bytes() == (work.model / "tokenizer.json").read_bytes()


def test_a_start_of_another_architecture(work, tmp_path, capsys):
    config = write_config(tmp_path / "c.yaml", hidden_size=16)
    flags = ["--config", config, *work.flags[2:], "--output", str(tmp_path / "run"), "--init", str(work.model)]
    message = refused(capsys, *flags)
    assert message.startswith(f"--init {work.model}: ") and "hidden_size" in message and "16" in message
    assert not (tmp_path / "run").exists()


def test_what_a_user_has_is_never_replaced(work, tmp_path, capsys):
    """Also where the folder has no checkpoints: not a model, not the weights to start from, not a tokenizer."""
    for name in ("model", "tokenizer", "notes"):
        folder = tmp_path / f"with_{name}"
        shutil.copytree(work.model, folder / name)
        before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        flags = [*work.flags, "--output", str(folder), "--init", str(folder / name)]
        assert (
            refused(capsys, *flags)
            == f"{folder}: expected a new or an empty folder, got one that holds {name!r}; give another"
        )
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_a_user_put_into_the_model_is_not_lost(work, tmp_path, capsys):
    """A resumed run writes its model again, in place of the one that stands there."""
    shutil.copytree(work.run, tmp_path / "run")
    model = tmp_path / "run" / "model"
    (model / "quantised.gguf").write_text("mine")
    message = refused(capsys, *work.flags, "--output", str(tmp_path / "run"), "--resume")
    assert message == f"{model}: expected what a run writes, got 'quantised.gguf', too; move it away"
    assert (model / "quantised.gguf").read_text() == "mine"
    (model / "quantised.gguf").unlink()
    assert_resumes_to(work, work.flags, tmp_path / "run", work.run)
    model.rename(tmp_path / "elsewhere")
    model.symlink_to(tmp_path / "elsewhere")
    message = refused(capsys, *work.flags, "--output", str(tmp_path / "run"), "--resume")
    assert message == f"{model}: expected a folder, got a link; move it away"
    model.unlink()
    model.write_text("mine")
    message = refused(capsys, *work.flags, "--output", str(tmp_path / "run"), "--resume")
    assert message == f"{model}: expected a folder, got a file; move it away"
    assert model.read_text() == "mine"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("{window: 4}", "{window: 4, num_sinks: 1}"),
            "config: expected a model that the llama format can describe, got one whose layers it cannot say",
        ),
        (
            ("tie_embeddings: true", "tie_embeddings: true\n  family: lama"),
            "family: expected a known family (llama, gemma3), got 'lama'; the nearest is 'llama'",
        ),
    ],
)
def test_a_model_that_could_not_be_written_is_not_trained(work, tmp_path, capsys, change, message):
    config = pathlib.Path(write_config(tmp_path / "c.yaml"))
    config.write_text(config.read_text().replace(*change))
    flags = ["--config", str(config), *work.flags[2:], "--output", str(tmp_path / "run")]
    assert refused(capsys, *flags) == message
    assert not (tmp_path / "run").exists()


def test_an_output_inside_the_corpus(work, tmp_path, capsys):
    folder = tmp_path / "texts"
    tiny_run.write_files(folder)
    flags = ["--config", write_config(tmp_path / "c.yaml"), "--corpus", str(folder)]
    message = refused(capsys, *flags, "--output", str(folder / "run"))
    assert message == f"{folder / 'run'}: expected a folder outside the corpus {folder}; give another"
    assert not (folder / "run").exists()


def test_weights_that_the_stored_dtype_cannot_hold(work, tmp_path, capsys):
    """After a step of a million the float32 weights are finite; in float16 they are not."""
    config = pathlib.Path(write_config(tmp_path / "c.yaml", "weight_dtype: float16\n"))
    config.write_text(config.read_text().replace("1e-2, warmup_steps: 2", "1e+6, warmup_steps: 0"))
    flags = ["--config", str(config), *work.flags[2:], "--steps", "1", "--output", str(tmp_path / "run")]
    assert train.main(flags) == 2
    *_, message = capsys.readouterr().err.splitlines()
    assert message.startswith("jdecode.train: error: weights in float16: expected a finite loss and perplexity, got ")
    assert not (tmp_path / "run/model").exists()


def test_weights_that_are_not_there(work, tmp_path, capsys):
    for flag in ("--init", "--distill"):
        message = refused(capsys, *work.flags, "--output", str(tmp_path / "run"), flag, str(tmp_path / "absent"))
        assert message.startswith(f"{tmp_path / 'absent'}: expected a folder")
        message = refused(capsys, *work.flags, "--output", str(tmp_path / "run"), flag, str(work.run))
        assert message == f"{work.run}: expected config.json in the folder, got none; give its {work.model}"
    assert not (tmp_path / "run").exists()


def test_distilled_and_resumed(work, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    flags = ["--config", write_config(tmp_path / "draft.yaml", hidden_size=8), *work.flags[2:]]
    flags += ["--distill", str(work.model)]
    assert train.main([*flags, "--output", str(tmp_path / "whole")]) == 0
    record = record_of(tmp_path / "whole")
    assert record["teacher"].items() >= {"generated_tokens": 0, "sequences_a_step": 0}.items()
    assert record["teacher"]["name"] == str(work.model)
    assert record["history"][0].keys() >= {"loss", "next_token", "divergence"}
    for entry in record["history"]:
        expected = 0.75 * entry["divergence"] + 0.25 * entry["next_token"]
        np.testing.assert_allclose(entry["loss"], expected, rtol=1e-5)
    assert f"| Teacher | {work.model}: " in (tmp_path / "whole/model/README.md").read_text()
    assert (tmp_path / "whole/model/tokenizer.json").read_bytes() == (work.model / "tokenizer.json").read_bytes()
    with monkeypatch.context() as patch:
        stop_before_step(patch, 5)
        assert train.main([*flags, "--output", str(tmp_path / "run")]) == 130
    assert_resumes_to(work, flags, tmp_path / "run", tmp_path / "whole")
    message = refused(capsys, *flags[:-2], "--output", str(tmp_path / "run"), "--resume")
    assert "expected to resume the same run, got another teacher (none, before one)" in message


def test_the_ends_of_a_start_s_tokenizer_are_kept_when_resumed(work, tmp_path, capsys, monkeypatch):
    """A GGUF names several; a folder of a tokenizer can name one."""
    load = language_model.load

    def with_two_ends(*arguments, **options):
        lm = load(*arguments, **options)
        backend = tokenizers.Tokenizer.from_file(str(work.model / "tokenizer.json"))
        return dataclasses.replace(lm, tokenizer=tokenizer_lib.Tokenizer(backend, eos_token_ids=(0, 5)))

    monkeypatch.setattr(language_model, "load", with_two_ends)
    flags = [*work.flags, "--steps", "3", "--init", str(work.model)]
    assert train.main([*flags, "--output", str(tmp_path / "whole")]) == 0
    with monkeypatch.context() as patch:
        stop_before_step(patch, 2)
        assert train.main([*flags, "--output", str(tmp_path / "run")]) == 130
    assert_resumes_to(work, flags, tmp_path / "run", tmp_path / "whole")
    for name in ("run", "whole"):
        values = json.loads((tmp_path / name / "model" / "config.json").read_text())
        assert values["eos_token_id"] == [0, 5]


def test_distilled_on_text_of_the_teacher(work, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(teacher_text, "PROMPT_LEN", 4)
    monkeypatch.setattr(teacher_text, "BATCH_SIZE", 8)
    config = write_config(tmp_path / "draft.yaml", hidden_size=8, generated_tokens=100)
    flags = ["--config", config, *work.flags[2:], "--distill", str(work.model)]
    with monkeypatch.context() as patch:
        stop_before_step(patch, 3)
        assert train.main([*flags, "--output", str(tmp_path / "run")]) == 130
    with np.load(tmp_path / "run" / train.TEACHER_TEXT_NAME) as stored:
        num_tokens = len(stored["tokens"])
        assert (stored["tokens"][stored["ends"] - 1] == 0).all()  # every text has its end
        num_prompt_tokens = 4 * len(stored["ends"])
    assert num_tokens >= 100 + num_prompt_tokens  # prompts do not count as written

    def forbidden(*arguments, **options):
        raise AssertionError("the teacher's text is kept: a resumed run does not write it again")

    with monkeypatch.context() as patch:
        patch.setattr(teacher_text, "write", forbidden)
        assert train.main([*flags, "--output", str(tmp_path / "run"), "--resume"]) == 0
    record = record_of(tmp_path / "run")
    assert record["teacher"].items() >= {"generated_tokens": num_tokens, "sequences_a_step": 2}.items()
    assert record["teacher"]["name"] == str(work.model)
    assert "40% of each batch" in (tmp_path / "run/model/README.md").read_text()
    assert train.main([*flags, "--output", str(tmp_path / "whole")]) == 0
    assert {**record_of(tmp_path / "whole"), "command": ""} == {**record, "command": ""}
    expected = (tmp_path / "whole/model/model.safetensors").read_bytes()
    assert (tmp_path / "run/model/model.safetensors").read_bytes() == expected


def test_a_teacher_of_another_vocabulary(work, tmp_path, capsys):
    config = pathlib.Path(write_config(tmp_path / "c.yaml"))
    config.write_text(config.read_text().replace("vocab_size: 290", "vocab_size: 300"))
    flags = ["--config", str(config), *work.flags[2:], "--output", str(tmp_path / "run"), "--distill", str(work.model)]
    message = refused(capsys, *flags)
    assert message == (
        "distillation: expected a teacher with the student's vocabulary of 300, got one of 290; give the student the "
        "vocab_size of the teacher, whose tokenizer it takes"
    )


def test_a_teacher_without_a_tokenizer(work, tmp_path, capsys):
    shutil.copytree(work.model, tmp_path / "mute")
    for path in (tmp_path / "mute").glob("tokenizer*"):
        path.unlink()
    flags = [*work.flags, "--output", str(tmp_path / "run"), "--distill", str(tmp_path / "mute")]
    assert refused(capsys, *flags) == f"{tmp_path / 'mute'}: expected weights that come with a tokenizer, got none"


@pytest.mark.parametrize("generated_tokens", [0, 100])
def test_a_teacher_whose_tokenizer_names_no_end(work, tmp_path, capsys, generated_tokens):
    shutil.copytree(work.model, tmp_path / "endless")
    path = tmp_path / "endless" / "tokenizer_config.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps({name: value for name, value in values.items() if name != "eos_token"}))
    config = write_config(tmp_path / "c.yaml", generated_tokens=generated_tokens)
    flags = ["--config", config, *work.flags[2:], "--distill", str(tmp_path / "endless")]
    message = refused(capsys, *flags, "--output", str(tmp_path / "run"))
    assert message == "tokenizer: expected one with an end token (it parts the documents), got one without"
    assert not (tmp_path / "run").exists()
