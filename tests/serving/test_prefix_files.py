"""Prefix caches that are saved and loaded: the same pages, the same tree, and one line for whatever is wrong."""

import hashlib
import json
import os
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from jdecode import config as config_lib
from jdecode.serving import prefix_files
from tests.serving.prefix_reading import LM, VOCAB, check, init, make_lm, text

INT8 = config_lib.CacheConfig(dtype="int8")


def filled(cache: config_lib.CacheConfig = config_lib.CacheConfig(), num_pages: int = 40):
    prefixes = init(num_pages=num_pages, cache=cache, salt="tenant")
    for prompt in ([*text(19), VOCAB - 1], text(7, seed=3), [*text(19)[:9], 4, 4, 4]):
        check(prefixes, [prompt], cache)
    check(prefixes.with_salt(None), [text(5, seed=4)], cache)
    return prefixes


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> pathlib.Path:
    """A folder with a prefix cache that nobody changes."""
    folder = tmp_path_factory.mktemp("saved") / "prefixes"
    filled().save(folder)
    return folder


@pytest.fixture
def folder(saved, tmp_path) -> pathlib.Path:
    """A copy of it."""
    return shutil.copytree(saved, tmp_path / "copy")


def pages_file(folder: pathlib.Path) -> pathlib.Path:
    (path,) = folder.glob("pages-*.safetensors")
    return path


def change(folder: pathlib.Path, edit, *, is_signed: bool = True) -> None:
    """Edits the JSON file, and brings its digest up to date as somebody who knows the format would."""
    path = folder / prefix_files.JSON_NAME
    values = json.loads(path.read_text())
    edit(values)
    if is_signed:
        values.pop("digest", None)
        text = json.dumps(values, sort_keys=True).encode()
        values["digest"] = hashlib.blake2b(text, digest_size=32).hexdigest()
    path.write_text(json.dumps(values))


def refuse(folder: pathlib.Path, match: str, lm=LM) -> None:
    with pytest.raises(ValueError, match=match) as info:
        lm.load_prefix_cache(folder)
    assert "\n" not in str(info.value) and str(folder) in str(info.value)


