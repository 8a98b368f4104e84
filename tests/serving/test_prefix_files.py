"""Prefix caches that are saved and loaded: the same pages, the same tree, and one line for whatever is wrong."""

import hashlib
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

from jdecode import config as config_lib
from jdecode.models import digest
from jdecode.parallel import device_memory
from jdecode.serving import prefix_folder
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
    path = folder / prefix_folder.JSON_NAME
    values = json.loads(path.read_text())
    edit(values)
    if is_signed:
        values.pop("digest", None)
        text = json.dumps(values, sort_keys=True).encode()
        values["digest"] = hashlib.blake2b(text, digest_size=32).hexdigest()
    path.write_text(json.dumps(values))


def refuse(folder: pathlib.Path, message: str, lm=LM) -> None:
    """Checks that loading is refused in one line, which is the folder and then ``message`` to its end."""
    with pytest.raises(ValueError) as info:
        lm.load_prefix_cache(folder)
    assert str(info.value) == f"{folder}{message}"


@pytest.mark.parametrize("cache", [config_lib.CacheConfig(), INT8], ids=["float32", "int8"])
def test_loaded_is_as_saved(cache, tmp_path):
    prefixes = filled(cache)
    prefixes.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {".lock", pages_file(tmp_path).name, "prefix_cache.json"}
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


def test_missing_and_truncated_files(folder):
    path = pages_file(folder)
    data = path.read_bytes()
    header = int.from_bytes(data[:8], "little")
    for length in (0, 5, 100):
        path.write_bytes(data[:length])
        refuse(
            folder,
            f"/{path.name}: expected a safetensors header inside the file of {length} bytes, got a header length of "
            f"{header if length else 0}; the file is truncated or damaged",
        )
    path.write_bytes(data[:-1])
    got = f"expected {len(data)} bytes from its header, got {len(data) - 1}"
    refuse(folder, f"/{path.name}: {got}; the file is truncated or damaged")
    path.unlink()
    refuse(folder, f"/{path.name}: expected a readable file, got: No such file or directory")
    path = folder / prefix_folder.JSON_NAME
    text = path.read_bytes()
    path.write_bytes(text[:-1])
    refuse(
        folder,
        f"/prefix_cache.json: expected JSON, got: Expecting ',' delimiter: line 1 column {len(text)} (char "
        f"{len(text) - 1}); the file is damaged or incomplete",
    )
    path.unlink()
    refuse(folder, "/prefix_cache.json: expected a readable file, got: No such file or directory")


def test_changed_bytes(folder):
    path = pages_file(folder)
    data = bytearray(path.read_bytes())
    data[-9] ^= 1  # a bit of a value
    path.write_bytes(data)
    refuse(folder, f"/{path.name}: expected the contents of its name's digest, got others; it is damaged")
    data[-9] ^= 1
    path.write_bytes(data)
    change(folder, lambda values: values["nodes"][0]["tokens"].__setitem__(0, 5), is_signed=False)
    refuse(folder, "/prefix_cache.json: digest: expected that of the contents, got another; it is damaged")


def test_other_models_and_dtypes_are_refused(folder):
    other = make_lm(seed=9)
    ours, theirs = (digest.model_digest(lm.config, "float32", lm.params)[:12] for lm in (LM, other))
    refuse(
        folder,
        f": expected a prefix cache of this model in float32 (digest {theirs}), got one with digest {ours}; make a new "
        "one, or give another folder",
        other,
    )
    change(folder, lambda values: values["cache"].update(dtype="int8"))
    # Two key/value heads of six numbers lie side by side; the tokens that ``filled`` keeps take 19 pages of two.
    got = "expected ('int8', (19, 2, 12)), got ('float32', (19, 2, 12))"
    refuse(folder, f"/{pages_file(folder).name}: layers.0.keys.0: {got}; it is another cache's")


DAMAGED = "expected the fields of jdecode.prefix_cache.1, got others; it is damaged"
FIELDS = "cache, digest, format, model, namespaces, nodes, num_pages, page_len, pages_file"


@pytest.mark.parametrize(
    "edit, message",
    [
        (
            lambda values: values.update(format="jdecode.prefix_cache.0"),
            "format: expected jdecode.prefix_cache.1, got 'jdecode.prefix_cache.0'",
        ),
        (lambda values: values.update(more=1), f"expected the fields {FIELDS}, got others"),
        (lambda values: values.pop("model"), f"expected the fields {FIELDS}, got others"),
        (lambda values: values.update(num_pages=3), "expected at most 3 pages, got 19"),
        (lambda values: values.update(num_pages=-1), "num_pages: expected a count of at least 1, got -1"),
        (lambda values: values.update(page_len=0), "page_len: expected a count of at least 1, got 0"),
        (
            lambda values: values.update(page_len=4),
            "node 0: expected whole pages, or one in part as a leaf, got 6 tokens in 2 pages from position 0 on",
        ),
        (
            lambda values: values.update(pages_file="../../etc/passwd"),
            "pages_file: expected pages-<digest>.safetensors, got '../../etc/passwd'",
        ),
        (lambda values: values.update(nodes=[{}]), DAMAGED),
        (lambda values: values.update(namespaces=[]), "node: expected one of the namespaces, got none"),
        (
            lambda values: values["cache"].update(layout="other"),
            "cache layout: expected one of auto, full, paged, got 'other'",
        ),
        (lambda values: values["cache"].update(unknown=1), DAMAGED),
        (lambda values: values["nodes"][0].update(parent=0), "node 0: expected its parent before it, got 0"),
        (
            lambda values: values["nodes"][1].update(last_use=10**6),
            "node 1: expected its parent's namespace and no later use, got another",
        ),
        (
            lambda values: values["nodes"][0].update(last_use=-1),
            "node 0: last use: expected a count of at least 0, got -1",
        ),
        (
            lambda values: values["nodes"][0].update(intact_from=[[4, 7]]),
            "node 0: expected positions 0 to 6 for windows (4,), got others",
        ),
        (
            lambda values: values["nodes"][0].update(intact_from=[]),
            "node 0: expected positions 0 to 6 for windows (4,), got others",
        ),
        (
            lambda values: values["nodes"][0]["tokens"].__setitem__(0, -1),
            "tokens: expected token ids of at least 0, got -1",
        ),
        (
            lambda values: values["nodes"][0]["tokens"].__setitem__(0, "a"),
            "tokens: expected token ids of at least 0, got 'a'",
        ),
        (
            lambda values: values["nodes"][0]["tokens"].__setitem__(0, VOCAB),
            f"expected token ids of this model, got {VOCAB}",
        ),
        (
            lambda values: values["nodes"].append(values["nodes"][0]),
            "node 7: expected a page that no sibling begins with, got one that one does",
        ),
    ],
)
def test_contents_that_make_no_sense_are_refused(edit, message, folder):
    change(folder, edit)
    refuse(folder, f"/prefix_cache.json: {message}")


def test_pages_larger_than_the_memory_are_refused(folder):
    change(folder, lambda values: values.update(num_pages=2**50))
    # Three layers, keys and values, of two tokens by two heads by six float32: 576 bytes a page.
    size = 2**50 * 576 / 2**30
    limit = device_memory.total_bytes(None)
    assert limit is not None
    refuse(
        folder,
        f"/prefix_cache.json: memory: expected at most {limit / 2**30:.1f} GiB, got {size:.1f} GiB for a prefix cache "
        f"of {2**50} pages x 2 slots; take fewer, or a narrower cache dtype",
    )
