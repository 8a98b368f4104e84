"""``--prefix-cache`` of ``jdecode.generate``: what it says, what it refuses before weights are read, what it leaves."""

import contextlib
import errno
import io
import json
import pathlib
import re
from typing import Any

import pytest

from jdecode import config, generate, language_model, prefix_arguments
from jdecode.weights import checkpoint
from tests import fake_language_model, tiny_model

TINY_GGUF = str(tiny_model.GOLDEN / "gguf" / "llama_gqa.f32.gguf")
PREFIX = list(range(40, 80))  # the model's end token is 2
ANOTHER, REMEDY = "that of the prefix cache", "take that dtype for the request, or another prefix cache"


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> fake_language_model.FakeLanguageModel:
    return fake_language_model.install(monkeypatch)


def run(capsys, folder: pathlib.Path, *arguments: str, status: int = 0) -> tuple[str, str]:
    """Runs the command, and returns what it printed."""
    flags = ["--max-new-tokens", "3", "--prefix-cache", str(folder)]
    if not {"--weights", "--config"} & set(arguments):
        flags += ["--weights", TINY_GGUF]
    if "--prompt-ids" not in arguments:
        flags += ["--prompt-ids", ",".join(map(str, PREFIX))]
    assert generate.main([*arguments, *flags]) == status
    return capsys.readouterr()


def refused(capsys, folder: pathlib.Path, *arguments: str) -> str:
    """Runs the command, in which nothing may be printed or computed; returns its one line."""
    out, err = run(capsys, folder, *arguments, status=2)
    assert out == "" and err.startswith("jdecode.generate: error: ") and err.count("\n") == 1
    return err.removeprefix("jdecode.generate: error: ").rstrip("\n")


@pytest.fixture(scope="module")
def first_run(tmp_path_factory) -> tuple[pathlib.Path, dict[str, Any]]:
    """A folder that a first run has left, and what it printed."""
    folder, out = tmp_path_factory.mktemp("runs") / "prefixes", io.StringIO()
    flags = ["--weights", TINY_GGUF, "--prompt-ids", ",".join(map(str, PREFIX)), "--max-new-tokens", "3", "--json"]
    with contextlib.redirect_stdout(out):
        assert generate.main([*flags, "--prefix-cache", str(folder)]) == 0
    return folder, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def saved(first_run) -> pathlib.Path:
    """The folder."""
    return first_run[0]


def test_new_folder_is_made_and_saved_at_the_end(lm, tmp_path: pathlib.Path, capsys):
    folder = tmp_path / "more" / "prefixes"
    run(capsys, folder, "--weights", "w", "--kv-dtype", "int8")
    made = {"num_pages": prefix_arguments.NUM_PAGES, "cache": config.CacheConfig(dtype="int8")}
    assert lm.asked("init_prefix_cache") == made
    assert lm.asked("generate")["prefix_cache"] is lm.prefix_cache
    assert lm.calls[-1] == ("save", {"folder": str(folder)})
    with pytest.raises(SystemExit):
        generate.main(["--weights", "w", "--prefix-cache", ""])
    assert "argument --prefix-cache: expected some text" in capsys.readouterr().err


def test_folder_that_holds_one_is_loaded(lm, saved, capsys):
    run(capsys, saved, "--weights", "w")
    assert lm.asked("load_prefix_cache") == {"folder": str(saved)}
    assert [name for name, _ in lm.calls] == ["load", "load_prefix_cache", "generate", "save"]


def test_text_and_statistics_of_a_later_run(first_run, capsys):
    saved, cold = first_run
    assert cold["stats"]["prefix_tokens_reused"] == 0
    warm = json.loads(run(capsys, saved, "--json")[0])
    assert warm["token_ids"] == cold["token_ids"] and warm["text"] == cold["text"]
    assert warm["stats"]["prefix_tokens_reused"] == 39 and warm["stats"]["prompt_tokens"] == 40
    other = ",".join(map(str, [*PREFIX[:30], 7, 8]))
    _, err = run(capsys, saved, "--prompt-ids", other)
    assert err.startswith("prefill 2 of 32 tokens (30 from the prefix cache) in ")


def test_speed_of_the_prefill_is_that_of_what_was_computed(lm, tmp_path: pathlib.Path, capsys):
    lm.stats = {"prefix_tokens_reused": 30}
    _, err = run(capsys, tmp_path / "new", "--weights", "w")
    assert err.startswith("prefill 10 of 40 tokens (30 from the prefix cache) in 0.500 s (20.0 tokens/s), first token")
    lm.stats = {"prefix_tokens_reused": 0}
    _, err = run(capsys, tmp_path / "new", "--weights", "w")
    assert err.startswith("prefill 40 of 40 tokens (0 from the prefix cache) in 0.500 s (80.0 tokens/s), first token")


