"""The loop: a run is the same whether it was stopped or not, and refuses what would be another run."""

import dataclasses
import json
import math
import pathlib
import re
import shutil
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers

from jdecode import config as config_lib
from jdecode.models import transformer
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import checkpoints, corpus, held_out, loop, train_config, train_state
from jdecode.training import task as task_lib
from tests import tiny_models
from tests.training import tiny_run

# Seven steps; looks after 3, 6 and 7; checkpoints after 2, 4, 6 and 7.
CONFIG = tiny_run.CONFIG
HISTORY_STEPS = [2, 3, 4, 6, 7]
LOOK_STEPS = [3, 6, 7]


def last_state(folder: pathlib.Path, task: task_lib.Task) -> train_state.TrainState:
    with checkpoints.Checkpoints(folder) as kept:
        return kept.restore(train_state.init_state(task.model, task.config))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> types.SimpleNamespace:
    """A run that nobody stopped. Tests copy its folder before they change it."""
    folder = tmp_path_factory.mktemp("finished")
    task = tiny_run.task()
    lines: list[str] = []
    params, record = loop.fit(task, folder, say=lines.append)
    state = last_state(folder, task)
    return types.SimpleNamespace(folder=folder, task=task, params=params, record=record, state=state, lines=lines)


def test_a_run_is_its_steps_one_after_another(finished):
    """Params, losses and learning rates, against the steps taken by hand."""
    task, config = finished.task, CONFIG
    state = train_state.init_state(task.model, config)
    losses, rates = [], []
    for step in range(7):
        tokens_ABT = jnp.asarray(task_lib.batch(task, state.key, 6 * step))
        state, scalars = train_state.train_step(task.objective, config.optimizer, 7, state, None, tokens_ABT)
        losses.append(float(scalars["loss"]))
        rates.append(float(scalars["learning_rate"]))
    tiny_run.assert_equal(finished.params, state.params)
    tiny_run.assert_equal(finished.state, state)
    assert losses[-1] < losses[0] - 0.1
    history = finished.record["history"]
    assert [entry["step"] for entry in history] == HISTORY_STEPS
    assert [entry["tokens"] for entry in history] == [step * 2 * 3 * 11 for step in HISTORY_STEPS]
    for entry, first in zip(history, [0, *HISTORY_STEPS], strict=False):
        np.testing.assert_allclose(entry["loss"], np.mean(losses[first : entry["step"]]), rtol=1e-7)
        assert entry["learning_rate"] == rates[entry["step"] - 1]
        assert entry.keys() == {"step", "tokens", "loss", "next_token", "gradient_norm", "learning_rate"}


def test_the_recorded_held_out_loss_is_that_of_evaluate(finished):
    task, looks = finished.task, finished.record["held_out"]
    assert [look["step"] for look in looks] == LOOK_STEPS
    assert len(task.judged) > loop.LOOK_PIECES
    some = held_out.some(task.judged, loop.LOOK_PIECES)
    loss = held_out.evaluate(task.model, finished.params, some, task.token_num_bytes)
    assert looks[-1] == {
        "step": 7,
        "tokens": 7 * 66,
        "nats_a_token": loss.nats_a_token,
        "bits_per_byte": loss.bits_per_byte,
    }
    assert looks[0]["nats_a_token"] > looks[-1]["nats_a_token"]


def test_a_line_is_said_first_and_at_every_look(finished):
    first, *lines = finished.lines
    # A step reads 3 * 2 sequences of 11 tokens.
    num_tokens = finished.task.stream.num_tokens
    assert first == f"9 files, {num_tokens} tokens to learn from; 7 steps of 66 tokens"
    assert [line.split(":")[0] for line in lines] == [f"step {step} of 7" for step in LOOK_STEPS]
    look, entry = finished.record["held_out"][-1], finished.record["history"][-1]
    assert re.fullmatch(
        rf"step 7 of 7: training loss {entry['loss']:.4f}, held out {look['nats_a_token']:.4f} nats a token, "
        rf"{look['bits_per_byte']:.4f} bits a byte \(\d+ tokens/s\)",
        finished.lines[-1],
    )


