"""The corpus: which files are read, on which side of the split they lie, and what its digest tells apart."""

import dataclasses
import hashlib
import os
import pathlib
import sysconfig

import pytest

from jdecode.training import corpus, train_config

# The first eight bytes of each name's SHA-256, as `printf %s NAME | sha256sum` gives them.
HASHES = {
    "a.txt": 0x18B7CB099A9EA3F5,  # 0.0965 of 2**64
    "json/decoder.py": 0x3B2E3CB3D29D57A5,  # 0.2312
    "sub/c.txt": 0x593EE8A5728402EA,  # 0.3486
    "é.txt": 0xD0720667BFC8EEC9,  # 0.8142
    "b.txt": 0xFFA0DA5D885FBA09,  # 0.9985
}


def write(folder: pathlib.Path, names: dict[str, str | bytes]) -> None:
    for name, content in names.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)


def read(folder: pathlib.Path, share: float = 0.5, suffixes: tuple[str, ...] = (".txt",)) -> corpus.Corpus:
    return corpus.read(train_config.CorpusConfig(source=str(folder), suffixes=suffixes, held_out_share=share))


def names(documents: tuple[corpus.Document, ...]) -> list[str]:
    return [document.name for document in documents]


@pytest.mark.parametrize("name", HASHES)
def test_split_by_hash(name):
    share = HASHES[name] / 2**64
    assert not corpus.is_held_out(name, share * (1 - 1e-12))
    assert corpus.is_held_out(name, share * (1 + 1e-12))


def test_a_folder_is_split_and_ordered_by_name(tmp_path):
    write(tmp_path, {"sub/c.txt": "third", "b.txt": "second", "a.txt": "first", "é.txt": "é", "sub/d.md": "other"})
    files = read(tmp_path)
    assert files.description == str(tmp_path)
    assert files.held_out == (corpus.Document("a.txt", "first"), corpus.Document("sub/c.txt", "third"))
    assert files.train == (corpus.Document("b.txt", "second"), corpus.Document("é.txt", "é"))
    assert [document.num_bytes for document in files.train] == [6, 2]  # bytes of UTF-8, not characters


def test_suffixes_choose_the_files(tmp_path):
    # Of these names only a.txt (0.0965) is under a third; a.md is fecc..., folder.txt/x.md ac26...
    write(tmp_path, {"a.txt": "1", "b.txt": "2", "b.txt.bak": "3", "c": "4", "a.md": "5", "folder.txt/x.md": "6"})
    for suffixes, train in ((".txt",), ["b.txt"]), ((".txt", ".md"), ["a.md", "b.txt", "folder.txt/x.md"]):
        files = read(tmp_path, 0.33, suffixes)
        assert (names(files.train), names(files.held_out)) == (train, ["a.txt"])


def test_a_side_never_depends_on_other_files(tmp_path):
    few, many = tmp_path / "few", tmp_path / "many"
    write(few, {"a.txt": "1", "b.txt": "2", "sub/c.txt": "3"})
    write(many, {"a.txt": "1", "b.txt": "2", "sub/c.txt": "3", **{f"{idx}.txt": "more" for idx in range(20)}})
    for side in ("train", "held_out"):
        assert set(names(getattr(read(few), side))) < set(names(getattr(read(many), side)))


def test_content_is_text_with_unix_line_ends(tmp_path):
    write(
        tmp_path,
        {
            "a.txt": b"one\r\ntwo\rthree\n",
            "b.txt": "né\r\n",
            "sub/c.txt": b"\xff\xfe not UTF-8",
            "empty.txt": b"",
        },
    )
    files = read(tmp_path)
    assert files.held_out == (corpus.Document("a.txt", "one\ntwo\rthree\n"),)
    assert files.train == (corpus.Document("b.txt", "né\n"),)


OWN = ("os.py", "json/decoder.py", "idlelib/editor.py", "unittest/case.py", "testing.py", "latest/x.py", "config.py")
NOT_OWN = (
    "test/test_os.py",
    "idlelib/idle_test/test_x.py",
    "lib2to3/tests/data/x.py",
    "site-packages/pip/main.py",
    "dist-packages/x.py",
    "ensurepip/_bundled/pip.py",
    "json/__pycache__/decoder.py",
    "encodings/utf_8.py",
    "pydoc_data/topics.py",
    "_sysconfigdata__linux_x86_64-linux-gnu.py",
    "config-3.11-x86_64-linux-gnu/python-config.py",
)


def test_standard_library_without_tests_vendored_and_generated_files(tmp_path, monkeypatch: pytest.MonkeyPatch):
    library = tmp_path / "python3"
    write(library, {name: f"# {name}\n" for name in (*OWN, *NOT_OWN)})
    monkeypatch.setattr(sysconfig, "get_path", lambda name: {"stdlib": str(library)}[name])
    files = corpus.read(train_config.CorpusConfig(held_out_share=0.3))
    assert sorted([*names(files.train), *names(files.held_out)]) == sorted(OWN)
    assert files.description.startswith("the standard library of ") and str(tmp_path) not in files.description


