"""``python -m jdecode.evaluate``: its losses against whole logits and against training's, its table, its refusals."""

import dataclasses
import functools
import hashlib
import json
import math
import pathlib

import jax
import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdecode import command_line, config, evaluate, language_model, train
from jdecode.models import transformer
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus
from tests import tiny_models

START, END = 259, 258
CONFIG = config.ModelConfig(
    vocab_size=261,
    hidden_size=12,
    intermediate_size=20,
    num_heads=4,
    num_kv_heads=2,
    head_dim=6,
    layers=(config.LayerConfig(window=5), config.LayerConfig()),
    max_positions=14,
)
TEXTS = {"a.txt": "x = 1\n", "long.txt": "def häuser(n):\n    return n + 1\n" * 2, "c.md": "Not a text.\n"}
# Tokens beside those of bytes, so that some stand for two bytes.
PAIRS = ("re", "tu")


@functools.cache
def params():
    return tiny_models.random_params(CONFIG)


def make_tokenizer(*, adds_start: bool = False, has_end: bool = True) -> tokenizer_lib.Tokenizer:
    """Makes one of 256 bytes, two pairs, an end and a start."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: idx for idx, token in enumerate([*alphabet, *PAIRS, "<end>", "<start>"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [(pair[0], pair[1]) for pair in PAIRS]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>", "<start>"])
    return tokenizer_lib.Tokenizer(
        backend, eos_token_ids=(END,) if has_end else (), prefix_ids=(START,) if adds_start else ()
    )


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch):
    """Puts a random model in the place of the one that a command loads; returns a way to change it."""

    def use(**changes) -> language_model.LanguageModel:
        made = language_model.LanguageModel(
            config=CONFIG,
            model=transformer.Transformer(CONFIG),
            params={"params": params()},
            tokenizer=make_tokenizer(),
        )
        made = dataclasses.replace(made, **changes)
        monkeypatch.setattr(command_line, "load_model", lambda chosen: made)
        return made

    use()
    return use


@pytest.fixture
def folder(tmp_path: pathlib.Path) -> pathlib.Path:
    """Writes the texts."""
    for name, text in {**TEXTS, **{f"{idx}.txt": f"line {idx}\n" for idx in range(40)}}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    return tmp_path


def held_out(folder: pathlib.Path, share: float) -> list[str]:
    """Returns the held-out texts in the order of their names."""
    paths = sorted(folder.glob("*.txt"), key=lambda path: path.name)
    digests = [int(hashlib.sha256(path.name.encode()).hexdigest()[:16], 16) / 2**64 for path in paths]
    return [path.read_text(encoding="utf-8") for path, digest in zip(paths, digests, strict=True) if digest < share]


def expected_nats(rows: list[list[int]], sequence_len: int) -> float:
    """Sums -log p over all but the first token of rows, each from the first half-stepped window that holds it."""
    model, stride, nats = transformer.Transformer(CONFIG), sequence_len // 2, 0.0
    for row in rows:
        starts = sorted({max(math.ceil((idx - sequence_len) / stride), 0) * stride for idx in range(1, len(row))})
        windows = [row[start : start + sequence_len] for start in starts]
        logits = dict(zip(starts, tiny_models.whole(model, params(), windows, sequence_len), strict=True))
        for idx in range(1, len(row)):
            start = max(math.ceil((idx - sequence_len) / stride), 0) * stride
            scores_V = logits[start][idx - 1 - start].astype(np.float64)
            nats += float(np.log(np.exp(scores_V - scores_V.max()).sum()) + scores_V.max() - scores_V[row[idx]])
    return nats


def flags_for(folder: pathlib.Path) -> list[str]:
    """Returns the flags of every run."""
    return ["--weights", "w", "--corpus", str(folder), "--suffix", ".txt", "--held-out-share", "0.5"]


def run(folder: pathlib.Path, capsys, *flags: str) -> dict:
    """Runs the command with ``--json``, and returns what it printed."""
    assert evaluate.main([*flags_for(folder), "--json", *flags]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return json.loads(out)


@pytest.mark.parametrize(
    ("tokenizer", "starts", "ends"),
    [
        (make_tokenizer(), [END], [END]),
        (make_tokenizer(adds_start=True), [START], [END]),
        (make_tokenizer(adds_start=True, has_end=False), [START], []),
        (make_tokenizer(has_end=False), [], []),
    ],
    ids=["end", "start and end", "start", "neither"],
)
def test_loss_is_that_of_whole_logits(tokenizer, starts, ends, lm, folder: pathlib.Path, capsys):
    lm(tokenizer=tokenizer)
    texts = held_out(folder, 0.5)
    assert TEXTS["long.txt"] in texts and len(texts) > 8  # one of many windows, and more than a batch of files
    ids = [tokenizer.encode(text, add_special_tokens=False) for text in texts]
    assert max(map(max, ids)) in (256, 257)  # a pair
    rows = [[*starts, *row, *ends] for row in ids]
    model = run(folder, capsys)["model"]
    assert model["sequence_len"] == 14  # what the model was trained for
    num_tokens = sum(len(row) - 1 for row in rows)
    num_bytes = sum(len(text.encode()) for text in texts) - (0 if starts else len(texts))  # all begin with one byte
    assert (model["num_tokens"], model["num_bytes"]) == (num_tokens, num_bytes)
    nats = expected_nats(rows, 14)
    # Two orders of summation of float32 logits of about 5 (``tiny_models.LOGITS_ATOL`` each), averaged.
    assert model["nats_a_token"] == pytest.approx(nats / num_tokens, abs=2e-5)
    assert model["perplexity"] == pytest.approx(math.exp(nats / num_tokens), rel=2e-5)
    assert model["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, rel=2e-5)


def test_sequence_length_and_cache_dtype_act(lm, folder: pathlib.Path, capsys):
    ids = [[END, *make_tokenizer().encode(text), END] for text in held_out(folder, 0.5)]
    plain = run(folder, capsys)["model"]
    short = run(folder, capsys, "--sequence-len", "5")["model"]
    assert short["sequence_len"] == 5 and short["num_tokens"] == plain["num_tokens"]
    assert short["nats_a_token"] * short["num_tokens"] == pytest.approx(expected_nats(ids, 5), rel=1e-5)
    coarse = run(folder, capsys, "--kv-dtype", "bfloat16")["model"]
    assert 1e-5 < abs(coarse["nats_a_token"] / plain["nats_a_token"] - 1) < 0.05


def test_capacity_and_cache_reach_the_cache(lm, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys):
    asked = []

    def init_cache(self, **arguments):
        asked.append(arguments)
        raise ValueError("seen")

    monkeypatch.setattr(language_model.LanguageModel, "init_cache", init_cache)
    assert evaluate.main([*flags_for(folder), "--capacity", "20", "--kv-dtype", "float16"]) == 2
    assert capsys.readouterr().err == "jdecode.evaluate: error: seen\n"
    assert asked == [{"batch_size": 8, "capacity": 20, "cache": config.CacheConfig(dtype="float16")}]


def test_longest_sequence_is_1024_unless_one_is_given(lm, folder: pathlib.Path, capsys):
    lm(config=dataclasses.replace(CONFIG, max_positions=5000))
    assert run(folder, capsys)["model"]["sequence_len"] == 1024


def test_limit_judges_some_pieces(lm, folder: pathlib.Path, capsys):
    model = run(folder, capsys, "--limit-pieces", "3")["model"]
    whole = run(folder, capsys)["model"]
    assert (model["pieces"], model["pieces_in_all"]) == (3, whole["pieces"])
    assert 3 < model["num_tokens"] < whole["num_tokens"]


def test_baselines_stand_beside_the_model(lm, folder: pathlib.Path, capsys):
    texts = held_out(folder, 0.5)
    result = run(folder, capsys, "--baselines")
    names = [entry["name"] for entry in result["baselines"]]
    assert names == ["xz -9e", "xz -9e after the training files", "order-3 byte counts of the training files"]
    alone, after, counts = (entry["bits_per_byte"] for entry in result["baselines"])
    assert after < alone  # "line" stands in the training files
    assert 0 < counts < 8
    num_bytes = sum(len(text.encode()) for text in texts)
    assert (result["corpus"]["held_out_files"], result["corpus"]["held_out_bytes"]) == (len(texts), num_bytes)
    assert {entry["num_bytes"] for entry in result["baselines"]} == {num_bytes}
    assert evaluate.main([*flags_for(folder), "--baselines"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"{len(texts)} held-out files of {folder}, {num_bytes} bytes"
    assert lines[2].split() == ["bits", "a", "byte"]
    model = result["model"]
    assert lines[3].startswith("w  ") and lines[3].endswith(
        f"  {model['bits_per_byte']:.4f}  {model['nats_a_token']:.4f} nats a token, perplexity "
        f"{model['perplexity']:.2f}, {model['num_tokens']:,} tokens in sequences of 14"
    )
    assert [line.rsplit(maxsplit=1) for line in lines[4:]] == [
        [name, f"{entry['bits_per_byte']:.4f}"] for name, entry in zip(names, result["baselines"], strict=True)
    ]


def test_loss_of_a_trained_model_is_the_one_of_its_training(folder: pathlib.Path, tmp_path_factory, capsys):
    output = tmp_path_factory.mktemp("run")
    (output / "tiny.yaml").write_text(
        """
