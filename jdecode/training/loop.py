"""The training loop: batches by number, steps, looks at held-out files, checkpoints; resumed bit for bit."""

import contextlib
import dataclasses
import math
import pathlib
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tqdm

from jdecode.models import transformer
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import (
    checkpoints,
    corpus,
    held_out,
    objective,
    token_stream,
    train_config,
    train_state,
)

RECORD_EVERY = 10
"""Steps whose mean loss makes one entry of the record. The device is not waited for in between."""

LOOK_PIECES = 48
"""Pieces of the held-out files that a look judges; the end of a run judges all."""

_FACTS = ("config", "corpus", "teacher", "start")
_WORDS = ("name", "description", "limits")  # of a config: for people, and free to change in the middle of a run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model to learn from.

    Attributes:
      name: for the record.
      model, params: of the teacher.
      texts: ids that it wrote, each with its end token; empty for none.
    """

    name: str
    model: transformer.Transformer
    params: Any
    texts: Sequence[np.ndarray] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A run, ready to start: everything but the state.

    Attributes:
      config: of the run.
      tokenizer: of the model.
      objective: to minimise.
      teacher_params: ``None`` without a teacher.
      stream: of the corpus.
      teacher_stream: of the teacher's own text, ``None`` for none.
      judged: the held-out files.
      token_num_bytes: int (V,), how many bytes each token stands for.
      facts: about config, corpus and teacher, as JSON can say them: what must be equal when a run is resumed.
    """

    config: train_config.TrainConfig
    tokenizer: tokenizer_lib.Tokenizer
    objective: objective.NextToken | objective.Distillation
    teacher_params: Any
    stream: token_stream.TokenStream
    teacher_stream: token_stream.TokenStream | None
    judged: tuple[held_out.Piece, ...]
    token_num_bytes: np.ndarray
    facts: dict[str, Any]

    @property
    def model(self) -> transformer.Transformer:
        """The model that learns."""
        return self.objective.model


def make_task(
    config: train_config.TrainConfig,
    files: corpus.Corpus,
    tokenizer: tokenizer_lib.Tokenizer,
    teacher: Teacher | None = None,
    start: str | None = None,
) -> Task:
    """Puts a run together.

    Args:
      config: of the run.
      files: to learn from and to judge by.
      tokenizer: its vocabulary is at most the model's.
      teacher: to distil from; ``None`` learns from the files alone.
      start: names the weights that the run starts from, for the record; ``None`` for fresh ones.

    Raises:
      ValueError: tokenizer or teacher do not fit the model, or there is too little text.
    """
    vocab_size = config.architecture.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer: expected at most {vocab_size} entries, the model's vocab_size, got {tokenizer.vocab_size}"
        )
    if not tokenizer.eos_token_ids:
        raise ValueError("tokenizer: expected one with an end token (it parts the documents), got one without")
    end_token_id = tokenizer.eos_token_ids[0]
    model = transformer.Transformer(config.architecture, backend="banded", dtype="float32")
    train, judged = (encode(tokenizer, side, end_token_id) for side in (files.train, files.held_out))
    stream = token_stream.TokenStream(train, config.sequence_len)
    token_num_bytes = np.zeros(vocab_size, np.int64)
    token_num_bytes[: tokenizer.vocab_size] = [len(tokenizer.token_bytes(idx)) for idx in range(tokenizer.vocab_size)]
    facts = {
        "config": dataclasses.asdict(config),
        "corpus": {
            "description": files.description,
            "sha256": files.digest,
            "train_files": len(files.train),
            "train_bytes": sum(document.num_bytes for document in files.train),
            "train_tokens": stream.num_tokens,
            "held_out_files": len(files.held_out),
            "held_out_bytes": sum(document.num_bytes for document in files.held_out),
            "held_out_tokens": sum(len(document) for document in judged),
        },
        "start": {"weights": start},
    }
    learned: objective.NextToken | objective.Distillation = objective.NextToken(model)
    teacher_stream = None
    if teacher is not None:
        distill = config.distill
        teacher_model = dataclasses.replace(teacher.model, backend="banded", dtype="float32")
        learned = objective.Distillation(model, teacher_model, distill.temperature, distill.teacher_share)
        if teacher.texts:
            teacher_stream = token_stream.TokenStream(teacher.texts, config.sequence_len)
        facts["teacher"] = {"name": teacher.name, "generated_tokens": sum(len(text) for text in teacher.texts)}
    return Task(
        config=config,
        tokenizer=tokenizer,
        objective=learned,
        teacher_params=None if teacher is None else teacher.params,
        stream=stream,
        teacher_stream=teacher_stream,
        judged=tuple(held_out.pieces(judged, config.sequence_len, end_token_id)),
        token_num_bytes=token_num_bytes,
        facts=jsonable(facts),
    )


def encode(
    tokenizer: tokenizer_lib.Tokenizer, documents: Sequence[corpus.Document], end_token_id: int
) -> list[np.ndarray]:
    """Returns each document's ids and the end token. Text that looks like a control token is ordinary text."""
    ids = (tokenizer.encode(document.text, add_special_tokens=False, parse_special=False) for document in documents)
    return [np.asarray([*document, end_token_id], np.int32) for document in ids]


def batch(task: Task, key: jax.Array, num_sequences: int) -> np.ndarray:
    """Returns the micro-batches of the step that starts at sequence ``num_sequences``: int32 (A, B, T + 1)."""
    config = task.config
    count = config.sequences_a_step
    step = num_sequences // count
    num_written = 0 if task.teacher_stream is None else round(config.distill.generated_share * count)
    rows = (
        [task.stream.sequences(key, step * (count - num_written), count - num_written)] if num_written < count else []
    )
    if task.teacher_stream is not None and num_written:
        rows.append(task.teacher_stream.sequences(key, step * num_written, num_written))
    return np.concatenate(rows).reshape(config.accumulation_steps, config.batch_size, config.sequence_len + 1)