def test_facts(finished):
    files = tiny_run.files()
    facts = finished.task.facts

    def num_tokens(documents: tuple[corpus.Document, ...]) -> int:
        """Each with its end, and nothing before it."""
        texts = (document.text for document in documents)
        return sum(len(tiny_run.tokenizer().encode(text, add_special_tokens=False)) + 1 for text in texts)

    assert facts["corpus"] == {
        "description": "words",
        "sha256": files.digest,
        "train_files": 9,
        "train_bytes": sum(len(document.text.encode()) for document in files.train),
        "train_tokens": num_tokens(files.train),
        "held_out_files": 4,
        "held_out_bytes": sum(len(document.text.encode()) for document in files.held_out),
        "held_out_tokens": num_tokens(files.held_out),
    }
    assert facts["config"]["architecture"]["layers"][0]["window"] == 4
    assert facts["start"] == {"weights": None} and "teacher" not in facts
    # All held-out text counts at the end, each byte once.
    total = held_out.evaluate_by(
        lambda rows: [np.zeros(len(row) - 1) for row in rows], finished.task.judged, finished.task.token_num_bytes
    )
    assert (total.num_tokens, total.num_bytes) == (
        facts["corpus"]["held_out_tokens"],
        facts["corpus"]["held_out_bytes"],
    )


def test_another_seed_is_another_run(finished, tmp_path):
    params, record = loop.fit(tiny_run.task(seed=6), tmp_path)
    assert tiny_run.max_difference(params, finished.params) > 1e-3
    assert record["history"] != finished.record["history"]


class Stopped(BaseException):
    """What ends a run from outside."""


