"""What a finished run leaves: a model that ``jdecode.load`` reads, its record, its card, a picture of its losses."""

import fnmatch
import pathlib
import shutil
from typing import Any

import jax

from jdecode.training import held_out, model_card, record
from jdecode.training import task as task_lib
from jdecode.weights import safetensors_save

MODEL_FOLDER = "model"
"""Below the folder of a run."""


_WRITTEN = (
    *("tokenizer.json", "tokenizer_config.json", "config.json", "model*.safetensors", "model.safetensors.index.json"),
    *(record.RECORD_NAME, record.PLOT_NAME, model_card.NAME),
)


def check_model_folder(folder: pathlib.Path) -> None:
    """Refuses a folder of a run whose ``MODEL_FOLDER`` is more than a model that a run wrote, as it is replaced whole.

    Raises:
      ValueError: one line.
    """
    target = folder / MODEL_FOLDER
    if target.is_symlink() or (target.exists() and not target.is_dir()):
        raise ValueError(
            f"{target}: expected a folder, got a {'link' if target.is_symlink() else 'file'}; move it away"
        )
    for path in sorted(target.iterdir()) if target.is_dir() else ():
        if not any(fnmatch.fnmatchcase(path.name, pattern) for pattern in _WRITTEN):
            raise ValueError(f"{target}: expected what a run writes, got {path.name!r}, too; move it away")


def export(
    task: task_lib.Task, params: Any, losses: dict[str, Any], folder: pathlib.Path, command: str
) -> dict[str, Any]:
    """Writes the model, and judges what was written on all held-out text.

    Args:
      task, params, losses: of the run, as ``fit`` took and returned them.
      folder: of the run. Its ``MODEL_FOLDER`` is replaced.
      command: which anyone can repeat the run with, for the card.

    Returns:
      The record with ``command`` and ``final``: the loss of the weights as they were written.
    """
    config = task.config
    rounded = jax.tree.map(lambda leaf: leaf.astype(config.weight_dtype), params)
    exact = jax.tree.map(lambda leaf: leaf.astype("float32"), rounded)
    loss = held_out.evaluate(task.model, exact, task.judged, task.token_num_bytes)
    loss.check_finite(f"weights in {config.weight_dtype}")
    complete = {
        **losses,
        "command": command,
        "final": {
            "weight_dtype": config.weight_dtype,
            "num_parameters": sum(leaf.size for leaf in jax.tree.leaves(params)),
            "num_tokens": loss.num_tokens,
            "num_bytes": loss.num_bytes,
            "nats_a_token": loss.nats_a_token,
            "perplexity": loss.perplexity,
            "bits_per_byte": loss.bits_per_byte,
        },
    }
    target = folder / MODEL_FOLDER
    part = folder / f"{MODEL_FOLDER}.part"
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    task.tokenizer.save(part)
    record.write_json(part / record.RECORD_NAME, complete)
    (part / model_card.NAME).write_text(model_card.text(complete), encoding="utf-8")
    record.write_plot(part / record.PLOT_NAME, complete)
    safetensors_save.save_hugging_face(
        part, rounded["params"], config.architecture, eos_token_ids=task.tokenizer.eos_token_ids
    )
    shutil.rmtree(target, ignore_errors=True)
    part.rename(target)
    return complete
