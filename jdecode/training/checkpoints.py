"""Checkpoints of a run, by Orbax: the whole training state, and beside it what the run is and has recorded so far.

A folder of checkpoints belongs to one run. Resuming with another config or corpus is refused, since the result would be
neither run.
"""

import logging
import pathlib
import re
from types import TracebackType
from typing import Any, Self

import jax
from orbax import checkpoint as ocp

from jdecode.training import train_state
from jdecode.weights import orbax_folder

FOLDER = "checkpoints"
"""Below the folder of a run."""

KEPT = 2
"""How many of the latest checkpoints are kept."""


_DAMAGED = "it is damaged: remove it, and the one before is resumed from"


def is_held_by(run_folder: pathlib.Path) -> bool:
    """Tells whether a folder has a checkpoint that was written to its end."""
    folder = run_folder / FOLDER
    return folder.is_dir() and any(re.fullmatch(r"[0-9]+", path.name) and path.is_dir() for path in folder.iterdir())


class Checkpoints:
    """The checkpoints of one run. A context manager.

    A checkpoint appears under its name only when all of it is written, so a process that is killed while it writes
    leaves the one before.
    """

    def __init__(self, run_folder: pathlib.Path) -> None:
        """Args: run_folder: of the run; made when absent."""
        logging.getLogger("absl").setLevel(logging.WARNING)  # Orbax tells of every file that it opens
        options = ocp.CheckpointManagerOptions(max_to_keep=KEPT, enable_async_checkpointing=False)
        self._folder = (run_folder / FOLDER).absolute()
        self._manager = ocp.CheckpointManager(self._folder, options=options)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        del kind, error, trace
        self._manager.close()

    @property
    def latest_step(self) -> int | None:
        """The step of the latest checkpoint, ``None`` where there is none."""
        return self._manager.latest_step()

    def save(self, state: train_state.TrainState, record: dict[str, Any]) -> None:
        """Writes a checkpoint.

        Args:
          state: of the run.
          record: what JSON can say.
        """
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        with orbax_folder.reported(
            f"{self._folder}: expected to write a checkpoint", "make room, or give a folder that can be written"
        ):
            self._manager.save(int(state.step), args=args)

    def read_record(self) -> dict[str, Any]:
        """Returns the record of the latest checkpoint."""
        record = self._read("record", ocp.args.JsonRestore())
        if not isinstance(record, dict):
            raise ValueError(
                f"{self._folder / str(self.latest_step)}: expected a record that is an object, got "
                f"{type(record).__name__}; {_DAMAGED}"
            )
        return record

    def restore(self, like: train_state.TrainState) -> train_state.TrainState:
        """Returns the state of the latest checkpoint, on the devices of ``like``, whose arrays are not read."""
        abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
        return self._read("state", ocp.args.StandardRestore(abstract))

    def _read(self, item: str, args: Any) -> Any:
        """Reads an item of the latest checkpoint."""
        step = self.latest_step
        with orbax_folder.reported(
            f"{self._folder / str(step)}: expected a whole checkpoint",
            _DAMAGED,
        ):
            return self._manager.restore(step, args=ocp.args.Composite(**{item: args}))[item]