def stop_before_step(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    whole = train_state.train_step

    def until(objective, config, num_steps, state, *rest):
        if int(state.step) == step:
            raise Stopped
        return whole(objective, config, num_steps, state, *rest)

    monkeypatch.setattr(train_state, "train_step", until)


def assert_same_run(finished, folder: pathlib.Path, params: Any, record: dict[str, Any]) -> None:
    tiny_run.assert_equal(params, finished.params)
    assert record == finished.record
    tiny_run.assert_equal(last_state(folder, finished.task), finished.state)


# With checkpoints after 2, 4 and 6: stopped right after one, and with steps after it that are lost.
@pytest.mark.parametrize("step", [2, 3, 4, 6])
def test_stopped_before_a_step_and_resumed(finished, tmp_path, monkeypatch: pytest.MonkeyPatch, step):
    with monkeypatch.context() as patch:
        stop_before_step(patch, step)
        with pytest.raises(Stopped):
            loop.fit(tiny_run.task(), tmp_path)
    params, record = loop.fit(tiny_run.task(), tmp_path, resume=True)
    assert_same_run(finished, tmp_path, params, record)


def test_stopped_at_every_look_and_resumed_each_time(finished, tmp_path):
    """A look comes before the checkpoint of its step, so what it said is said again."""

    def interrupt(line: str) -> None:
        lines.append(line)
        if line.startswith("step"):
            raise KeyboardInterrupt

    def begun(line: str) -> None:
        if not line.startswith("step 3"):
            interrupt(line)

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        loop.fit(tiny_run.task(), tmp_path, say=interrupt)
    for say in (begun, interrupt):
        with pytest.raises(KeyboardInterrupt):
            loop.fit(tiny_run.task(), tmp_path, resume=True, say=say)
    params, record = loop.fit(tiny_run.task(), tmp_path, resume=True)
    assert_same_run(finished, tmp_path, params, record)
    assert [line.split(":")[0] for line in lines if line.startswith("step")] == [
        *("step 3 of 7", "step 6 of 7", "step 6 of 7")
    ]
    # Checkpoints are kept every second step: none yet, then those of steps 2 and 4.
    starts = [line.partition(" tokens, from ")[2] for line in lines if not line.startswith("step")]
    assert starts == ["", "step 2", "step 4"]


def test_stopped_before_the_first_checkpoint_starts_anew(finished, tmp_path, monkeypatch: pytest.MonkeyPatch):
    with monkeypatch.context() as patch:
        stop_before_step(patch, 1)
        with pytest.raises(Stopped):
            loop.fit(tiny_run.task(), tmp_path)
    with pytest.raises(
        ValueError,
        match="expected a run to resume, got no checkpoint in it; start one without --resume, in a new folder",
    ):
        loop.fit(tiny_run.task(), tmp_path, resume=True)
    assert_same_run(finished, tmp_path, *loop.fit(tiny_run.task(), tmp_path))


def test_a_finished_run_resumed_is_itself(finished, tmp_path, monkeypatch: pytest.MonkeyPatch):
    shutil.copytree(finished.folder, tmp_path / "run")
    stop_before_step(monkeypatch, 7)  # no step is taken
    params, record = loop.fit(tiny_run.task(), tmp_path / "run", resume=True)
    assert_same_run(finished, tmp_path / "run", params, record)


def test_the_record_has_an_entry_every_ten_steps(tmp_path):
    task = tiny_run.task(num_steps=12, evaluate_every=50, checkpoint_every=50)
    _, record = loop.fit(task, tmp_path)
    assert [entry["step"] for entry in record["history"]] == [10, 12]
    assert [look["step"] for look in record["held_out"]] == [12]


def test_words_may_differ_on_resuming(finished, tmp_path):
    shutil.copytree(finished.folder, tmp_path / "run")
    task = tiny_run.task(name="other", description="Other words.", limits="None known.")
    params, record = loop.fit(task, tmp_path / "run", resume=True)
    tiny_run.assert_equal(params, finished.params)
    assert record == {**finished.record, **task.facts}
    assert record["config"]["limits"] == "None known."


def refused_resume(finished, task: task_lib.Task) -> str:
    folder = finished.folder
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(ValueError) as refused:
        loop.fit(task, folder, resume=True, init_params=finished.params)
    message = str(refused.value)
    assert "\n" not in message
    start = f"{folder}: expected to resume the same run, got another "
    assert message.startswith(start) and message.endswith("; give another folder")
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    return message.removeprefix(start)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "seed": ({"seed": 6}, r"config\.seed \(6, before 5\)"),
    "num_steps": ({"num_steps": 8}, r"config\.num_steps \(8, before 7\)"),
    "batch_size": ({"batch_size": 2}, r"config\.batch_size \(2, before 3\)"),
    "evaluate_every": ({"evaluate_every": 4}, r"config\.evaluate_every \(4, before 3\)"),
    "dtype": ({"weight_dtype": "bfloat16"}, r"config\.weight_dtype \('bfloat16', before 'float32'\)"),
    "optimizer": (
        {"optimizer": train_config.OptimizerConfig(learning_rate=2e-2, warmup_steps=2)},
        r"config\.optimizer\.learning_rate \(0\.02, before 0\.01\)",
    ),
    "architecture": (
        {"architecture": dataclasses.replace(tiny_run.ARCHITECTURE, intermediate_size=21)},
        r"config\.architecture\.intermediate_size \(21, before 20\)",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_config_is_refused(finished, change):
    changes, message = CHANGES[change]
    assert re.match(message, refused_resume(finished, tiny_run.task(**changes)))


def test_another_corpus_is_refused(finished):
    files = tiny_run.files()
    held = files.held_out
    other = dataclasses.replace(files, held_out=(*held[:-1], dataclasses.replace(held[-1], name="moved.txt")))
    task = task_lib.make_task(CONFIG, other, tiny_run.tokenizer())
    message = refused_resume(finished, task)
    assert message.startswith(f"corpus.sha256 ('{other.digest}', before '{files.digest}')")


def test_another_start_or_teacher_is_refused(finished):
    task = task_lib.make_task(CONFIG, tiny_run.files(), tiny_run.tokenizer(), start="runs/before/model")
    assert refused_resume(finished, task).startswith("start.weights ('runs/before/model', before none)")
    message = refused_resume(finished, tiny_run.task(teacher()))
    assert message.startswith("teacher (one, before none)")


def test_another_weight_of_the_teacher_is_refused_and_another_name_is_not():
    """A path names a teacher; what it is are its weights."""
    one = tiny_run.task(teacher()).facts
    renamed = tiny_run.task(dataclasses.replace(teacher(), name="elsewhere")).facts
    assert task_lib.difference(one, renamed) is None
    params = jax.tree.map(jnp.copy, teacher().params)
    params["params"]["final_norm"]["scale"] = params["params"]["final_norm"]["scale"].at[3].add(1e-6)
    other = tiny_run.task(dataclasses.replace(teacher(), params=params)).facts
    assert task_lib.difference(one, other) == "teacher.sha256"
    model = dataclasses.replace(teacher().model, config=dataclasses.replace(teacher().model.config, norm_eps=1e-4))
    other = tiny_run.task(dataclasses.replace(teacher(), model=model)).facts
    assert task_lib.difference(one, other) == "teacher.sha256"


def test_another_text_of_the_teacher_is_refused():
    """Of as many tokens as the one before."""
    one = tiny_run.task(teacher(texts=WRITTEN)).facts
    assert task_lib.difference(one, tiny_run.task(teacher(texts=WRITTEN)).facts) is None
    other = tiny_run.task(teacher(texts=[WRITTEN[0] + 1, WRITTEN[1]])).facts
    assert task_lib.difference(one, other) == "teacher.text_sha256"


def test_another_tokenizer_is_refused(tmp_path):
    """The same tokens under other numbers."""
    tiny_run.tokenizer().save(tmp_path)
    path = tmp_path / "tokenizer.json"
    stored = json.loads(path.read_text())
    vocab = stored["model"]["vocab"]
    first, second = (next(token for token, idx in vocab.items() if idx == number) for number in (280, 281))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(stored))
    other = task_lib.make_task(CONFIG, tiny_run.files(), tokenizer_lib.from_folder(tmp_path))
    assert task_lib.difference(tiny_run.task().facts, other.facts) == "tokenizer.sha256"
    again = task_lib.make_task(CONFIG, tiny_run.files(), tiny_run.tokenizer())
    assert task_lib.difference(tiny_run.task().facts, again.facts) is None


def test_the_key_of_a_checkpoint_orders_the_rest(finished, tmp_path, monkeypatch: pytest.MonkeyPatch):
    """A run resumed from a checkpoint with another key reads other sequences than the one that was not stopped."""
    with monkeypatch.context() as patch:
        stop_before_step(patch, 4)
        with pytest.raises(Stopped):
            loop.fit(tiny_run.task(), tmp_path)
    with checkpoints.Checkpoints(tmp_path) as kept:
        record = kept.read_record()
        state = kept.restore(train_state.init_state(finished.task.model, CONFIG))
    shutil.rmtree(tmp_path / checkpoints.FOLDER)
    with checkpoints.Checkpoints(tmp_path) as kept:
        kept.save(dataclasses.replace(state, key=jax.random.key(77)), record)
    read = []
    batch = task_lib.batch
    monkeypatch.setattr(task_lib, "batch", lambda *arguments: read.append(batch(*arguments)) or read[-1])
    loop.fit(tiny_run.task(), tmp_path, resume=True)
    assert len(read) == 3
    for step, tokens in enumerate(read, start=4):
        np.testing.assert_array_equal(tokens, batch(finished.task, jax.random.key(77), step * 6))
        assert (tokens != batch(finished.task, finished.state.key, step * 6)).any()


def test_a_folder_with_a_run_is_not_started_anew(finished):
    with pytest.raises(ValueError) as refused:
        loop.fit(tiny_run.task(), finished.folder)
    assert str(refused.value) == (
        f"{finished.folder}: expected a folder without a run, got one with checkpoints; resume it, or give another"
    )


def test_a_folder_without_a_run_is_not_resumed(tmp_path):
    for name in ("file", "other"):
        (tmp_path / name / checkpoints.FOLDER).mkdir(parents=True)
    (tmp_path / "file" / checkpoints.FOLDER / "5").touch()
    (tmp_path / "other" / checkpoints.FOLDER / "٣").mkdir()  # a number, but no name of a checkpoint
    for folder in (tmp_path, tmp_path / "absent", tmp_path / "file", tmp_path / "other"):
        with pytest.raises(ValueError) as refused:
            loop.check_folder(folder, resume=True)
        assert str(refused.value) == (
            f"{folder}: expected a run to resume, got no checkpoint in it; start one without --resume, in a new folder"
        )
        loop.check_folder(folder, resume=False)
    assert not (tmp_path / "absent").exists()


def test_a_loss_that_is_no_number_ends_the_run(finished, tmp_path):
    params = jax.tree.map(jnp.array, finished.params)
    params["params"]["final_norm"]["scale"] = params["params"]["final_norm"]["scale"].at[3].set(jnp.nan)
    with pytest.raises(FloatingPointError) as ended:
        loop.fit(tiny_run.task(), tmp_path, init_params=params)
    assert str(ended.value) == (
        "loss: expected a finite number, got nan by step 2; lower the learning_rate, or lengthen the warm-up"
    )
    with checkpoints.Checkpoints(tmp_path) as kept:
        assert kept.latest_step is None


def test_a_last_step_that_ruins_the_weights_ends_the_run(tmp_path):
    """Its own loss is still a number; that of the held-out files after it is none."""
    # A decay of ten times the rate, over the greatest number of float32.
    optimizer = train_config.OptimizerConfig(learning_rate=3.4e38, warmup_steps=0, weight_decay=10.0)
    with pytest.raises(FloatingPointError, match=r"^held-out files after step 1: expected a finite"):
        loop.fit(tiny_run.task(optimizer=optimizer, num_steps=1), tmp_path)


def test_given_weights_are_where_a_run_starts(finished, tmp_path):
    """From weights that it already has, a run that learns nothing goes nowhere; and the caller keeps them."""
    given = jax.tree.map(jnp.array, finished.params)
    start = jax.tree.map(np.array, given)
    optimizer = train_config.OptimizerConfig(learning_rate=1e-30, warmup_steps=0)
    task = tiny_run.task(optimizer=optimizer, num_steps=1, evaluate_every=1)
    params, record = loop.fit(task, tmp_path, init_params=given)
    tiny_run.assert_equal(params, jax.tree.map(jnp.asarray, start))
    assert record["held_out"][0]["nats_a_token"] == finished.record["held_out"][-1]["nats_a_token"]


# Teachers and their texts.


def teacher(vocab_size: int = tiny_run.ARCHITECTURE.vocab_size, texts=()) -> task_lib.Teacher:
    config = dataclasses.replace(tiny_run.ARCHITECTURE, vocab_size=vocab_size, hidden_size=10)
    model = transformer.Transformer(config, backend="reference")
    params = {"params": tiny_models.random_params(config)}
    return task_lib.Teacher(name="teacher", model=model, params=params, texts=texts)


# Ids over all of the vocabulary's, so that a row says where it comes from. 61 // 11 - 1 sequences an epoch.
WRITTEN = [np.arange(1000, 1040), np.arange(1040, 1062)]


@pytest.mark.parametrize(
    ("share", "num_written"),
    [(0.0, 0), (0.5, 3), (1.0, 6), (0.3, 2)],  # of two micro-batches of three; 1.8 is nearest to 2
)
def test_batches_are_shared_between_corpus_and_teacher(share, num_written):
    distill = train_config.DistillConfig(generated_share=share)
    task = tiny_run.task(teacher(texts=WRITTEN), distill=distill)
    key, num_own = jax.random.key(9), 6 - num_written
    for step in (0, 1, 5):
        tokens_ABT = task_lib.batch(task, key, 6 * step)
        assert tokens_ABT.shape == (2, 3, 12) and tokens_ABT.dtype == np.int32
        rows = tokens_ABT.reshape(6, 12)
        is_written = (rows >= 1000).all(axis=1)
        assert is_written.sum() == num_written and (rows[~is_written] < 290).all()
        # Each stream is read one sequence after another, none left out.
        if num_own:
            expected = task.stream.sequences(key, step * num_own, num_own)
            np.testing.assert_array_equal(rows[~is_written], expected)
        if num_written:
            assert task.teacher_stream is not None
            expected = task.teacher_stream.sequences(key, step * num_written, num_written)
            np.testing.assert_array_equal(rows[is_written], expected)


def test_batches_without_a_teacher_s_text_are_of_the_corpus():
    task = tiny_run.task(teacher(), distill=train_config.DistillConfig(generated_share=0.5))
    assert task.teacher_stream is None
    key = jax.random.key(9)
    np.testing.assert_array_equal(task_lib.batch(task, key, 12).reshape(6, 12), task.stream.sequences(key, 12, 6))


def test_a_task_with_a_teacher():
    distill = train_config.DistillConfig(temperature=2.0, teacher_share=0.75)
    task = tiny_run.task(teacher(texts=WRITTEN), distill=distill)
    assert (task.objective.temperature, task.objective.teacher_share) == (2.0, 0.75)  # pyright: ignore
    assert task.objective.teacher.backend == "banded"  # pyright: ignore[reportAttributeAccessIssue]
    assert task.facts["teacher"] == {
        "name": "teacher",
        "sha256": task.facts["teacher"]["sha256"],
        "text_sha256": task.facts["teacher"]["text_sha256"],
        "generated_tokens": 62,
        "sequences_a_step": 3,
    }


def test_a_share_that_rounds_to_nothing_is_refused():
    """A tenth of six sequences is nearest to one; a twentieth would be none, and what the teacher wrote never read."""
    for share, written in ((0.1, 1), (0.5, 3), (1.0, 6), (0.0, 0)):
        distill = train_config.DistillConfig(generated_share=share)
        assert task_lib.num_written(dataclasses.replace(CONFIG, distill=distill)) == written
    with pytest.raises(ValueError, match=r"^generated_share: expected at least one sequence a step, got 0\.05 of 6; "):
        task_lib.num_written(dataclasses.replace(CONFIG, distill=train_config.DistillConfig(generated_share=0.05)))


# What does not fit together.


def refused_task(*arguments: Any) -> str:
    with pytest.raises(ValueError) as refused:
        task_lib.make_task(*arguments)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_what_does_not_fit_is_refused(tmp_path):
    files, tokenizer = tiny_run.files(), tiny_run.tokenizer()
    small = dataclasses.replace(CONFIG, architecture=dataclasses.replace(tiny_run.ARCHITECTURE, vocab_size=289))
    assert tokenizer.vocab_size == 290
    assert refused_task(small, files, tokenizer) == (
        "tokenizer: expected at most 289 entries, the model's vocab_size, got 290"
    )
    tokenizer.save(tmp_path)
    endless = tokenizer_lib.Tokenizer(tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json")))
    assert "expected one with an end token" in refused_task(CONFIG, files, endless)
    assert "expected a teacher with the student's vocabulary of 290, got one of 291" in refused_task(
        CONFIG, files, tokenizer, teacher(vocab_size=291)
    )
    short = dataclasses.replace(files, train=(corpus.Document("a", "fox"),))
    assert refused_task(CONFIG, short, tokenizer).startswith("corpus: expected at least 23 tokens for sequences of 11")


def test_a_vocabulary_larger_than_the_tokenizer_s_is_allowed():
    """Ids that no token has stand for no bytes."""
    config = dataclasses.replace(CONFIG, architecture=dataclasses.replace(tiny_run.ARCHITECTURE, vocab_size=293))
    task = task_lib.make_task(config, tiny_run.files(), tiny_run.tokenizer())
    assert task.token_num_bytes.shape == (293,)
    assert task.token_num_bytes[[0, 290, 291, 292]].tolist() == [0, 0, 0, 0]
    assert task.token_num_bytes[1:257].tolist() == [1] * 256 and (task.token_num_bytes[257:290] > 1).all()


def test_jsonable():
    layer = dataclasses.asdict(config_lib.LayerConfig(window=3))
    value = {"layers": (layer, None), "rate": math.pi, "nested": [(1, (2,))]}
    assert task_lib.jsonable(value) == {"layers": [layer, None], "rate": math.pi, "nested": [[1, [2]]]}
