"""The folder of a prefix cache on disk: which of its files are ours, and who may write there. Imports no jax.

::

    folder/prefix_cache.json             what is held; a folder without this file holds no prefix cache
           pages-<digest>.safetensors    the pages that it names
           .pages, .json                 what a save is writing, or what one that was killed has left
           .lock                         empty; whoever saves has it locked

A save has the lock from its first byte to its last, and the system takes it from a process that ends, however it ends.
So whatever else of ours a save finds is of the dead, and goes. Saves of several runs wait for each other: each is
whole, and the last one stays. Who loads locks nothing, and can read where nothing can be written.
"""

import contextlib
import fcntl
import pathlib
import re
import tempfile
from collections.abc import Iterator

from jdecode import config as config_lib

JSON_NAME = "prefix_cache.json"
LOCK_NAME = ".lock"
WRITING_PAGES, WRITING_JSON = ".pages", ".json"
PAGES_NAME = re.compile(r"pages-[0-9a-f]{64}\.safetensors")
_WRITING_NAME = re.compile(r"\.(pages|json)(\.[0-9]+)?")  # with the number of a process, as it was once


def is_held(folder: pathlib.Path) -> bool:
    """Says whether a folder holds a prefix cache; one without may be absent, empty, or hold what a save has left.

    Raises:
      ValueError: it is no folder, or holds what is not ours; one line.
    """
    try:
        names = sorted(path.name for path in folder.iterdir())
    except FileNotFoundError:
        return False
    except OSError as error:
        raise _refusal(folder, "read", error) from error
    if JSON_NAME in names:
        return True
    others = [name for name in names if name != LOCK_NAME and not _is_leftover(name)]
    config_lib.check(
        not others,
        f"{folder}: expected a prefix cache, or a new or an empty folder, got one that holds {''.join(others[:1])!r}; "
        "give another",
    )
    return False


def prepare(folder: pathlib.Path) -> bool:
    """Makes a folder ready for a save that comes later, and says whether it holds a prefix cache already.

    Raises:
      ValueError: as ``is_held``, or nothing can be written or locked there; one line.
    """
    held = is_held(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder, prefix=f"{WRITING_PAGES}."), (folder / LOCK_NAME).open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # somebody saves just now
    except OSError as error:
        raise _refusal(folder, "written", error) from error
    return held


@contextlib.contextmanager
def alone(folder: pathlib.Path) -> Iterator[None]:
    """Waits until no other save is under way, and keeps others waiting until the end; makes the folder when absent."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK_NAME).open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def sweep(folder: pathlib.Path, pages_file: str) -> None:
    """Removes what earlier saves have left; only for who is ``alone``.

    Args:
      pages_file: stays.
    """
    for path in folder.iterdir():
        if _is_leftover(path.name) and path.name != pages_file:
            with contextlib.suppress(OSError):  # it is in nobody's way, and the next save tries again
                path.unlink()


def _refusal(folder: pathlib.Path, done: str, error: OSError) -> ValueError:
    return ValueError(f"{folder}: expected a folder that can be {done}, got: {error.strerror or error}; give another")


def _is_leftover(name: str) -> bool:
    return (PAGES_NAME.fullmatch(name) or _WRITING_NAME.fullmatch(name)) is not None
