"""The parameters of a folder as an Orbax checkpoint: one PyTree in a sub-folder, its paths those of the model.

The checkpoint holds the nested dict of ``parameter_shapes`` and nothing else: no optimiser, no step, no outer
``params``. Its tensors are read one by one, each when it is asked for. Like safetensors, the format has no checksum of
the numbers: files that are missing, cut or unreadable are found, a changed bit in the middle of a tensor is not.
"""

import contextlib
import dataclasses
import logging
import math
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jdecode.weights import parameter_tree, stored_tensor

NAME = "params"
"""The sub-folder of the checkpoint."""

_INDEX_NAME = "manifest.ocdbt"
_DESCRIPTION_NAMES = (b"/.zarray", b"/zarr.json")  # of a tensor: its shape, dtype and chunks


@dataclasses.dataclass(frozen=True, kw_only=True)
class OrbaxTensor:
    """Locates a tensor in a checkpoint; see ``stored_tensor.SourceTensor``.

    Attributes:
      name: its path in the tree, parts joined by ``/``.
      path: the folder of the checkpoint.
      shape, encoding: as the checkpoint's table of tensors says.
    """

    name: str
    path: pathlib.Path
    shape: tuple[int, ...]
    encoding: stored_tensor.Encoding

    @property
    def num_elements(self) -> int:
        """The count of numbers; 1 for a tensor of rank zero."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """The bytes of the numbers. The files are compressed."""
        return self.num_elements * self.encoding.block_bytes

    def read_as(self, dtype: np.dtype) -> np.ndarray:
        """Reads the tensor; see ``stored_tensor.SourceTensor``."""
        where = f"{self.path}: tensor {self.name}"
        stored_tensor.check_holds_weights(self.encoding, where)
        with reported(f"{where}: expected to read it") as ocp:
            arguments = ocp.args.PyTreeRestore(
                # Orbax reads what the tree names and no more. The shape stands in the checkpoint.
                item=parameter_tree.nested({self.name: 0}),
                restore_args=parameter_tree.nested({self.name: ocp.RestoreArgs(restore_type=np.ndarray)}),
                partial_restore=True,
            )
            with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
                array = parameter_tree.flat(handler.restore(self.path.absolute(), args=arguments))[self.name]
        if (array.shape, array.dtype) != (self.shape, self.encoding.dtype):
            raise ValueError(
                f"{where}: expected {self.encoding.name} {self.shape} by the table of tensors, got {array.dtype} "
                f"{array.shape}; the checkpoint is damaged"
            )
        return stored_tensor.rounded(array, dtype, where)


def is_held_by(folder: pathlib.Path) -> bool:
    """Tells whether a folder has the sub-folder of an Orbax checkpoint."""
    return (folder / NAME).is_dir()


def read_table(folder: pathlib.Path) -> dict[str, OrbaxTensor]:
    """Finds every tensor of a folder's checkpoint, without reading the tensors.

    Args:
      folder: holds the sub-folder ``NAME``.

    Returns:
      Path in the tree to where the tensor lies.

    Raises:
      ValueError: one line: there is no checkpoint, it is damaged, or it holds something else than arrays by name.
    """
    path = folder / NAME
    with reported(f"{path}: expected an Orbax checkpoint of a PyTree") as ocp:
        _check_readable(path)
        with contextlib.closing(ocp.PyTreeCheckpointHandler()) as handler:
            tree = handler.metadata(path.absolute()).tree
        if not isinstance(tree, Mapping):
            raise ValueError(f"a {type(tree).__name__} instead of a dict of parameters")
        return {name: _tensor(path, name, entry) for name, entry in parameter_tree.flat(tree).items()}


def _check_readable(path: pathlib.Path) -> None:
    """Reads the storage's index and what it says of each tensor.

    Orbax does so too, for all tensors at once, and leaves at the first fault; what the storage's threads then say of
    the others would be printed, by no one that could be stopped.
    """
    import tensorstore  # what Orbax stores by

    if not (path / _INDEX_NAME).is_file():
        raise ValueError(f"no {_INDEX_NAME} in it")
    files = {"driver": "file", "path": f"{path.absolute()}/"}
    store = tensorstore.KvStore.open({"driver": "ocdbt", "base": files}).result()
    for key in store.list().result():
        if key.endswith(_DESCRIPTION_NAMES):
            store.read(key).result()


def _tensor(path: pathlib.Path, name: str, entry: Any) -> OrbaxTensor:
    shape, dtype = getattr(entry, "shape", None), getattr(entry, "dtype", None)
    if shape is None or dtype is None:
        raise ValueError(f"{name!r}, which is no array")
    encoding = stored_tensor.Encoding.plain(np.dtype(dtype))
    return OrbaxTensor(name=name, path=path, shape=tuple(shape), encoding=encoding)


@contextlib.contextmanager
def reported(expected: str, remedy: str = "the checkpoint is damaged or incomplete") -> Iterator[Any]:
    """Gives Orbax to a block, and turns whatever goes wrong in it into one line.

    Args:
      expected: starts the line.
      remedy: ends it.

    Raises:
      ValueError: the line.
    """
    # Late: importing it takes longer than loading a small model, and only this format needs it.
    from orbax import checkpoint as ocp

    logger = logging.getLogger("absl")  # Orbax's own; what it would say of a fault, the line says
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield ocp
    except MemoryError:
        raise
    except Exception as error:  # Orbax and its storage raise many types; each is the same to the user
        # What follows there is the storage's whole configuration.
        text = str(error).split(" See full TensorStore details")[0]
        cause = " ".join(text.split()) or type(error).__name__
        raise ValueError(f"{expected}, got: {cause[:300]}; {remedy}") from error
    finally:
        logger.setLevel(level)