architecture:
  vocab_size: 290
  hidden_size: 12
  intermediate_size: 20
  num_heads: 4
  num_kv_heads: 2
  head_dim: 6
  layers: {count: 2, pattern: [{window: 5}, {}]}
  max_positions: 14
corpus: {suffixes: [.txt], held_out_share: 0.5}
optimizer: {warmup_steps: 1, learning_rate: 0.01}
sequence_len: 14
batch_size: 2
num_steps: 3
""",
        encoding="utf-8",
    )
    arguments = ["--config", str(output / "tiny.yaml"), "--output", str(output / "out"), "--corpus", str(folder)]
    assert train.main(arguments) == 0
    capsys.readouterr()
    final = json.loads((output / "out" / "model" / "training.json").read_text())["final"]
    assert final["weight_dtype"] == "bfloat16"
    model = run(folder, capsys, "--weights", str(output / "out" / "model"))["model"]
    assert (model["num_tokens"], model["num_bytes"]) == (final["num_tokens"], final["num_bytes"])
    for name in ("nats_a_token", "perplexity", "bits_per_byte"):
        assert model[name] == pytest.approx(final[name], rel=1e-5)
    over_devices = run(folder, capsys, "--weights", str(output / "out" / "model"), "--mesh", "data=2,model=2")
    assert over_devices["model"]["nats_a_token"] == pytest.approx(final["nats_a_token"], rel=1e-5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--limit-pieces", "3", "--baselines"], "--limit-pieces: the baselines judge whole files"),
        (["--capacity", "14"], "--capacity: expected at least 15 slots for these sequences, got 14"),
        (["--held-out-share", "1.5"], "held_out_share: expected a number over 0 and under 1, got 1.5"),
        (["--suffix", "txt"], "corpus suffixes: expected suffixes such as .txt, got 'txt'"),
        (["--corpus", "nowhere"], "corpus: expected standard_library or a folder, got 'nowhere'"),
        (["--corpus", ""], "argument --corpus: expected some text, got none"),
        (["--sequence-len", "1"], "argument --sequence-len: expected a whole number from 2"),
        (["--limit-pieces", "0"], "argument --limit-pieces: expected a whole number from 1"),
        (["--temperature", "1"], "unrecognized arguments: --temperature 1"),
    ],
)
def test_mistake_is_one_line(flags: list[str], message: str, lm, folder: pathlib.Path, capsys):
    try:
        status = evaluate.main([*flags_for(folder), *flags])
    except SystemExit as error:
        status = error.code
    assert status == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert err.startswith(f"jdecode.evaluate: error: {message}")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tokenizer": None}, "w: expected weights that come with a tokenizer, got none"),
        (
            {"config": dataclasses.replace(CONFIG, vocab_size=200)},
            "tokenizer: expected ids under the model's vocab_size 200, got ",
        ),
    ],
)
def test_model_that_cannot_be_judged_is_refused(changes, message: str, lm, folder: pathlib.Path, capsys):
    lm(**changes)
    assert evaluate.main(flags_for(folder)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"jdecode.evaluate: error: {message}") and err.count("\n") == 1


def test_files_are_read_before_the_weights(folder: pathlib.Path, capsys):
    assert evaluate.main(["--weights", "no such weights", "--corpus", str(folder), "--suffix", ".py"]) == 2
    assert capsys.readouterr().err.startswith("jdecode.evaluate: error: corpus: expected files with text")
    assert evaluate.main(["--corpus", str(folder)]) == 2
    assert capsys.readouterr().err.startswith("jdecode.evaluate: error: no model: expected --config or --weights")


def test_a_text_that_spells_a_control_token_is_a_text(lm):
    """A file that holds the end token's name is judged byte by byte."""
    document = corpus.Document("spelled.txt", "a<end>b")
    (piece,) = evaluate._cut(lm(), make_tokenizer(), [document], 14)
    assert len(piece.tokens) == 1 + len("a<end>b") + 1
    assert np.flatnonzero(piece.tokens == END).tolist() == [0, 8]


def test_a_loss_without_a_perplexity_is_refused(lm, folder: pathlib.Path, capsys):
    lm(params={"params": jax.tree.map(lambda leaf: leaf * 1000, params())})
    assert evaluate.main(flags_for(folder)) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("jdecode.evaluate: error: w: expected a finite loss and perplexity, got ")
