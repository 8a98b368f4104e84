"""The models that come with the package, by name: one folder each in ``jdecode/pretrained``, card included."""

import pathlib

_FOLDER = pathlib.Path(__file__).resolve().parent.parent / "pretrained"


def names() -> list[str]:
    """Returns the names of the packaged models, in order."""
    return sorted(path.parent.name for path in _FOLDER.glob("*/config.json"))


def find(source: str | pathlib.Path) -> pathlib.Path | None:
    """Returns the folder of a packaged model, ``None`` where ``source`` is no name of one.

    A bare name means the package's model whatever lies in the working folder, where a run may well have left a folder
    of that name; ``./gqa_small`` is that folder.
    """
    return _FOLDER / source if isinstance(source, str) and source in names() else None
