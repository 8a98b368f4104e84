"""``--window`` and ``--sinks`` at the front doors, and ``streaming:`` in a config."""

import io
import json
import pathlib

import pytest

from jdecode import chat, config_file, evaluate, generate, language_model, ledger
from tests import fake_language_model, tiny_model

TINY_GGUF = str(tiny_model.GOLDEN / "gguf" / "llama_gqa.f32.gguf")
GENERATE = ["--weights", "w", "--prompt", "a"]


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> fake_language_model.FakeLanguageModel:
    return fake_language_model.install(monkeypatch)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--window", "100"], {"window": 100, "num_sinks": 4}),
        (["--window", "100", "--sinks", "0"], {"window": 100, "num_sinks": 0}),
        (["--config", "c.yaml"], {"window": 30, "num_sinks": 2}),
        (["--config", "c.yaml", "--sinks", "3"], {"window": 30, "num_sinks": 3}),
        (["--config", "c.yaml", "--window", "9"], {"window": 9, "num_sinks": 2}),
    ],
)
def test_flags_and_config_reach_the_model(lm, tmp_path, monkeypatch: pytest.MonkeyPatch, flags, expected):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("c.yaml").write_text("weights: w\nstreaming: {window: 30, num_sinks: 2}\n")
    assert generate.main([*GENERATE, *flags]) == 0
    assert lm.asked("with_window") == expected
    lm.calls.clear()
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert chat.main(["--weights", "w", *flags]) == 0
    assert lm.asked("with_window") == expected


def test_no_window_unless_asked(lm):
    assert generate.main(GENERATE) == 0
    assert "with_window" not in [name for name, _ in lm.calls]
    assert config_file.loads("weights: w", origin="c.yaml").streaming is None


def test_the_draft_gets_the_window_too(lm):
    assert generate.main([*GENERATE, "--window", "100", "--draft", "smaller"]) == 0
    assert [name for name, _ in lm.calls if name == "with_window"] == ["with_window"] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sinks", "4"], "--sinks: expected --window beside it, got none; add one, or leave it out"),
        (["--window", "0"], "argument --window: expected a whole number from 1 to 2147483647, got '0'"),
        (["--window", "255"], "window: expected window and sinks of at most 256 positions together"),
        (["--window", "252", "--sinks", "5"], "window: expected window and sinks of at most 256 positions together"),
        (["--window", "9", "--draft", "gqa_small"], "--draft: expected the target's tokens"),
    ],
)
def test_mistakes_are_one_line_before_weights_are_read(capsys, monkeypatch: pytest.MonkeyPatch, flags, message):
    monkeypatch.setattr(language_model, "load", lambda source, **options: pytest.fail(f"loaded {source}"))
    for main, own in ((generate.main, ["--prompt", "a"]), (chat.main, [])):
        try:
            status = main(["--weights", TINY_GGUF, *own, *flags])
        except SystemExit as ended:
            status = ended.code
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert err.split(": error: ")[1].startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("streaming: {num_sinks: 4}", "streaming.window: missing; this key has no default"),
        ("streaming: {window: 0}", "streaming: window: expected a count of at least 1, got 0"),
        ("streaming: {window: 9, sinks: 4}", "streaming.sinks: unknown key; did you mean num_sinks?"),
    ],
)
def test_a_config_that_makes_no_sense(text, message):
    with pytest.raises(ValueError) as refused:
        config_file.loads(f"weights: w\n{text}", origin="c.yaml")
    assert str(refused.value) == f"c.yaml: {message}"


def test_generate_takes_what_the_ledger_says(capsys):
    """Endless text from a real command: past the trained 256 positions, and the ledger of the same flags."""
    flags = ["--weights", TINY_GGUF, "--window", "40", "--sinks", "3"]
    ids = ",".join(["17", "33", "65"] * 20)
    assert generate.main([*flags, "--prompt-ids", ids, "--max-new-tokens", "300", "--ignore-eos", "--json"]) == 0
    entry = json.loads(capsys.readouterr().out)
    assert len(entry["token_ids"]) == 300
    assert ledger.main([*flags, "--context", "512", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["cache"]["bytes"] == entry["stats"]["kv_cache_bytes"]
    assert (report["window"], report["sinks"]) == (40, 3)


def test_ledger_reads_the_config_and_has_the_same_default(tmp_path, capsys):
    file = tmp_path / "c.yaml"
    text = pathlib.Path(config_file.find("gqa_small")).read_text()
    file.write_text(f"{text}\nstreaming: {{window: 100}}\n")
    bytes_of = []
    for flags in (["--config", str(file)], ["--config", "gqa_small", "--window", "100", "--sinks", "4"]):
        assert ledger.main([*flags, "--context", "1000", "--json"]) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["window"], report["sinks"]) == (100, 4)
        bytes_of.append(report["cache"]["bytes"])
    assert bytes_of[0] == bytes_of[1]
    # Three layers of a window of 64, three of 100 and four sinks; keys and values of 2 heads of 32 in float32.
    slots = 3 * 64 + 3 * 104
    assert bytes_of[0] == 2 * slots * 2 * 32 * 4 + 4 * (64 + 104) + 4
    assert ledger.main(["--config", "gqa_small", "--window", "1021"]) == 2
    assert "at most 1,024 positions together" in capsys.readouterr().err


def test_evaluate_judges_with_the_window(tmp_path, capsys):
    (tmp_path / "texts").mkdir()
    for idx in range(4):
        (tmp_path / "texts" / f"{idx}.txt").write_text(f"def f{idx}(x):\n    return x + {idx}\n" * 9)
    corpus = ["--corpus", str(tmp_path / "texts"), "--suffix", ".txt", "--held-out-share", "0.6"]
    flags = ["--config", "gqa_small", *corpus]
    losses = []
    for own in ([], ["--window", "500"], ["--window", "12"]):
        assert evaluate.main([*flags, *own, "--json"]) == 0
        losses.append(json.loads(capsys.readouterr().out)["model"]["nats_a_token"])
    assert losses[1] == pytest.approx(losses[0], abs=1e-4) and abs(losses[2] - losses[0]) > 0.01
