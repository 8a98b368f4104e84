"""``python -m jdecode.convert``: nothing is lost on the way, reports say what was measured, failures leave nothing."""

import dataclasses
import json
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jdecode
from jdecode import convert
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import loop
from jdecode.weights import checkpoint, head_pooling, load, orbax_save, parameter_tree, safetensors_save
from tests import tiny_mha

GOLDEN = pathlib.Path(__file__).parent / "golden"
GGUF = GOLDEN / "gguf" / "llama_gqa.f32.gguf"


def converted(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict:
    """Runs the command with ``--json``; returns the report."""
    capsys.readouterr()
    assert convert.main([*map(str, arguments), "--json"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    report = json.loads(out)
    assert json.loads((pathlib.Path(str(arguments[1])) / "conversion.json").read_text()) == report
    return report


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """Runs the command; returns its one line on standard error."""
    capsys.readouterr()
    try:
        status = convert.main([*map(str, arguments)])
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("jdecode.convert: error: ") and err.count("\n") == 1 and err.endswith("\n")
    return err.removeprefix("jdecode.convert: error: ").rstrip("\n")


def same_bits(one, other) -> bool:
    left, right = parameter_tree.flat(one), parameter_tree.flat(other)
    return set(left) == set(right) and all(
        left[path].dtype == right[path].dtype and np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes()
        for path in left
    )


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A folder with a multi-head ``model`` in bfloat16 and a ``corpus``."""
    folder = tmp_path_factory.mktemp("mha")
    tiny_mha.write_files(folder / "corpus")
    tiny_mha.write_model(folder / "model", "bfloat16")
    return folder


SOURCES = {
    "gguf": (GGUF, "float32"),
    "mixed and quantised gguf": (GOLDEN / "gguf" / "llama_gqa.f16_q8.gguf", "float32"),
    "bfloat16": (GOLDEN / "tiny" / "llama_bf16", "bfloat16"),
    "rings": (GOLDEN / "tiny" / "gemma3_text", "float32"),
    "shards": (GOLDEN / "tiny" / "llama_sharded", "float32"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_to_orbax_and_back_loses_nothing(tmp_path, capsys, name):
    source, dtype = SOURCES[name]
    first = converted(capsys, source, tmp_path / "orbax", "--format", "orbax")
    second = converted(capsys, tmp_path / "orbax", tmp_path / "folder")
    assert [(report["format"], report["dtype"]) for report in (first, second)] == [
        ("orbax", dtype),
        ("safetensors", dtype),
    ]
    expected = load.load_weights(source, dtype=dtype)
    for folder in ("orbax", "folder"):
        got = load.load_weights(tmp_path / folder, dtype=dtype)
        assert same_bits(got.params, expected.params)
        assert got.config == expected.config
        assert got.eos_token_ids == expected.eos_token_ids
        assert got.bos_token_id == expected.bos_token_id
        assert got.generation_defaults == expected.generation_defaults
        assert (got.tokenizer is None) == (expected.tokenizer is None)
    sizes = [leaf.size for leaf in jax.tree.leaves(expected.params)]
    assert first["num_parameters"] == sum(sizes)
    assert first["weight_bytes"] == sum(sizes) * (2 if dtype == "bfloat16" else 4)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "orbax"]  # no remains


def test_token_ids_that_only_the_configuration_names(tmp_path, capsys):
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa")
    ids = {"eos_token_ids": (3, 5), "bos_token_id": 4}
    safetensors_save.save_hugging_face(tmp_path / "source", loaded.params, loaded.config, **ids)
    converted(capsys, tmp_path / "source", tmp_path / "m", "--format", "orbax")
    got = load.load_weights(tmp_path / "m")
    assert (got.eos_token_ids, got.bos_token_id, got.generation_defaults) == ((3, 5), 4, {})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_dtype(tmp_path, capsys, dtype):
    source = GOLDEN / "tiny" / "llama_bf16"
    assert converted(capsys, source, tmp_path / "m", "--dtype", dtype)["dtype"] == dtype
    exact = load.load_weights(source).params
    numpy_dtype = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16, "float16": np.float16}[dtype]
    got = load.load_weights(tmp_path / "m", dtype=dtype).params
    assert same_bits(got, jax.tree.map(lambda leaf: np.asarray(leaf).astype(numpy_dtype), exact))
    assert json.loads((tmp_path / "m" / "config.json").read_text())["torch_dtype"] == dtype


def test_tokenizer_files_of_a_folder_are_copied_as_they_are(tmp_path, capsys, workplace):
    shutil.copytree(workplace / "model", tmp_path / "source")
    extras = {
        "special_tokens_map.json": '{"eos_token":   "<|endoftext|>"}',
        "chat_template.jinja": "{{ messages }}",
        "merges.txt": "a b\n",
    }
    for name, content in extras.items():
        (tmp_path / "source" / name).write_text(content)
    (tmp_path / "source" / "README.md").write_text("not the tokenizer's")
    converted(capsys, tmp_path / "source", tmp_path / "m", "--format", "orbax")
    names = {"tokenizer.json", "tokenizer_config.json", *extras}
    for name in names:
        assert (tmp_path / "m" / name).read_bytes() == (tmp_path / "source" / name).read_bytes()
    others = {"config.json", "generation_config.json", "conversion.json", "params"}
    assert {path.name for path in (tmp_path / "m").iterdir()} == names | others
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {"top_p": 0.75}
    assert load.load_weights(tmp_path / "m").eos_token_ids == (0, 7)


def test_tokenizer_of_a_gguf_is_written(tmp_path, capsys):
    converted(capsys, GGUF, tmp_path / "m")
    got, expected = tokenizer_lib.from_folder(tmp_path / "m"), load.load_weights(GGUF).tokenizer
    assert expected is not None
    assert got.encode("The rest <s> né") == expected.encode("The rest <s> né")
    assert (got.bos_token_id, got.eos_token_ids) == (1, (2,))


def test_line_for_people(tmp_path, capsys):
    assert convert.main([str(GGUF), str(tmp_path / "m")]) == 0
    # counted from the shapes: 288 x 64 + 3 x (2 x 64 + 96 x 64 x 2 + 24 x 64 x 2 + 3 x 112 x 64) + 64 + 288 x 64
    written = "safetensors, float32, 120,256 parameters, 481,024 bytes\n"
    assert capsys.readouterr() == (f"{tmp_path / 'm'}: {written}", "")


def test_pooled_without_training(tmp_path, capsys, workplace):
    source = workplace / "model"
    flags = ("--kv-heads", "1", "--up-train", "0", "--corpus", workplace / "corpus", "--suffix", ".txt")
    report = converted(capsys, source, tmp_path / "m", *flags)
    loaded = load.load_weights(source)
    pooled, model = head_pooling.pool_kv_heads(loaded.params, loaded.config, 1)
    got = load.load_weights(tmp_path / "m", dtype="bfloat16")
    assert got.config == model and model.num_kv_heads == 1
    assert same_bits(got.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), pooled))
    assert got.tokenizer is not None and got.eos_token_ids == (0, 7)
    assert (report["dtype"], report["kv_heads"], report["up_training"]) == ("bfloat16", {"before": 4, "after": 1}, None)
    assert report["losses"]["up_trained"] is None
    assert report["judged"]["corpus"]["held_out_files"] == 2
    # keys and values, 6 numbers of 2 bytes, 2 layers
    assert report["cache"]["bytes_a_token"] == {"before": 2 * 4 * 6 * 2 * 2, "after": 2 * 6 * 2 * 2}


def test_table_for_people_and_training(tmp_path, capsys, workplace):
    arguments = [workplace / "model", tmp_path / "m", "--kv-heads", 1, "--up-train", 3, "--learning-rate", 0.01]
    arguments += ["--corpus", workplace / "corpus", "--suffix", ".txt", "--seed", 4, "--dtype", "float32"]
    assert convert.main([*map(str, arguments)]) == 0
    out, err = capsys.readouterr()
    report = json.loads((tmp_path / "m" / "conversion.json").read_text())
    losses, trained = report["losses"], report["up_training"]
    numbers = [[f"{value:.4f}" for value in loss.values()] for loss in losses.values()]
    lines = [line.split("  ") for line in out.splitlines()]
    table = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    assert table[:4] == [
        ["held out", "nats a token", "perplexity", "bits a byte"],
        ["before, 4 key/value heads", *numbers[0]],
        ["pooled to 1", *numbers[1]],
        ["after 3 steps", *numbers[2]],
    ]
    # Numbers of 4 bytes; slots: a ring of 4, and 20, each with a position of 4 bytes, and one length.
    assert out.splitlines()[4] == (
        "cache, float32: 384 bytes a token before, 96 after; a row of 20 tokens "
        f"{24 * 2 * 4 * 6 * 4 + 25 * 4:,} bytes before, {24 * 2 * 6 * 4 + 25 * 4:,} after"
    )
    assert err.splitlines() == [
        f"{stage}: {losses[key]['nats_a_token']:.4f} nats a token"
        for stage, key in (("before", "before"), ("pooled", "pooled"), ("up-trained", "up_trained"))
    ]
    assert (trained["steps"], trained["seed"], trained["learning_rate"]) == (3, 4, 0.01)
    assert losses["up_trained"]["nats_a_token"] < losses["pooled"]["nats_a_token"]
    assert load.load_weights(tmp_path / "m").config == head_pooling.pooled_config(tiny_mha.MODEL, 1)
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_how_the_pooled_model_is_trained(tmp_path, capsys, workplace, monkeypatch: pytest.MonkeyPatch):
    """A tenth of the steps warms up, the cosine ends at a tenth of the rate, and no weight decays."""
    seen, fit = [], loop.fit
    monkeypatch.setattr(loop, "fit", lambda task, *rest, **named: seen.append(task) or fit(task, *rest, **named))
    arguments = [workplace / "model", tmp_path / "m", "--kv-heads", 1, "--up-train", 20, "--learning-rate", 0.01]
    assert convert.main([*map(str, arguments), "--corpus", str(workplace / "corpus"), "--suffix", ".txt"]) == 0
    history = json.loads((tmp_path / "m" / "conversion.json").read_text())["up_training"]["history"]
    # Steps 9 and 19, counted from 0, of 2 to warm up and 18 to fall: cos(7 pi / 18) = 0.3420 and
    # cos(17 pi / 18) = -0.9848, in 0.01 (0.1 + 0.9 (1 + cos) / 2):
    np.testing.assert_allclose([entry["learning_rate"] for entry in history], [0.0070391, 0.00106837], rtol=1e-4)
    assert [task.config.optimizer.weight_decay for task in seen] == [0.0]


BAD = {
    "--up-train 3": "--up-train: expected --kv-heads beside it, got none; only pooled models are trained",
    "--corpus C": "--corpus: expected --kv-heads beside it, got none; only pooled models are trained",
    "--suffix .txt": "--suffix: expected --kv-heads beside it, got none; only pooled models are trained",
    "--seed 0": "--seed: expected --kv-heads beside it, got none; only pooled models are trained",
    "--kv-heads 2 --up-train 0 --seed 0": "--seed: expected steps of --up-train, got 0; leave one of them out",
    "--kv-heads 2 --learning-rate 0": "learning_rate: expected a finite number over 0, got 0.0",
    "--kv-heads 2 --corpus nowhere": "corpus: expected standard_library or a folder, got 'nowhere'",
    "--kv-heads 2 --suffix txt": "corpus suffixes: expected suffixes such as .txt, got 'txt'",
    "--kv-heads 3": "num_kv_heads: expected a divisor of the model's 4 key/value heads (1, 2, 4), got 3",
    "--kv-heads 0": "argument --kv-heads: expected a whole number from 1 to 2147483647, got '0'",
    "--dtype int8": "argument --dtype: expected one of auto, float32, bfloat16, float16, got 'int8'",
    "--format gguf": "argument --format: invalid choice: 'gguf' (choose from",
}


@pytest.mark.parametrize("flags", BAD)
def test_flags_that_cannot_act_are_refused(tmp_path, capsys, workplace, flags):
    assert BAD[flags] in refused(capsys, workplace / "model", tmp_path / "out", *flags.split())
    assert list(tmp_path.iterdir()) == []


def test_source_without_a_tokenizer_cannot_be_judged(tmp_path, capsys):
    message = refused(capsys, GOLDEN / "tiny" / "llama_mha", tmp_path / "out", "--kv-heads", "1")
    assert message.startswith("--kv-heads: expected weights with a tokenizer, which reads the corpus, got ")
    assert list(tmp_path.iterdir()) == []


def test_output_must_be_new(tmp_path, capsys, workplace):
    source = shutil.copytree(workplace / "model", tmp_path / "source")
    before = sorted(tmp_path.rglob("*"))
    assert "expected a folder outside the source" in refused(capsys, source, source)
    assert "expected a folder outside the source" in refused(capsys, source, f"{source}/../source/")
    assert "expected a folder outside the source" in refused(capsys, source, source / "params")
    assert "expected a new folder, got a file" in refused(capsys, source, source / "config.json")
    assert sorted(tmp_path.rglob("*")) == before
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "model.safetensors").write_text("old")
    message = refused(capsys, source, tmp_path / "other")
    assert "expected a new or an empty folder, got one that holds 'model.safetensors'; give another" in message
    assert [path.name for path in (tmp_path / "other").iterdir()] == ["model.safetensors"]
    (tmp_path / "empty").mkdir()
    converted(capsys, source, tmp_path / "empty")
    converted(capsys, source, tmp_path / "deep" / "er")


def test_output_must_not_become_part_of_the_corpus(tmp_path, capsys, workplace):
    texts = shutil.copytree(workplace / "corpus", tmp_path / "corpus")
    flags = ("--kv-heads", "1", "--up-train", "0", "--corpus", texts, "--suffix", ".txt")
    message = refused(capsys, workplace / "model", texts / "m", *flags)
    assert message == f"{texts / 'm'}: expected a folder outside the corpus {texts}; give another"
    assert not (texts / "m").exists()


def test_a_model_that_could_not_be_written_is_not_trained(tmp_path, capsys, workplace, monkeypatch: pytest.MonkeyPatch):
    """Only a GGUF says that there is a bias at one place and not at another."""
    opened = checkpoint.open_checkpoint(workplace / "model")
    other = dataclasses.replace(opened, config=dataclasses.replace(opened.config, output_bias=True))
    monkeypatch.setattr(checkpoint, "open_checkpoint", lambda source: other)
    monkeypatch.setattr(load, "load_opened", None)
    message = refused(capsys, workplace / "model", tmp_path / "m", "--kv-heads", "1")
    assert message.startswith("config: expected a model that the llama format can describe, got one whose ")


def test_missing_source(tmp_path, capsys):
    assert "expected a folder, a .gguf file" in refused(capsys, tmp_path / "nowhere.gguf", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def damaged_folder(folder: pathlib.Path) -> pathlib.Path:
    """Writes a folder that opens, and whose last parameter cannot be read."""
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa")
    flat = parameter_tree.flat(loaded.params)
    flat["final_norm/scale"] = jnp.full(64, jnp.nan)
    safetensors_save.save_hugging_face(folder, parameter_tree.nested(flat), loaded.config)
    return folder


def test_a_loss_without_a_perplexity_is_refused(tmp_path, capsys, workplace):
    source = shutil.copytree(workplace / "model", tmp_path / "source")
    loaded = load.load_weights(source, dtype="float32")
    (source / "model.safetensors").unlink()
    safetensors_save.save_hugging_face(source, jax.tree.map(lambda leaf: leaf * 1000, loaded.params), loaded.config)
    flags = ("--kv-heads", "1", "--up-train", "0", "--corpus", workplace / "corpus", "--suffix", ".txt")
    assert "before: expected a finite loss and perplexity, got " in refused(capsys, source, tmp_path / "m", *flags)
    assert not (tmp_path / "m").exists()


def test_failed_reading_leaves_nothing(tmp_path, capsys):
    source = damaged_folder(tmp_path / "source")
    assert "expected finite numbers, got NaN or infinity" in refused(capsys, source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_failed_writing_leaves_nothing(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch, error):
    save = orbax_save.save_orbax

    def fail(folder, *arguments, **options):
        save(folder, *arguments, **options)
        assert (folder / "config.json").exists()
        raise error

    monkeypatch.setattr(orbax_save, "save_orbax", fail)
    status = convert.main([str(GGUF), str(tmp_path / "out"), "--format", "orbax"])
    assert status == (130 if isinstance(error, KeyboardInterrupt) else 2)
    assert list(tmp_path.iterdir()) == []


def test_help_imports_no_jax():
    program = (
        "import sys\nfrom jdecode import convert\n"
        "try:\n    convert.main(['--help'])\nexcept SystemExit as ended:\n    assert ended.code == 0\n"
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--up-train" in done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.real_model
@pytest.mark.parametrize("form", convert.FORMATS)
def test_real_model_writes_the_same_text(tmp_path, capsys, smollm2_gguf, form):
    converted(capsys, smollm2_gguf, tmp_path / "m", "--format", form)
    messages = [{"role": "user", "content": "Name three rivers."}]
    tokens = []
    for source in (smollm2_gguf, tmp_path / "m"):
        lm = jdecode.load(source, dtype="float32")
        tokens.append(lm.generate([lm.encode_chat(messages)], max_new_tokens=24).tokens.tolist())
    assert tokens[0] == tokens[1]
