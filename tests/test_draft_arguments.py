"""``--draft`` at every front door: what can be known without weights is said before any are read."""

import dataclasses
import pathlib

import pytest

from jdecode import bench, chat, drafts, generate, language_model
from jdecode.weights import checkpoint
from tests import tiny_model

TINY_GGUF = str(tiny_model.GOLDEN / "gguf" / "llama_gqa.f32.gguf")
DOORS = {
    "generate": (generate.main, ["--weights", TINY_GGUF, "--prompt", "a"]),
    "chat": (chat.main, ["--weights", TINY_GGUF]),
    "bench": (bench.main, ["--speculative", "--weights", TINY_GGUF, "--prompt", "a"]),
}


@pytest.fixture(params=DOORS)
def refused(request, capsys, monkeypatch: pytest.MonkeyPatch):
    """A function that runs a command with a draft, in which nothing may be loaded; it returns the one line."""
    main, flags = DOORS[request.param]
    monkeypatch.setattr(language_model, "load", lambda source, **options: pytest.fail(f"loaded {source}"))

    def run(draft: str, *more: str) -> str:
        assert main([*flags, "--draft", draft, *more]) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.startswith(f"jdecode.{request.param}: error: ") and err.count("\n") == 1
        return err.removeprefix(f"jdecode.{request.param}: error: ").rstrip("\n")

    return run


def test_what_is_no_draft(refused, tmp_path: pathlib.Path):
    (tmp_path / "notes.txt").write_text("no weights")
    (tmp_path / "folder").mkdir()
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF\x03")
    for draft, message in [
        ("bigram", "bigram: expected a folder, a .gguf file, a hub id (owner/name) or a packaged model (gqa_draft"),
        (str(tmp_path / "absent.gguf"), f"{tmp_path}/absent.gguf: expected a folder, a .gguf file"),
        (str(tmp_path / "notes.txt"), f"{tmp_path}/notes.txt: expected a folder or a .gguf file, got a file"),
        (str(tmp_path / "folder"), f"{tmp_path}/folder: expected config.json in the folder, got none"),
        (str(tmp_path / "damaged.gguf"), f"{tmp_path}/damaged.gguf: "),
    ]:
        line = refused(draft)
        assert line.startswith(f"--draft: {message}") and line.endswith("; or give ngram or layer_skip")


def test_what_is_no_fault_of_the_draft(refused):
    line = refused(TINY_GGUF, "--mesh", "data=9")
    assert line.startswith("mesh: expected at most 8 devices") and "ngram" not in line
    assert refused("layer_skip", "--mesh", "data=9").startswith("mesh: expected at most 8 devices")


@pytest.mark.parametrize(("draft", "got"), [("", "none"), (" ", "' '")])
def test_no_draft_at_all(draft, got, capsys):
    for main, flags in DOORS.values():
        with pytest.raises(SystemExit, match="2"):
            main([*flags, "--draft", draft])
        assert f"argument --draft: expected some text, got {got}\n" in capsys.readouterr().err


def test_a_draft_of_another_vocabulary(refused):
    line = refused("gqa_draft")
    assert line.startswith("--draft: expected the target's tokens, got another string for id ")
    assert line.endswith("; use a draft with the same tokenizer, or ngram")
    # Without a tokenizer, the sizes decide: these are of another size.
    line = refused(str(tiny_model.GOLDEN / "tiny" / "gemma3_text"))
    assert line.startswith("--draft: expected a model with the target's 288 tokens, got one with 163")


def test_a_block_that_a_cache_by_groups_cannot_take_back(refused, tmp_path: pathlib.Path):
    # The latest quarter of a group of 128 is exact, and what can be taken back must be less.
    for draft in ("ngram", "absent.gguf"):
        line = refused(draft, "--kv-dtype", "int4", "--num-draft-tokens", "32")
        assert line.startswith("--num-draft-tokens: expected at most 31 beside a cache in int4 with groups of 128 and ")
        assert line.endswith("; give fewer, or a cache with slack 32, with and without the draft")
    # Slack, which a config may give, is that of the texts without a draft, too.
    (tmp_path / "c.yaml").write_text(f"weights: {TINY_GGUF}\ncache: {{dtype: int4, slack: 40}}\n")
    line = refused("ngram", "--config", str(tmp_path / "c.yaml"), "--num-draft-tokens", "41")
    assert line.startswith("--num-draft-tokens: expected at most 40 beside")


def test_an_eviction_that_no_draft_goes_with(capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    def load(source, **options):
        raise ValueError("weights are read")

    monkeypatch.setattr(language_model, "load", load)
    (tmp_path / "c.yaml").write_text(f"weights: {TINY_GGUF}\ncache: {{eviction: h2o, budget: 9}}\n")
    flags = ["--config", str(tmp_path / "c.yaml"), "--prompt", "a", "--draft", "ngram"]
    # What counts is the cache of the flags.
    for more, message in (
        ([], "--draft: expected a cache that can take"),
        (["--eviction", "snapkv"], "weights are read"),
    ):
        assert generate.main([*flags, *more]) == 2
        assert capsys.readouterr().err.startswith(f"jdecode.generate: error: {message}")


def test_layers_to_skip_are_known_before_the_weights_are():
    opened = checkpoint.open_checkpoint(TINY_GGUF)
    drafts.check_opened(opened, drafts.LAYER_SKIP)
    one_layer = dataclasses.replace(opened.config, layers=opened.config.layers[:1])
    with pytest.raises(ValueError, match=r"^draft layer_skip: expected a model of at least 2 layers, got 1"):
        drafts.check_opened(dataclasses.replace(opened, config=one_layer), drafts.LAYER_SKIP)


def test_a_draft_that_fits_is_opened_once_and_loaded_first(monkeypatch: pytest.MonkeyPatch, capsys):
    opened, loaded = [], []
    open_checkpoint, load = checkpoint.open_checkpoint, language_model.load
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda source: opened.append(source) or open_checkpoint(source))
    monkeypatch.setattr(
        language_model, "load", lambda source, **options: loaded.append(source.source.name) or load(source, **options)
    )
    draft = str(tiny_model.GOLDEN / "gguf" / "llama_gqa.f16_q8.gguf")
    flags = ["--weights", TINY_GGUF, "--prompt", "a", "--draft", draft, "--max-new-tokens", "3", "--json"]
    assert generate.main(flags) == 0
    assert '"target_calls"' in capsys.readouterr().out
    assert opened == [draft, TINY_GGUF] and loaded == ["llama_gqa.f16_q8.gguf", "llama_gqa.f32.gguf"]
