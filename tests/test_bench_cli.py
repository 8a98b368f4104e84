"""``python -m jdecode.bench --speculative``: figures that agree with each other, a table, a picture, refusals."""

import json
import pathlib
import sys

import pytest

from jdecode import bench, command_line, step_cost

TINY_GGUF = str(pathlib.Path(__file__).parent / "golden" / "gguf" / "llama_gqa.f32.gguf")
FLAGS = ["--speculative", "--weights", TINY_GGUF, "--prompt", "a b a b", "--max-new-tokens", "13", "--rounds", "2"]


@pytest.fixture(autouse=True)
def small_bandwidth(monkeypatch: pytest.MonkeyPatch):
    """Reads a mebibyte, not a gibibyte."""
    monkeypatch.setattr(step_cost, "BANDWIDTH_BYTES", 2**20)


def run(capsys, *flags: str) -> dict:
    """Runs the command with ``--json``, and returns what it printed."""
    assert bench.main([*FLAGS, "--json", *flags]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def refused(capsys, *flags: str) -> str:
    """Runs the command, and returns its one line on standard error."""
    try:
        status = bench.main(flags)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("jdecode.bench: error: ") and err.count("\n") == 1
    return err.removeprefix("jdecode.bench: error: ")


def test_target_as_its_own_draft_is_accepted_everywhere(tmp_path: pathlib.Path, capsys):
    plot = tmp_path / "speed.png"
    plot.write_bytes(b"an older picture")
    report = run(capsys, "--draft", TINY_GGUF, "--num-draft-tokens", "2, 1,2", "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert (report["target"], report["draft"], report["verify"]) == (TINY_GGUF, TINY_GGUF, "rejection")
    assert (report["new_tokens"], report["rounds"], report["seed"]) == (13, 2, 0)
    assert report["sampling"]["temperature"] == 0.0
    assert report["operations_ratio"] == 1.0
    plain = report["plain"]
    assert plain["step_seconds"] > 0 and plain["bandwidth_bytes_per_second"] > 0 and plain["bandwidth_share"] > 0
    assert report["cost_ratio"] == report["draft_seconds"] / plain["step_seconds"]
    assert [block["num_draft_tokens"] for block in report["blocks"]] == [1, 2]
    for gamma, block in enumerate(report["blocks"], start=1):
        # 12 tokens after the first, in rounds of γ + 1, twice.
        assert block["target_calls"] == 2 * 12 // (gamma + 1)
        assert block["tokens_a_round"] == gamma + 1 == block["expected_tokens"] == block["expected_tokens_by_place"]
        assert block["acceptance_rate"] == 1.0 and block["acceptance_by_place"] == [1.0] * gamma
        assert block["drafted"] == block["tested"] == block["accepted"] == gamma * block["target_calls"]
        assert block["proposing"] == 1.0
        # γ draft steps as costly as the target's, and its block, for γ + 1 tokens.
        assert block["operations_factor"] == pytest.approx((2 * gamma + 1) / (gamma + 1))
        c, v = report["cost_ratio"], block["block_cost"]
        assert c > 0 and v > 0
        gains = block["speed_up"]
        assert gains["measured"] == block["tokens_per_second"] / plain["tokens_per_second"]
        assert gains["predicted"] == pytest.approx((gamma + 1) / (gamma * c + v))
        assert gains["predicted_by_place"] == pytest.approx(gains["predicted"])
        assert gains["leviathan"] == pytest.approx((gamma + 1) / (gamma * c + 1))
        assert block["other_cost"] == pytest.approx((gamma + 1) / gains["measured"] - gamma * c - v)
    for way in [plain, *report["blocks"], report["adaptive"]]:
        first, second = way["tokens_per_second_by_round"]
        assert way["tokens_per_second"] == pytest.approx((first + second) / 2)
    assert report["adaptive"]["num_draft_tokens"] == 2
    for name in ("measured", "predicted", "predicted_by_place", "leviathan"):
        gains = {0: 1.0, **{block["num_draft_tokens"]: block["speed_up"][name] for block in report["blocks"]}}
        assert gains[report["best"][name]] == max(gains.values())


def test_look_up_costs_a_round_and_counts_the_rounds_in_which_it_proposes(capsys):
    flags = ["--draft", "ngram", "--num-draft-tokens", "3", "--verify", "coupled", "--temperature", "2", "--seed", "5"]
    report = run(capsys, *flags)
    (block,) = report["blocks"]
    assert (report["verify"], report["seed"]) == ("coupled", 5)
    assert report["operations_ratio"] == 0.0
    assert block["draft_cost"] == report["cost_ratio"]
    assert 0 < block["proposing"] <= 1 and block["tested"] <= block["drafted"]
    assert block["acceptance_rate"] == block["accepted"] / block["tested"]
    # Every call emits a token of the target's own, and what was accepted.
    assert block["tokens_a_round"] == pytest.approx(1 + block["accepted"] / block["target_calls"])
    share, tokens = block["proposing"], block["expected_tokens"]
    time = report["cost_ratio"] + share * block["block_cost"] + 1 - share
    assert block["speed_up"]["predicted"] == pytest.approx((share * tokens + 1 - share) / time)
    assert block["speed_up"]["leviathan"] == pytest.approx((share * tokens + 1 - share) / (report["cost_ratio"] + 1))
    assert block["operations_factor"] == pytest.approx((3 * share + 1) / (share * tokens + 1 - share))


def test_table_for_people(capsys):
    assert bench.main([*FLAGS, "--draft", "layer_skip", "--num-draft-tokens", "2"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == "" and lines[0] == f"{TINY_GGUF} with the draft layer_skip, rejection, temperature 0, seed 0"
    assert lines[1].endswith("13 new ones, median of 2 rounds")
    assert lines[2].startswith("plain decoding ") and "a draft step costs c = " in lines[2]
    assert lines[4].split()[:2] == ["γ", "tokens/s"]
    assert [line.split()[0] for line in lines[5:7]] == ["2", "≤"]
    assert any(line.startswith("best γ: ") for line in lines)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--weights", "w", "--draft", "ngram"], "nothing to measure: expected --speculative"),
        (["--speculative", "--draft", "ngram"], "no model: expected --config or --weights"),
        (["--speculative", "--weights", "w", "--prompt", "a"], "--draft: expected ngram, layer_skip or the weights"),
        ([*FLAGS, "--draft", "none"], "--draft: expected ngram, layer_skip or the weights"),
        ([*FLAGS, "--draft", ""], "argument --draft: expected some text"),
        ([*FLAGS, "--draft", "no such draft"], "--draft: "),
        ([*FLAGS, "--draft", "ngram", "--num-draft-tokens", "1,0"], "argument --num-draft-tokens: expected numbers"),
        ([*FLAGS, "--draft", "ngram", "--num-draft-tokens", "65"], "argument --num-draft-tokens: expected numbers"),
        ([*FLAGS, "--draft", "ngram", "--num-draft-tokens", ""], "argument --num-draft-tokens: expected numbers"),
        ([*FLAGS, "--draft", "ngram", "--verify", "hope"], "argument --verify: invalid choice"),
        ([*FLAGS, "--draft", "ngram", "--rounds", "0"], "argument --rounds: expected a whole number from 1"),
        ([*FLAGS, "--draft", "ngram", "--max-new-tokens", "1"], "--max-new-tokens: expected at least 2, got 1"),
        ([*FLAGS, "--draft", "ngram", "--capacity", "9"], "capacity: expected at least "),
        (["--speculative", "--weights", "w", "--draft", "ngram"], "no prompt: give --prompt or --prompt-file"),
        ([*FLAGS[:3], "--prompt-file", "absent", "--draft", "ngram"], "absent: No such file"),
    ],
)
def test_mistake_is_one_line(flags: list[str], message: str, capsys):
    assert refused(capsys, *flags).startswith(message)


def test_other_tokens_are_refused(capsys):
    assert "draft" in refused(capsys, *FLAGS, "--draft", "gqa_draft")


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch):
    """Nothing may be loaded: a mistake is found before."""
    monkeypatch.setattr(command_line, "load_model", lambda chosen: pytest.fail("loaded"))


def test_plot_that_cannot_be_written_is_refused_before_anything_is_loaded(no_model, tmp_path: pathlib.Path, capsys):
    plot = [*FLAGS, "--draft", "ngram", "--plot"]
    (tmp_path / "folder.png").mkdir()
    assert "expected a file, got a folder" in refused(capsys, *plot, str(tmp_path / "folder.png"))
    assert "expected a name that ends in .png" in refused(capsys, *plot, str(tmp_path / "speed.svg"))
    assert "expected a folder" in refused(capsys, *plot, str(tmp_path / "absent" / "speed.png"))
    (tmp_path / "file").write_text("x")
    refused(capsys, *plot, str(tmp_path / "file" / "speed.png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.png"]


def test_plot_without_matplotlib_names_the_extra(no_model, tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(capsys, *FLAGS, "--draft", "ngram", "--plot", str(tmp_path / "speed.png"))
    assert "matplotlib" in message and "jdecode[plot]" in message
    assert not list(tmp_path.iterdir())


def test_mistake_after_a_good_plot_leaves_no_file(tmp_path: pathlib.Path, capsys):
    refused(capsys, *FLAGS, "--draft", "no such draft", "--plot", str(tmp_path / "speed.png"))
    assert not list(tmp_path.iterdir())
