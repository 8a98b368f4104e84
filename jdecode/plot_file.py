"""The file of a picture that a command draws: refused before the work where it could not be written after it."""

import pathlib


def check(path: pathlib.Path) -> None:
    """Refuses what no picture could be written to. A file that stands there is left as it is.

    Raises:
      ValueError: the name is no picture's, or that of a folder; or matplotlib is not installed.
      OSError: nothing can be written there.
    """
    if path.suffix.lower() != ".png":
        raise ValueError(f"--plot {path}: expected a name that ends in .png; give another")
    if path.is_dir():
        raise ValueError(f"--plot {path}: expected a file, got a folder; give another name")
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        raise ValueError(
            "--plot: expected matplotlib, which is not installed; pip install 'jdecode[plot]', or leave --plot out"
        ) from None
    del figure
    if path.exists():
        path.open("ab").close()
        return
    try:
        path.open("xb").close()
    except FileNotFoundError:
        raise ValueError(f"--plot {path}: expected a folder {path.parent}, got none; make it first") from None
    path.unlink()