def test_prompt_that_is_too_long_to_be_kept_is_said(lm, tmp_path: pathlib.Path, capsys):
    lm.prefix_cache.statistics.prompts_not_kept = 1
    _, err = run(capsys, tmp_path / "new", "--weights", "w")
    assert err.endswith("\nprefix cache: the prompt was not kept, for it has more than 8192 tokens\n")


@pytest.mark.parametrize("flags", [(), ("--json",)], ids=["text", "json"])
def test_save_that_fails_loses_no_text(lm, flags, tmp_path: pathlib.Path, capsys):
    whole, _ = run(capsys, tmp_path, "--weights", "w", *flags)
    lm.prefix_cache.error = OSError(errno.ENOSPC, "No space left on device", "/some/file")
    out, err = run(capsys, tmp_path, "--weights", "w", *flags, status=2)
    assert out == whole and " Paris." in out
    assert err.splitlines()[-1] == (
        f"jdecode.generate: error: --prefix-cache: {tmp_path}: expected a folder that can be written, got: No space "
        "left on device; the text is whole, its prompt was not kept, and the folder holds what it held"
    )
    lm.prefix_cache.error = ValueError("the reason")
    _, err = run(capsys, tmp_path, "--weights", "w", *flags, status=2)
    assert err.endswith("error: --prefix-cache: the reason; the text is whole, its prompt was not kept\n")


@pytest.fixture
def without_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(language_model, "load", lambda source, **options: pytest.fail(f"loaded {source}"))


def test_folders_are_refused_before_any_weights_are_read(without_weights, saved, tmp_path: pathlib.Path, capsys):
    (tmp_path / "notes.txt").write_text("dear")
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    (damaged / "prefix_cache.json").write_text("{")
    for folder, message in (
        (
            tmp_path,
            f"{tmp_path}: expected a prefix cache, or a new or an empty folder, got one that holds 'damaged'; give",
        ),
        (
            tmp_path / "notes.txt",
            f"{tmp_path}/notes.txt: expected a folder that can be read, got: Not a directory; give",
        ),
        (pathlib.Path("/proc/jdecode"), "/proc/jdecode: expected a folder that can be written, got: "),
        (damaged, f"{damaged}/prefix_cache.json: expected JSON, got: "),
    ):
        assert refused(capsys, folder).startswith(f"--prefix-cache: {message}")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged", "notes.txt"]


def test_caches_are_refused_by_their_flags_before_any_weights_are_read(without_weights, saved, tmp_path, capsys):
    paged = tmp_path / "paged.yaml"
    paged.write_text(f"weights: {TINY_GGUF}\ncache: {{layout: paged}}\n")
    grouped = tmp_path / "grouped.yaml"
    grouped.write_text(f"weights: {TINY_GGUF}\ncache: {{dtype: int4}}\n")
    each = "expected one that stores each token for itself beside a prefix cache"
    for flags, message in (
        (("--kv-dtype", "int4"), f"--kv-dtype: {each}, got 'int4'; use int8, fp8 or a float dtype"),
        (("--kv-dtype", "int8_channel"), f"--kv-dtype: {each}, got 'int8_channel'; use int8, fp8 or a float dtype"),
        (("--config", str(grouped)), f"--kv-dtype: {each}, got 'int4'; use int8, fp8 or a float dtype"),
        (
            ("--eviction", "snapkv", "--cache-budget", "9"),
            "--eviction: expected none beside a prefix cache, got snapkv; leave one of them out",
        ),
        (
            ("--config", str(paged)),
            "cache layout: expected auto or full beside a prefix cache, got 'paged'; leave one of them out",
        ),
    ):
        assert refused(capsys, tmp_path / "new", *flags) == message
    assert not (tmp_path / "new").exists()
    line = refused(capsys, saved, "--kv-dtype", "int8")
    assert line == f"--kv-dtype: expected float32, {ANOTHER}, got int8; {REMEDY}"


def test_other_models_and_dtypes_are_refused_by_the_flag(saved, tmp_path, capsys):
    line = refused(capsys, saved, "--weight-dtype", "bfloat16")
    assert re.fullmatch(
        rf"--prefix-cache: {saved}: expected a prefix cache of this model in bfloat16 \(digest \w+\), got one with "
        r"digest \w+; make a new one, or give another folder",
        line,
    )
    tiny_model.load_text().init_prefix_cache(num_pages=3, cache=config.CacheConfig(dtype="int8")).save(tmp_path)
    assert refused(capsys, tmp_path) == f"--kv-dtype: expected int8, {ANOTHER}, got float32; {REMEDY}"


def test_model_is_opened_once(lm, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys):
    opened = []
    monkeypatch.setattr(
        checkpoint, "open_checkpoint", lambda source: opened.append(source) or lm.open_checkpoint(source)
    )
    run(capsys, tmp_path / "new", "--weights", "w")
    run(capsys, tmp_path / "new", "--weights", "w", "--draft", "layer_skip")
    assert opened == ["w", "w"]