def test_a_folder_of_ones_own_is_taken_whole(tmp_path):
    """What is left out of the standard library is left out of that alone."""
    write(tmp_path, {"a.txt": "1", "test/b.txt": "2", "encodings/b.txt": "3"})
    files = read(tmp_path, 0.2)
    assert sorted(names(files.train) + names(files.held_out)) == ["a.txt", "encodings/b.txt", "test/b.txt"]


def one(name: str = "n", text: str = "x") -> tuple[corpus.Document, ...]:
    return (corpus.Document(name, text),)


def test_digest_by_hand():
    files = corpus.Corpus(description="d", train=one("b.txt", "né"), held_out=one("a.txt", "k"))
    parts = [b"train", b"b.txt", b"n\xc3\xa9", b"held out", b"a.txt", b"k"]
    expected = hashlib.sha256(b"".join(bytes([len(part), 0, 0, 0, 0, 0, 0, 0]) + part for part in parts)).hexdigest()
    assert files.digest == expected


def test_digest_tells_names_sides_and_contents_apart():
    base = corpus.Corpus(description="d", train=one("a", "bc"), held_out=one("d", "e"))
    others = [
        dataclasses.replace(base, train=one("ab", "c")),  # the border between name and text
        dataclasses.replace(base, train=one("a", "bd")),
        dataclasses.replace(base, held_out=one("f", "e")),
        dataclasses.replace(base, train=base.held_out, held_out=base.train),
        dataclasses.replace(base, train=base.train + base.held_out, held_out=()),
        dataclasses.replace(base, train=(*base.train, *one("d", "e")), held_out=one("a", "bc")),
    ]
    digests = {files.digest for files in (base, *others)}
    assert len(digests) == 1 + len(others)
    assert dataclasses.replace(base, description="moved").digest == base.digest


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ({}, "got 0 to train on and 0 held out"),
        ({"a.txt": "only held out"}, "got 0 to train on and 1 held out"),
        ({"b.txt": "only to train on"}, "got 1 to train on and 0 held out"),
        ({"a.txt": "", "b.txt": "text"}, "got 1 to train on and 0 held out"),  # an empty file is none
        (
            {"a.txt": b"\xff", "b.txt": "text"},
            r"got 1 to train on and 0 held out, of .* \(1 more are no text in UTF-8\); ",
        ),
        ({"a.md": "text", "b.md": "text"}, r"of \.txt in "),
    ],
)
def test_too_few_files_are_refused(tmp_path, written, message):
    write(tmp_path, written)
    with pytest.raises(ValueError, match=message) as refused:
        read(tmp_path)
    assert str(refused.value).startswith("corpus: expected files with text on both sides of the split, got ")
    assert "\n" not in str(refused.value)


def test_a_folder_that_is_none_is_refused(tmp_path):
    write(tmp_path, {"file.txt": "x"})
    for source in (tmp_path / "absent", tmp_path / "file.txt"):
        with pytest.raises(ValueError) as refused:
            read(source)
        assert str(refused.value) == f"corpus: expected standard_library or a folder, got {str(source)!r}"


def test_files_that_are_no_text_are_counted(tmp_path):
    write(tmp_path, {"a.txt": "one", "b.txt": "two", "é.txt": b"\xff\xfe", "empty.txt": ""})
    assert read(tmp_path).num_skipped == 1


def test_a_name_that_is_no_text_is_refused(tmp_path):
    write(tmp_path, {"a.txt": "one", "b.txt": "two"})
    (pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.txt"))).write_text("three")
    with pytest.raises(ValueError) as refused:
        read(tmp_path)
    assert str(refused.value) == r"corpus: expected file names in UTF-8, got b'bad\xff.txt'; rename it"
    (pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff.txt"))).unlink()
    folder = pathlib.Path(os.fsdecode(os.fsencode(tmp_path) + b"/bad\xff"))
    folder.mkdir()
    (folder / "c.txt").write_text("three")
    with pytest.raises(ValueError) as refused:
        read(tmp_path)
    assert str(refused.value) == r"corpus: expected file names in UTF-8, got b'bad\xff/c.txt'; rename it"


def test_a_folder_that_cannot_be_read_is_refused(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """The corpus must not depend on who reads it. (Root can read any folder, so the system's answer is put in.)"""
    write(tmp_path, {"a.txt": "one", "b.txt": "two", "closed/c.txt": "three"})
    scandir = os.scandir

    def refuse(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refuse)
    with pytest.raises(
        ValueError, match=r"^corpus: expected folders that can be read, got .*closed: Permission denied$"
    ):
        read(tmp_path)
