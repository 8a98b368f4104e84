"""The persistent compilation cache: the second run of a command finds what the first one compiled.

It lives in the user's cache folder, in one sub-folder for each kind of processor: code compiled for one machine can
stop another with an illegal instruction, and home folders are shared between machines.
"""

import contextlib
import hashlib
import os
import pathlib
import platform
import tempfile
import warnings

# Read before jax is imported: a folder of the caller's own choice wins over ours.
JAX_FOLDER_VARIABLE = "JAX_COMPILATION_CACHE_DIR"
SWITCH_VARIABLE = "JDECODE_COMPILATION_CACHE"
ROOT_VARIABLE = "JDECODE_CACHE"


def root_folder() -> pathlib.Path:
    """Returns the folder for everything that jdecode keeps for the user: ``$JDECODE_CACHE``, or the usual place."""
    if own := os.environ.get(ROOT_VARIABLE):
        return pathlib.Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
    return pathlib.Path(base) / "jdecode"


def _processor_name() -> str:
    """Names the kind of processor: its architecture and a digest of the instruction sets that it announces."""
    features = platform.processor()
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
        features = next((line for line in file if line.startswith(("flags", "Features"))), features)
    return f"{platform.machine() or 'unknown'}-{hashlib.sha256(features.encode()).hexdigest()[:12]}"


def enable(min_compile_seconds: float = 0.0) -> pathlib.Path | None:
    """Turns the persistent compilation cache on for this process, unless the user turned it off.

    ``JDECODE_COMPILATION_CACHE=off`` turns it off; a folder in ``JAX_COMPILATION_CACHE_DIR`` is left as it is. A folder
    that cannot be written only means that nothing is kept: no run fails because of it.

    Args:
      min_compile_seconds: programs that compile faster than this are not kept.

    Returns:
      The folder in use, or ``None`` when there is none.

    Raises:
      ValueError: if ``JDECODE_COMPILATION_CACHE`` is neither ``on`` nor ``off``.
    """
    switch = os.environ.get(SWITCH_VARIABLE, "on").strip().lower() or "on"
    if switch not in ("on", "off"):
        raise ValueError(f"{SWITCH_VARIABLE}: expected on or off, got {switch!r}; unset it for on")
    if switch == "off":
        return None
    # An entry that another process is writing is read as damaged: it is compiled again, which needs no words.
    warnings.filterwarnings("ignore", message="Error (reading|writing) persistent compilation cache entry")
    if chosen := os.environ.get(JAX_FOLDER_VARIABLE):
        return pathlib.Path(chosen)
    try:
        folder = root_folder() / "compilation" / _processor_name()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()  # says for certain whether the folder can be written
    except (OSError, RuntimeError):  # RuntimeError: there is no home folder
        return None
    import jax  # late: the front doors answer --help and bad flags without it

    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min_compile_seconds)
    return folder