@pytest.mark.parametrize("cache", [config_lib.CacheConfig(), INT8], ids=["float32", "int8"])
def test_loaded_is_as_saved(cache, tmp_path):
    prefixes = filled(cache)
    prefixes.save(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [pages_file(tmp_path).name, "prefix_cache.json"]
    assert b"tenant" not in (tmp_path / "prefix_cache.json").read_bytes()
    # The file is one that another reader of the format reads, and holds what is kept and nothing else.
    arrays = safetensors.numpy.load_file(pages_file(tmp_path))
    assert {len(array) for array in arrays.values()} == {prefixes.statistics.pages_held}
    loaded = LM.load_prefix_cache(tmp_path, salt="tenant")
    before, after = prefixes._store, loaded._store
    assert [(node.tokens, node.parent, node.intact_from, node.last_use) for node in before.tree.saved()] == [
        (node.tokens, node.parent, node.intact_from, node.last_use) for node in after.tree.saved()
    ]
    for old, new in zip(before.tree.saved(), after.tree.saved(), strict=True):
        for old_leaf, new_leaf in zip(
            jax.tree.leaves(before.device.stores), jax.tree.leaves(after.device.stores), strict=True
        ):
            np.testing.assert_array_equal(np.asarray(old_leaf)[list(old.pages)], np.asarray(new_leaf)[list(new.pages)])
    assert loaded.statistics.pages_held == prefixes.statistics.pages_held
    assert loaded.statistics.num_pages == 40 and loaded.statistics.prompts == 0
    assert check(loaded, [[*text(19), VOCAB - 1, 8]], cache) == 20
    assert check(loaded.with_salt(None), [text(5, seed=4)], cache) == 4
    assert check(LM.load_prefix_cache(tmp_path), [[*text(19), VOCAB - 1, 8]], cache) == 0


def test_what_was_used_last_stays_longest_after_loading(tmp_path):
    prefixes = init(num_pages=12)
    texts = [text(8, seed=seed) for seed in (11, 12, 13)]
    for one in [*texts, texts[0]]:
        check(prefixes, [one])
    prefixes.save(tmp_path)
    loaded = LM.load_prefix_cache(tmp_path)
    check(loaded, [text(8, seed=14)])
    assert [check(loaded, [one]) for one in (texts[2], texts[0])] == [7, 7]


def test_empty_cache_is_saved_too(tmp_path):
    init(num_pages=7).save(tmp_path)
    loaded = LM.load_prefix_cache(tmp_path)
    assert loaded.statistics == init(num_pages=7).statistics and loaded.page_len == 2


@pytest.mark.parametrize("failing", ["write", "first rename", "second rename"])
def test_failing_save_loses_nothing(failing, folder, monkeypatch):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    prefixes, renames = init(), []
    check(prefixes, [text(9, seed=8)])

    def fail(*arguments, **options):
        raise OSError(28, "No space left on device")

    def rename(source, target):
        renames.append(target)
        if len(renames) == ("first rename", "second rename").index(failing) + 1:
            fail()
        real(source, target)

    real = os.replace
    with monkeypatch.context() as patch:
        if failing == "write":
            patch.setattr(json, "dumps", fail)
        else:
            patch.setattr(os, "replace", rename)
        with pytest.raises(OSError, match="No space"):
            prefixes.save(folder)
    left = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert before.items() <= left.items() and not any(name.startswith(".") for name in left)
    assert LM.load_prefix_cache(folder, salt="tenant").statistics.pages_held == filled_pages(before)
    prefixes.save(folder)  # and what was left over goes with the next
    assert len(list(folder.iterdir())) == 2
    assert check(LM.load_prefix_cache(folder), [text(9, seed=8)]) == 8


def filled_pages(files: dict[str, bytes]) -> int:
    """Counts pages from the tokens that the JSON file lists."""
    nodes = json.loads(files[prefix_files.JSON_NAME])["nodes"]
    return sum((len(node["tokens"]) + 1) // 2 for node in nodes)


def test_missing_and_truncated_files(folder):
    path = pages_file(folder)
    data = path.read_bytes()
    for length in (0, 5, 100, len(data) - 1):
        path.write_bytes(data[:length])
        refuse(folder, "truncated or damaged|expected JSON")
    path.unlink()
    refuse(folder, "expected a readable file")
    path = folder / prefix_files.JSON_NAME
    path.write_bytes(path.read_bytes()[:-30])
    refuse(folder, "expected JSON")
    path.unlink()
    refuse(folder, "expected a readable file")


def test_changed_bytes(folder):
    path = pages_file(folder)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1  # a bit of a value
    path.write_bytes(data)
    refuse(folder, "expected the contents of its name's digest")
    data[-9] ^= 1
    path.write_bytes(data)
    change(folder, lambda values: values["nodes"][0]["tokens"].__setitem__(0, 5), is_signed=False)
    refuse(folder, "digest: expected that of the contents")


def test_other_models_and_dtypes_are_refused(folder):
    refuse(folder, "expected a prefix cache of this model", make_lm(seed=9))
    change(folder, lambda values: values["cache"].update(dtype="int8"))
    refuse(folder, "it is another cache's")


@pytest.mark.parametrize(
    "edit, match",
    [
        (lambda values: values.update(format="jdecode.prefix_cache.0"), "format: expected"),
        (lambda values: values.update(more=1), "expected the fields"),
        (lambda values: values.update(num_pages=3), "expected at most 3 pages"),
        (lambda values: values.update(num_pages=-1), "num_pages: expected"),
        (lambda values: values.update(num_pages=2**50), "memory: expected"),
        (lambda values: values.update(page_len=0), "page_len: expected"),
        (lambda values: values.update(page_len=4), "expected whole pages|another cache's"),
        (lambda values: values.update(pages_file="../../etc/passwd"), "pages_file: expected"),
        (lambda values: values.update(nodes=[{}]), "it is damaged"),
        (lambda values: values.update(namespaces=[]), "expected one of the namespaces"),
        (lambda values: values["cache"].update(layout="other"), "cache layout: expected"),
        (lambda values: values["cache"].update(unknown=1), "it is damaged"),
        (lambda values: values["nodes"][0].update(parent=0), "expected its parent before it"),
        (lambda values: values["nodes"][1].update(last_use=10**6), "no later use"),
        (lambda values: values["nodes"][0].update(last_use=-1), "last use: expected|no later use"),
        (lambda values: values["nodes"][0].update(intact_from=[[4, 99]]), "expected positions"),
        (lambda values: values["nodes"][0].update(intact_from=[]), "expected positions"),
        (lambda values: values["nodes"][0]["tokens"].__setitem__(0, -1), "tokens: expected token ids"),
        (lambda values: values["nodes"][0]["tokens"].__setitem__(0, VOCAB), "expected token ids of this model"),
        (lambda values: values["nodes"][0]["tokens"].__setitem__(0, "a"), "it is damaged|tokens: expected token ids"),
        (lambda values: values["nodes"].append(values["nodes"][0]), "another cache's|no sibling begins with"),
    ],
)
def test_contents_that_make_no_sense_are_refused(edit, match, folder):
    change(folder, edit)
    refuse(folder, match)
