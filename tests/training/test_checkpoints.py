"""Checkpoints: what goes in comes out, bit for bit, and half a checkpoint is none."""

import dataclasses
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode.training import checkpoints, loop, train_state
from tests.training import tiny_run

MODEL = tiny_run.task().model


@pytest.fixture(scope="module")
def state() -> train_state.TrainState:
    """Nothing in it is what a fresh state holds; some of it is no plain number."""
    fresh = train_state.init_state(MODEL, tiny_run.CONFIG)
    rng = np.random.default_rng(4)

    def draw(leaf: jax.Array) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jnp.floating):
            array = rng.normal(size=leaf.shape).astype(np.float32)
            array.reshape(-1)[0] = 1e-42 if array.size % 2 else -0.0  # subnormal numbers and signs of zero count
            return jnp.asarray(array)
        return jnp.asarray(rng.integers(100, 1000, size=leaf.shape), leaf.dtype)

    return dataclasses.replace(
        fresh,
        params=jax.tree.map(draw, fresh.params),
        opt_state=jax.tree.map(draw, fresh.opt_state),
        step=jnp.int32(4),
        num_sequences=jnp.int32(24),
    )


def at(state: train_state.TrainState, step: int) -> train_state.TrainState:
    return dataclasses.replace(state, step=jnp.int32(step))


RECORD = {"history": [{"step": 4, "loss": 0.1 + 0.2, "rate": 1e-30}], "held_out": [], "start": {"weights": None}}


def test_all_of_a_state_comes_back(state, tmp_path):
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step is None
        kept.save(state, RECORD)
    other = train_state.init_state(MODEL, dataclasses.replace(tiny_run.CONFIG, seed=77))
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step == 4
        got = kept.restore(other)
        assert kept.read_record() == RECORD
    tiny_run.assert_equal(got, state)
    negative = jax.tree.map(lambda leaf: np.signbit(leaf).sum(), got.params)
    assert negative == jax.tree.map(lambda leaf: np.signbit(leaf).sum(), state.params)
    # The same draws follow from the key.
    np.testing.assert_array_equal(jax.random.bits(got.key, (3,)), jax.random.bits(state.key, (3,)))


def test_the_latest_two_are_kept(state, tmp_path):
    with checkpoints.Checkpoints(tmp_path) as kept:
        for step in (2, 9, 10):
            kept.save(at(state, step), {"step": step})
        assert kept.latest_step == 10  # as a number: not the last by name
        assert kept.read_record() == {"step": 10}
        assert int(kept.restore(state).step) == 10
    assert sorted(path.name for path in (tmp_path / checkpoints.FOLDER).iterdir()) == ["10", "9"]


def test_half_a_checkpoint_is_none(state, tmp_path):
    """A process that is killed leaves a folder under another name, with some of the files."""
    with checkpoints.Checkpoints(tmp_path) as kept:
        kept.save(state, RECORD)
    folder = tmp_path / checkpoints.FOLDER
    shutil.copytree(folder / "4", folder / "6.orbax-checkpoint-tmp")
    shutil.rmtree(folder / "6.orbax-checkpoint-tmp" / "state" / "d")
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step == 4
        tiny_run.assert_equal(kept.restore(state), state)
        kept.save(at(state, 6), {"step": 6})  # and is in nobody's way
        assert kept.read_record() == {"step": 6}


def test_a_write_that_fails_leaves_the_one_before(state, tmp_path, monkeypatch: pytest.MonkeyPatch):
    with checkpoints.Checkpoints(tmp_path) as kept:
        kept.save(state, RECORD)
    rename = os.rename

    def fail(path, target, **options):
        if pathlib.Path(target).name == "6":
            raise OSError(28, "No space left on device")
        return rename(path, target, **options)

    with monkeypatch.context() as patch, checkpoints.Checkpoints(tmp_path) as kept:
        patch.setattr(os, "rename", fail)
        with pytest.raises(ValueError, match=r"expected to write a checkpoint, .*No space left on device; make room"):
            kept.save(at(state, 6), {"step": 6})
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step == 4
        assert kept.read_record() == RECORD


def test_a_damaged_checkpoint_is_one_line_and_the_one_before_is_still_there(state, tmp_path):
    with checkpoints.Checkpoints(tmp_path) as kept:
        kept.save(at(state, 2), RECORD)
        kept.save(at(state, 4), RECORD)
        path = tmp_path / checkpoints.FOLDER / "4"
        record = path / "record" / "metadata"
        record.write_bytes(record.read_bytes()[:30])
        with pytest.raises(ValueError) as refused:
            kept.read_record()
    message = str(refused.value)
    assert message.startswith(f"{path}: expected a whole checkpoint, got: ") and "\n" not in message
    assert message.endswith("; it is damaged: remove it, and the one before is resumed from")
    record.write_text("[1]")
    with (
        checkpoints.Checkpoints(tmp_path) as kept,
        pytest.raises(ValueError, match=r"/4: expected a record that is an object, got list; it is damaged: "),
    ):
        kept.read_record()
    shutil.rmtree(path)
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step == 2 and kept.read_record() == RECORD


def test_a_file_is_no_folder_of_a_run(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file: expected a folder, got a file; give another name$"):
        loop.check_folder(tmp_path / "file", resume=False)
