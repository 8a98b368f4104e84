"""The folder of a prefix cache: saves that end at any point, leftovers, other people's files, and several runs."""

import dataclasses
import errno
import fcntl
import itertools
import os
import pathlib
import tempfile
import threading
from collections.abc import Callable

import pytest

from jdecode.serving import prefix_cache, prefix_files, prefix_folder
from jdecode.weights import safetensors_write
from tests.serving.prefix_reading import LM, check, init, text

OLD, NEW = text(9), text(7, seed=3)
PAGES_NAME = f"pages-{'0a' * 32}.safetensors"  # of no file that a test makes
LEFTOVERS = (".lock", ".pages", ".json", ".pages.4711", ".json.4711", PAGES_NAME)


def holding(prompt: list[int]) -> prefix_cache.PrefixCache:
    prefixes = init(num_pages=20)
    check(prefixes, [prompt])
    return prefixes


@pytest.fixture(scope="module")
def old() -> prefix_cache.PrefixCache:
    return holding(OLD)


@pytest.fixture(scope="module")
def new() -> prefix_cache.PrefixCache:
    return holding(NEW)


def files(folder: pathlib.Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def loaded_prompt(folder: pathlib.Path) -> list[int] | None:
    """Loads what a folder holds and returns the prompt of it; ``None`` where it holds nothing."""
    if not prefix_folder.prepare(folder):
        return None
    nodes = LM.load_prefix_cache(folder)._store.tree.saved()
    return [token for node in nodes for token in node.tokens]


def is_clean(folder: pathlib.Path) -> bool:
    names = sorted(path.name for path in folder.iterdir())
    return len(names) == 3 and names[0] == ".lock" and names[2] == "prefix_cache.json"


@dataclasses.dataclass
class Failure:
    """Fails a save at the nth of its changes of the disk; what it writes just then is there by half.

    Attributes:
      at: n, from 1 on.
      error: that is raised.
      is_death: nothing is done after that either, as by a process that was killed.
    """

    at: int
    error: BaseException
    is_death: bool
    calls: list[str] = dataclasses.field(default_factory=list)

    def install(self, patch: pytest.MonkeyPatch) -> None:
        for owner, name in (
            (pathlib.Path, "mkdir"),
            (pathlib.Path, "unlink"),
            (pathlib.Path, "write_bytes"),
            (safetensors_write, "write"),
            (os, "fsync"),
            (os, "replace"),
        ):
            patch.setattr(owner, name, self._failing(getattr(owner, name), name))

    def _failing(self, real: Callable, name: str) -> Callable:
        def call(*arguments, **options):
            self.calls.append(name)
            if len(self.calls) < self.at or (len(self.calls) > self.at and not self.is_death):
                return real(*arguments, **options)
            if len(self.calls) == self.at and name.startswith("write"):
                real(*arguments, **options)
                os.truncate(arguments[0], arguments[0].stat().st_size // 2)
            raise self.error

        return call


class Killed(BaseException):
    """What stands for the end of the process."""


@pytest.mark.parametrize("is_death", [True, False], ids=["killed", "fails"])
@pytest.mark.parametrize("is_first", [True, False], ids=["first save", "later save"])
def test_save_that_ends_at_any_point_leaves_the_old_or_the_new(is_first, is_death, old, new, tmp_path, monkeypatch):
    found, before, calls = [], None if is_first else OLD, []
    for at in itertools.count(1):
        folder = tmp_path / str(at) / "prefixes"
        if not is_first:
            old.save(folder)
        failure = Failure(at, Killed() if is_death else OSError(errno.ENOSPC, "No space left on device"), is_death)
        is_whole = True
        with monkeypatch.context() as patch:
            failure.install(patch)
            try:
                new.save(folder)
            except (Killed, OSError):
                is_whole = False
        if len(failure.calls) < at:  # there is no such point
            assert is_whole and is_clean(folder)
            break
        calls = failure.calls
        found.append(loaded_prompt(folder))
        if not is_death and calls[at - 1] != "unlink":
            assert not {".pages", ".json"} & files(folder).keys()
        new.save(folder)
        assert loaded_prompt(folder) == NEW and is_clean(folder)
    # The new one counts from the second rename on, with which the JSON file gets its name.
    last_rename = [place for place, name in enumerate(calls, start=1) if name == "replace"][1]
    assert found == [before] * last_rename + [NEW] * (len(found) - last_rename)
    # Both files are on the disk before they get their names, and each name is before what relies on it.
    assert [name for name in calls if name in ("fsync", "replace")] == [*["fsync"] * 2, *["replace", "fsync"] * 2]


@pytest.mark.parametrize("names", [(), *((name,) for name in LEFTOVERS), LEFTOVERS], ids=str)
def test_folder_with_nothing_but_leftovers_is_new(names, new, tmp_path):
    for name in names:
        (tmp_path / name).write_bytes(b"cut of")
    assert not prefix_folder.is_held(tmp_path) and not prefix_folder.prepare(tmp_path)
    assert set(names) <= files(tmp_path).keys()  # they go with a save, not before
    new.save(tmp_path)
    assert loaded_prompt(tmp_path) == NEW and is_clean(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "notes.txt",
        "config.json",
        "json",
        ".pagesx",
        ".json.bak",
        ".pages.d",
        ".git",
        "pages-0a.safetensors",
        f"{PAGES_NAME}.old",
    ],
)
def test_folder_with_files_of_others_is_refused_and_left_alone(name, new, tmp_path):
    for own in (*LEFTOVERS, name):
        (tmp_path / own).write_bytes(b"dear")
    before = files(tmp_path)
    for act in (prefix_folder.is_held, prefix_folder.prepare, new.save):
        with pytest.raises(ValueError) as info:
            act(tmp_path)
        expected = "expected a prefix cache, or a new or an empty folder, got one that holds"
        assert str(info.value) == f"{tmp_path}: {expected} {name!r}; give another"
    assert files(tmp_path) == before


def test_files_of_others_beside_a_prefix_cache_stay(old, new, tmp_path):
    old.save(tmp_path)
    (tmp_path / "notes.txt").write_text("about these prompts")
    assert loaded_prompt(tmp_path) == OLD
    new.save(tmp_path)
    assert loaded_prompt(tmp_path) == NEW and files(tmp_path)["notes.txt"] == b"about these prompts"
    assert len(files(tmp_path)) == 4


def test_folder_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("a file")
    for folder, message in (
        (tmp_path / "file", "expected a folder that can be read, got: Not a directory; give another"),
        (tmp_path / "file" / "below", "expected a folder that can be read, got: Not a directory; give another"),
        (pathlib.Path("/proc/jdecode"), "expected a folder that can be written, got: "),  # for root, too
    ):
        with pytest.raises(ValueError) as info:
            prefix_folder.prepare(folder)
        assert str(info.value).startswith(f"{folder}: {message}") and str(info.value).endswith("; give another")
    assert files(tmp_path) == {"file": b"a file"}

    for owner, name, error in (
        (fcntl, "flock", OSError(errno.ENOLCK, "No locks available")),
        (tempfile, "TemporaryFile", OSError(errno.EROFS, "Read-only file system")),  # though the lock is there
    ):

        def fail(*arguments, error=error, **options):
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(owner, name, fail)
            with pytest.raises(ValueError, match=f"new: expected a folder that can be written, got: {error.strerror};"):
                prefix_folder.prepare(tmp_path / "new")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_folder_without_the_right_to_write_is_refused(old, tmp_path):
    old.save(tmp_path)
    tmp_path.chmod(0o555)
    try:
        assert loaded_prompt(tmp_path) == OLD  # to read it takes no right to write
        with pytest.raises(ValueError, match="expected a folder that can be written, got: Permission denied"):
            prefix_folder.prepare(tmp_path)
    finally:
        tmp_path.chmod(0o755)


# Several runs.


def test_save_is_alone_from_its_first_byte_to_its_last(old, new, tmp_path, monkeypatch):
    old.save(tmp_path)
    seen = []

    def watched(real: Callable, name: str) -> Callable:
        def call(*arguments, **options):
            with (tmp_path / ".lock").open("ab") as file, pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            seen.append(name)
            return real(*arguments, **options)

        return call

    with monkeypatch.context() as patch:
        for owner, name in ((safetensors_write, "write"), (os, "replace"), (pathlib.Path, "unlink")):
            patch.setattr(owner, name, watched(getattr(owner, name), name))
        new.save(tmp_path)
    assert seen == ["unlink"] * 2 + ["write"] + ["replace"] * 2 + ["unlink"] * 3
    with (tmp_path / ".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # nobody has it now


def test_save_waits_for_another_and_is_the_one_that_stays(old, new, tmp_path):
    old.save(tmp_path)
    with prefix_folder.alone(tmp_path):
        before = files(tmp_path)
        assert prefix_folder.prepare(tmp_path)  # who only begins waits for nobody
        waiting = threading.Thread(target=new.save, args=(tmp_path,))
        waiting.start()
        waiting.join(0.3)
        assert waiting.is_alive() and files(tmp_path) == before
    waiting.join(60)
    assert not waiting.is_alive() and loaded_prompt(tmp_path) == NEW and is_clean(tmp_path)


@pytest.mark.parametrize("between", ["JSON and pages", "digest and values"])
def test_what_is_saved_while_another_loads_is_loaded_whole(between, old, new, tmp_path, monkeypatch):
    old.save(tmp_path)
    owner, name = {"JSON and pages": (prefix_files, "fill"), "digest and values": (prefix_files, "_whole_leaf")}[
        between
    ]
    real, calls = getattr(owner, name), []

    def overtaken(*arguments):
        calls.append(name)
        if len(calls) == 1:
            new.save(tmp_path)
        return real(*arguments)

    monkeypatch.setattr(owner, name, overtaken)
    loaded = LM.load_prefix_cache(tmp_path)
    assert check(loaded, [NEW]) == len(NEW) - 1 and check(loaded, [OLD]) == 0
