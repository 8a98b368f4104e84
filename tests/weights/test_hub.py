"""Hub ids: what is one, and one line for whatever goes wrong; nothing here reaches a network."""

import sys

import pytest

from jdecode.weights import hub


@pytest.mark.parametrize("text", ["HuggingFaceTB/SmolLM2-135M-Instruct", "google/gemma-3-270m", "a/b", "a_b/c.d"])
def test_ids(text):
    assert hub.is_id(text)


@pytest.mark.parametrize(
    "text", ["gemma", "a/b/c", "/a/b", "./a", "../a", "~/a", "a/", "a/b.gguf", "a b/c", "a/b.safetensors", "a/b\n", ""]
)
def test_no_ids(text):
    assert not hub.is_id(text)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ValueError, match=r"owner/name: expected the package huggingface-hub.*jdecode\[hub\]"):
        hub.fetch("owner/name")


def test_whatever_fails_is_one_line(monkeypatch):
    huggingface_hub = pytest.importorskip("huggingface_hub")

    def fail(repo_id, allow_patterns):
        assert "*.safetensors" in allow_patterns and "*.json" in allow_patterns
        raise ConnectionError(f"no route to host for {repo_id}\nwith more lines")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ValueError, match=r"owner/name: .*, but: no route to host for owner/name; check") as caught:
        hub.fetch("owner/name")
    assert "\n" not in str(caught.value)


def test_fetched_folder(monkeypatch, tmp_path):
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo_id, allow_patterns: str(tmp_path))
    assert hub.fetch("owner/name") == tmp_path