def check_folder(folder: pathlib.Path, resume: bool) -> None:
    """Refuses a folder that holds a run, unless it is to be resumed, and one to resume that holds none.

    Raises:
      ValueError: one line.
    """
    has_run = (folder / checkpoints.FOLDER).is_dir() and any((folder / checkpoints.FOLDER).iterdir())
    if has_run and not resume:
        raise ValueError(
            f"{folder}: expected a folder without a run, got one with checkpoints; resume it, or give another"
        )
    if resume and not has_run:
        raise ValueError(f"{folder}: expected a run to resume, got no checkpoint in it; start it without --resume")


def fit(
    task: Task,
    folder: pathlib.Path | None,
    *,
    init_params: Any = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Any, dict[str, Any]]:
    """Trains.

    Args:
      task: of ``make_task``.
      folder: of the run; checkpoints go below it. ``None`` keeps none.
      init_params: float32, to start from; ``None`` for fresh weights.
      resume: continue from the folder's latest checkpoint. Otherwise the folder must hold none.
      say: is given a line at every look at the held-out files.

    Returns:
      The parameters, float32, and the record: ``facts`` of the task, ``history`` and ``held_out``. The same task gives
      the same parameters and the same record, whether it was resumed or not (on one kind of machine).

    Raises:
      ValueError: the folder holds another run or, without ``resume``, any.
      FloatingPointError: the loss is not finite any more.
    """
    config = task.config
    if folder is not None:
        check_folder(folder, resume)
    elif resume:
        raise ValueError("resume: expected a folder with a run, got none; give it")
    state = train_state.init_state(task.model, config, init_params)
    with contextlib.nullcontext() if folder is None else checkpoints.Checkpoints(folder) as kept:
        record = {**task.facts, "history": [], "held_out": []}
        if kept is not None and kept.latest_step is not None:
            record = _resumed_record(kept, task, folder)
            state = kept.restore(state)
        first = int(state.step)
        waiting: list[dict[str, jax.Array]] = []
        begun = time.perf_counter()
        steps = range(first, config.num_steps)
        for step in tqdm.tqdm(steps, initial=first, total=config.num_steps, unit="step", disable=_is_quiet()):
            tokens_ABT = jnp.asarray(batch(task, state.key, int(state.num_sequences)))
            state, scalars = train_state.train_step(
                task.objective, config.optimizer, config.num_steps, state, task.teacher_params, tokens_ABT
            )
            waiting.append(scalars)
            done = step + 1
            is_last = done == config.num_steps
            looks = is_last or done % config.evaluate_every == 0
            saves = is_last or done % config.checkpoint_every == 0
            if done % RECORD_EVERY == 0 or looks or saves:
                record["history"].append(_entry(task, done, waiting))
                waiting = []
            if looks:
                record["held_out"].append(_look(task, state, done))
                rate = (done - first) * config.sequences_a_step * config.sequence_len / (time.perf_counter() - begun)
                say(_line(record, config.num_steps, rate))
            if saves and kept is not None:
                kept.save(state, record)
    return state.params, record


def _resumed_record(kept: checkpoints.Checkpoints, task: Task, folder: pathlib.Path | None) -> dict[str, Any]:
    """Returns the record of the latest checkpoint, if the run may go on from it."""
    record = kept.read_record()
    for part in _FACTS:
        values, before = task.facts.get(part, {}), record.get(part, {})
        names = {*values, *before}.difference(_WORDS if part == "config" else ())
        different = sorted(name for name in names if values.get(name) != before.get(name))
        if different:
            name = different[0]
            raise ValueError(
                f"{folder}: expected to resume a run of the same {part}, got another {name} ({values.get(name)!r:.80}, "
                f"before {before.get(name)!r:.80}); give another folder"
            )
    return {**record, **task.facts}


def _entry(task: Task, step: int, scalars: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
    """Makes the entry of the record for the steps since the last one: means, and the last learning rate."""
    values = jax.device_get(scalars)
    means = {name: float(np.mean([value[name] for value in values], dtype=np.float64)) for name in values[0]}
    if not math.isfinite(means["loss"]):
        raise FloatingPointError(
            f"loss: expected a finite number, got {means['loss']} by step {step}; lower the learning_rate, or lengthen "
            "the warm-up"
        )
    means["learning_rate"] = float(values[-1]["learning_rate"])
    return {"step": step, "tokens": step * task.config.sequences_a_step * task.config.sequence_len, **means}


def _look(task: Task, state: train_state.TrainState, step: int) -> dict[str, float]:
    loss = held_out.evaluate(task.model, state.params, held_out.some(task.judged, LOOK_PIECES), task.token_num_bytes)
    return {
        "step": step,
        "tokens": step * task.config.sequences_a_step * task.config.sequence_len,
        "nats_a_token": loss.nats_a_token,
        "bits_per_byte": loss.bits_per_byte,
    }


def _line(record: dict[str, Any], num_steps: int, rate: float) -> str:
    look, entry = record["held_out"][-1], record["history"][-1]
    return (
        f"step {look['step']} of {num_steps}: training loss {entry['loss']:.4f}, held out {look['nats_a_token']:.4f} "
        f"nats a token, {look['bits_per_byte']:.4f} bits a byte ({rate:.0f} tokens/s)"
    )


def _is_quiet() -> bool:
    return not sys.stderr.isatty()


def jsonable(value: Any) -> Any:
    """Returns a value as JSON would give it back: tuples as lists."""
    if isinstance(value, dict):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    return value
