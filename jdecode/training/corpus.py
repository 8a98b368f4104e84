"""The text that a model learns from: files, in a fixed order, split into train and held-out by a hash of their names.

A file's side never depends on the other files, so a corpus may grow without moving held-out files into training.
"""

import dataclasses
import hashlib
import os
import pathlib
import platform
import sysconfig
from collections.abc import Iterator, Sequence

from jdecode.training import train_config

_TEST_FOLDERS = frozenset({"test", "tests", "idle_test"})
_OTHER_PROJECTS = frozenset({"site-packages", "dist-packages", "_bundled", "__pycache__"})
# Tables and pages that programs wrote, nearly the same in many files: they would flatter the held-out loss.
_GENERATED_FOLDERS = frozenset({"encodings", "pydoc_data"})
_GENERATED_PREFIXES = ("_sysconfigdata", "config-")


@dataclasses.dataclass(frozen=True)
class Document:
    """One file.

    Attributes:
      name: its path below the corpus's folder, with ``/``.
      text: its whole content.
    """

    name: str
    text: str

    @property
    def num_bytes(self) -> int:
        """Length of the text in UTF-8."""
        return len(self.text.encode())


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Files to train on and files to judge by, each in the order of their names.

    Attributes:
      description: where they come from, for the record.
      train, held_out: see above.
      num_skipped: fitting files that are no text in UTF-8.
    """

    description: str
    train: tuple[Document, ...]
    held_out: tuple[Document, ...]
    num_skipped: int = 0

    @property
    def digest(self) -> str:
        """SHA-256 over names, sides and contents, in hexadecimal: two machines with the same digest train alike."""
        digest = hashlib.sha256()
        for side, documents in ((b"train", self.train), (b"held out", self.held_out)):
            for document in documents:
                for part in (side, document.name.encode(), document.text.encode()):
                    digest.update(len(part).to_bytes(8, "little") + part)
        return digest.hexdigest()


def read(config: train_config.CorpusConfig) -> Corpus:
    """Reads a corpus.

    Args:
      config: where the files lie and how they are split.

    Raises:
      ValueError: there is no such folder, it holds no fitting file, or one side of the split would be empty.
    """
    if config.source == train_config.STANDARD_LIBRARY:
        folder, description = pathlib.Path(sysconfig.get_path("stdlib")), _standard_library_name()
        paths = [path for path in _walk(folder, config.suffixes) if is_own_source(path.relative_to(folder).parts)]
    else:
        folder, description = pathlib.Path(config.source), config.source
        if not folder.is_dir():
            raise ValueError(f"corpus: expected standard_library or a folder, got {config.source!r}")
        paths = list(_walk(folder, config.suffixes))
    texts = [(path.relative_to(folder).as_posix(), _text(path)) for path in paths]
    documents = [Document(name, text) for name, text in texts if text]
    held_out = tuple(document for document in documents if is_held_out(document.name, config.held_out_share))
    train = tuple(document for document in documents if not is_held_out(document.name, config.held_out_share))
    num_skipped = sum(text is None for _, text in texts)
    if not train or not held_out:
        skipped = f" ({num_skipped} more are no text in UTF-8)" if num_skipped else ""
        raise ValueError(
            f"corpus: expected files with text on both sides of the split, got {len(train)} to train on and "
            f"{len(held_out)} held out, of {', '.join(config.suffixes)} in {folder}{skipped}; give more files, other "
            "suffixes or another held_out_share"
        )
    return Corpus(description=description, train=train, held_out=held_out, num_skipped=num_skipped)


def check_outside(folder: pathlib.Path, source: str) -> None:
    """Refuses a folder to write into that would become part of a corpus.

    Raises:
      ValueError: one line.
    """
    inner = folder.resolve()
    if source != train_config.STANDARD_LIBRARY and pathlib.Path(source).resolve() in (inner, *inner.parents):
        raise ValueError(f"{folder}: expected a folder outside the corpus {source}; give another")


def is_own_source(parts: Sequence[str]) -> bool:
    """Says whether a path below the standard library is source that its authors wrote, and no test.

    Args:
      parts: of the path, the file's name last.
    """
    *folders, name = parts
    if any(folder in _TEST_FOLDERS | _OTHER_PROJECTS | _GENERATED_FOLDERS for folder in folders):
        return False
    return not any(part.startswith(_GENERATED_PREFIXES) for part in (*folders, name))


def is_held_out(name: str, share: float) -> bool:
    """Says whether a file is held out: the first 8 bytes of its name's SHA-256, as a fraction, are under ``share``."""
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")
    return number < share * 2**64


def _walk(folder: pathlib.Path, suffixes: Sequence[str]) -> Iterator[pathlib.Path]:
    """Yields the files of a folder in the order of their names, with ``/`` (and so on every system the same)."""
    found = []
    for place, _, names in os.walk(folder, onerror=_refuse):
        found += [path for name in names if (path := pathlib.Path(place, name)).suffix in suffixes and path.is_file()]
    for path in found:
        try:
            str(path).encode()
        except UnicodeEncodeError:
            raise ValueError(
                f"corpus: expected file names in UTF-8, got {os.fsencode(path.relative_to(folder))!r}; rename it"
            ) from None
    yield from sorted(found, key=lambda path: path.relative_to(folder).as_posix())


def _refuse(error: OSError) -> None:
    """Ends a walk at a folder that cannot be read: the corpus must not depend on who runs it."""
    raise ValueError(f"corpus: expected folders that can be read, got {error.filename}: {error.strerror}") from error


def _text(path: pathlib.Path) -> str | None:
    """Returns a file's text with Unix line ends, ``None`` where it is not UTF-8."""
    try:
        return path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except UnicodeDecodeError:
        return None


def _standard_library_name() -> str:
    return f"the standard library of {platform.python_implementation()} {platform.python_version()}"
