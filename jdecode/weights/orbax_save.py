"""Writing a model as a folder whose parameters are an Orbax checkpoint."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from jdecode import config
from jdecode.weights import model_folder, orbax_folder, parameter_tree


def save_orbax(
    folder: str | pathlib.Path,
    params: Mapping[str, Any],
    model: config.ModelConfig,
    *,
    tokenizer_files: Sequence[str | pathlib.Path] = (),
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Writes ``config.json`` and an Orbax checkpoint of the parameters, which ``load_weights`` reads.

    The checkpoint, in the sub-folder ``params``, appears under its name only when all of it is written.

    Args:
      folder: made when absent. Must hold no weights yet, as a reader could not tell old ones from new.
      params: nested dict of arrays (float32, bfloat16, float16), as ``load_weights`` returns it, on one device or
        spread over a mesh; written bit by bit.
      model: the configuration of the parameters.
      tokenizer_files: copied into the folder.
      eos_token_ids: written into ``config.json``.
      bos_token_id: written into ``config.json``.
      generation_defaults: written as ``generation_config.json`` when given.

    Raises:
      ValueError: for parameters that do not fit the configuration, a configuration that the format cannot say, a
        folder that holds weights already, or a checkpoint that cannot be written.
    """
    model_folder.write(
        folder,
        params,
        model,
        _write_checkpoint,
        tokenizer_files=tokenizer_files,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        generation_defaults=generation_defaults,
    )


def _write_checkpoint(folder: pathlib.Path, arrays: Mapping[str, Any]) -> None:
    path = folder / orbax_folder.NAME
    with (
        orbax_folder.reported(f"{path}: expected to write an Orbax checkpoint", "nothing usable was written") as ocp,
        ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer,
    ):
        checkpointer.save(path.absolute(), args=ocp.args.PyTreeSave(parameter_tree.nested(arrays)))
