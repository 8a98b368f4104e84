"""What a finished run leaves: a folder that ``jdecode.load`` reads, and whose loss is the one that the record gives."""

import json
import pathlib
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdecode
from jdecode.training import export, held_out, model_card, record
from jdecode.training import task as task_lib
from jdecode.weights import safetensors_save
from tests import tiny_models
from tests.training import tiny_run

COMMAND = "python -m jdecode.train --config tiny.yaml --output run"
LOSSES = {
    "history": [{"step": 7, "tokens": 462, "loss": 4.5}],
    "held_out": [{"step": 7, "tokens": 462, "nats_a_token": 4.25, "bits_per_byte": 2.0}],
}
TOLERANCE = 5e-5
"""Of a mean loss in nats; see ``tests/training/test_held_out.py``."""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    """A model of random weights, of which each one matters, written in bfloat16."""
    folder = tmp_path_factory.mktemp("run")
    old = folder / export.MODEL_FOLDER
    old.mkdir()
    (old / "model-00001-of-00002.safetensors").write_text("of a run before")
    task = tiny_run.task(weight_dtype="bfloat16")
    params = {"params": tiny_models.random_params(tiny_run.ARCHITECTURE)}
    complete = export.export(task, params, {**task.facts, **LOSSES}, folder, COMMAND)
    return types.SimpleNamespace(folder=folder, task=task, params=params, record=complete)


def test_the_folder_holds_the_new_model_alone(written):
    assert [path.name for path in written.folder.iterdir()] == [export.MODEL_FOLDER]
    expected = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json"}
    names = {path.name for path in (written.folder / export.MODEL_FOLDER).iterdir()}
    assert names - {record.PLOT_NAME} == expected | {record.RECORD_NAME, model_card.NAME}


def test_the_loaded_weights_are_the_rounded_ones(written):
    lm = jdecode.load(written.folder / export.MODEL_FOLDER, dtype="float32")
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), written.params)
    tiny_run.assert_equal(lm.params, rounded)
    assert tiny_run.max_difference(rounded, written.params) > 1e-4  # rounding is seen at all
    assert lm.config == tiny_run.ARCHITECTURE
    assert lm.end_token_ids == (0,)
    assert lm.tokenizer is not None
    text = tiny_run.text(99, 20)
    assert lm.encode(text) == tiny_run.tokenizer().encode(text)


def test_the_library_s_own_score_gives_the_final_loss(written):
    lm = jdecode.load(written.folder / export.MODEL_FOLDER, dtype="float32")
    loss = held_out.evaluate_by(lm.score, written.task.judged, written.task.token_num_bytes)
    final = written.record["final"]
    assert (loss.num_tokens, loss.num_bytes) == (final["num_tokens"], final["num_bytes"])
    np.testing.assert_allclose(loss.nats_a_token, final["nats_a_token"], rtol=0, atol=TOLERANCE)
    # Bits a byte by hand, and all held-out text counted.
    corpus = written.record["corpus"]
    assert (final["num_tokens"], final["num_bytes"]) == (corpus["held_out_tokens"], corpus["held_out_bytes"])
    bits = final["nats_a_token"] * corpus["held_out_tokens"] / 0.69314718056 / corpus["held_out_bytes"]
    np.testing.assert_allclose(final["bits_per_byte"], bits, rtol=1e-9)
    np.testing.assert_allclose(final["perplexity"], np.exp(final["nats_a_token"]), rtol=1e-9)
    # The weights as they were before rounding would give another one.
    exact = held_out.evaluate(written.task.model, written.params, written.task.judged, written.task.token_num_bytes)
    assert abs(exact.nats_a_token - final["nats_a_token"]) > 2 * TOLERANCE


def test_the_record_and_the_card(written):
    folder = written.folder / export.MODEL_FOLDER
    assert json.loads((folder / record.RECORD_NAME).read_text()) == written.record
    assert (folder / model_card.NAME).read_text() == model_card.text(written.record)
    assert written.record["command"] == COMMAND
    assert written.record["history"] == LOSSES["history"]
    assert written.record["final"]["weight_dtype"] == "bfloat16"
    # V D + 2 layers of (D N H + 2 D K H + N H D + 3 D F + 2 D) + D, of sizes 290, 12, 4 * 6, 2 * 6, 20.
    layer = 12 * 24 + 2 * 12 * 12 + 24 * 12 + 3 * 12 * 20 + 2 * 12
    assert written.record["final"]["num_parameters"] == 290 * 12 + 2 * layer + 12
    assert (folder / record.PLOT_NAME).is_file() == bool(pytest.importorskip("matplotlib"))


def test_a_model_half_written_is_not_taken_for_one(written, tmp_path, monkeypatch: pytest.MonkeyPatch):
    def fail(folder: pathlib.Path, *arguments, **options) -> None:
        del arguments, options
        (folder / "model.safetensors").write_text("half")
        raise OSError(28, "No space left on device")

    losses = {**written.task.facts, **LOSSES}
    with monkeypatch.context() as patch:
        patch.setattr(safetensors_save, "save_hugging_face", fail)
        with pytest.raises(OSError, match="No space left"):
            export.export(written.task, written.params, losses, tmp_path, COMMAND)
    assert not (tmp_path / export.MODEL_FOLDER).exists()
    assert export.export(written.task, written.params, losses, tmp_path, COMMAND) == written.record
    assert [path.name for path in tmp_path.iterdir()] == [export.MODEL_FOLDER]


def test_every_dtype_is_written(written, tmp_path):
    import dataclasses

    task = written.task
    for dtype in ("float32", "float16"):
        other = dataclasses.replace(task, config=dataclasses.replace(task.config, weight_dtype=dtype))
        assert isinstance(other, task_lib.Task)
        complete = export.export(other, written.params, {**task.facts, **LOSSES}, tmp_path, COMMAND)
        assert complete["final"]["weight_dtype"] == dtype
        lm = jdecode.load(tmp_path / export.MODEL_FOLDER, dtype=dtype)
        tiny_run.assert_equal(lm.params, jax.tree.map(lambda leaf, kind=dtype: leaf.astype(kind), written.params))
