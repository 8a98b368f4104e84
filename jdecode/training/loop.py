"""The training loop: batches by number, steps, looks at held-out files, checkpoints; resumed bit for bit."""

import contextlib
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

from jdecode.training import checkpoints, held_out, train_state
from jdecode.training import task as task_lib

RECORD_EVERY = 10
"""Steps whose mean loss makes one entry of the record. In between the host runs ahead of the device."""

_LOSSES = ("history", "held_out")  # what a record holds beside the facts of its run

LOOK_PIECES = 48
"""Pieces of the held-out files that a look judges; the end of a run judges all."""


def check_folder(folder: pathlib.Path, resume: bool) -> None:
    """Refuses a folder that holds a run, unless it is to be resumed, and one to resume that holds none.

    Raises:
      ValueError: one line.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a folder, got a file; give another name")
    has_run = checkpoints.is_held_by(folder)
    if has_run and not resume:
        raise ValueError(
            f"{folder}: expected a folder without a run, got one with checkpoints; resume it, or give another"
        )
    if resume and not has_run:
        raise ValueError(
            f"{folder}: expected a run to resume, got no checkpoint in it; start one without --resume, in a new folder"
        )


def fit(
    task: task_lib.Task,
    folder: pathlib.Path | None,
    *,
    init_params: Any = None,
    resume: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[Any, dict[str, Any]]:
    """Trains.

    Args:
      task: of ``task.make_task``.
      folder: of the run; checkpoints go below it. ``None`` keeps none.
      init_params: float32, to start from, donated; ``None`` for fresh weights.
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
        # A copy: the state's own is donated with it.
        first, key = int(state.step), jnp.copy(state.key)
        say(_headline(task, first))
        waiting: list[dict[str, jax.Array]] = []
        begun = time.perf_counter()
        steps = range(first, config.num_steps)
        for step in tqdm.tqdm(steps, initial=first, total=config.num_steps, unit="step", disable=_is_quiet()):
            tokens_ABT = jnp.asarray(task_lib.batch(task, key, step * config.sequences_a_step))
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


def _resumed_record(kept: checkpoints.Checkpoints, task: task_lib.Task, folder: pathlib.Path | None) -> dict[str, Any]:
    """Returns the record of the latest checkpoint, if the run may go on from it."""
    record = kept.read_record()
    before = {name: value for name, value in record.items() if name not in _LOSSES}
    place = task_lib.difference(task.facts, before)
    if place is not None:
        raise ValueError(
            f"{folder}: expected to resume the same run, got another {place} ({_at(task.facts, place)}, before "
            f"{_at(before, place)}); give another folder"
        )
    return {**record, **task.facts}


def _at(facts: Any, place: str) -> str:
    """Shows what stands at a place, such as ``config.seed``."""
    for name in place.split("."):
        facts = facts.get(name) if isinstance(facts, dict) else None
    text = "one" if isinstance(facts, dict) else "none" if facts is None else repr(facts)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _entry(task: task_lib.Task, step: int, scalars: Sequence[dict[str, jax.Array]]) -> dict[str, float]:
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


def _look(task: task_lib.Task, state: train_state.TrainState, step: int) -> dict[str, float]:
    loss = held_out.evaluate(task.model, state.params, held_out.some(task.judged, LOOK_PIECES), task.token_num_bytes)
    loss.check_finite(f"held-out files after step {step}")
    return {
        "step": step,
        "tokens": step * task.config.sequences_a_step * task.config.sequence_len,
        "nats_a_token": loss.nats_a_token,
        "bits_per_byte": loss.bits_per_byte,
    }


def _headline(task: task_lib.Task, first: int) -> str:
    config, facts = task.config, task.facts["corpus"]
    start = f", from step {first}" if first else ""
    return (
        f"{facts['train_files']} files, {facts['train_tokens']} tokens to learn from; {config.num_steps} steps of "
        f"{config.sequences_a_step * config.sequence_len} tokens{start}"
    )


def _line(record: dict[str, Any], num_steps: int, rate: float) -> str:
    look, entry = record["held_out"][-1], record["history"][-1]
    return (
        f"step {look['step']} of {num_steps}: training loss {entry['loss']:.4f}, held out {look['nats_a_token']:.4f} "
        f"nats a token, {look['bits_per_byte']:.4f} bits a byte ({rate:.0f} tokens/s)"
    )


def _is_quiet() -> bool:
    return not sys.stderr.isatty()
