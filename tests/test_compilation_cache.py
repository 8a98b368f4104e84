"""Where compiled programs are kept, and that a run never fails because they cannot be."""

import os
import pathlib
import subprocess
import sys

import pytest

from jdecode import compilation_cache

PROGRAM = """
import sys
from jdecode import compilation_cache
folder = compilation_cache.enable()
import jax, jax.numpy as jnp
assert float(jax.jit(lambda x: jnp.sin(x) @ x)(jnp.ones((7, 7)))[0, 0]) > 5
print(folder)
"""


def run_program(**variables: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("JDECODE", "XDG"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=environment | variables, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_programs_are_kept_in_the_folder_named(tmp_path: pathlib.Path):
    folder = pathlib.Path(run_program(JDECODE_CACHE=str(tmp_path / "own")))
    assert folder.is_relative_to(tmp_path / "own" / "compilation")
    assert any(folder.iterdir())


def test_folder_that_cannot_be_made_keeps_nothing(tmp_path: pathlib.Path):
    (tmp_path / "file").write_text("not a folder")
    assert run_program(JDECODE_CACHE=str(tmp_path / "file")) == "None"


def test_switch_turns_it_off(tmp_path: pathlib.Path):
    assert run_program(JDECODE_CACHE=str(tmp_path / "own"), JDECODE_COMPILATION_CACHE="off") == "None"
    assert not (tmp_path / "own").exists()


def test_switch_refuses_other_words(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JDECODE_COMPILATION_CACHE", "perhaps")
    with pytest.raises(ValueError, match="JDECODE_COMPILATION_CACHE: expected on or off, got 'perhaps'"):
        compilation_cache.enable()


def test_folder_of_jax_wins(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path):
    monkeypatch.delenv("JDECODE_COMPILATION_CACHE", raising=False)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path))
    assert compilation_cache.enable() == tmp_path


def test_root_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("JDECODE_CACHE", "/some/where")
    assert compilation_cache.root_folder() == pathlib.Path("/some/where")
    monkeypatch.delenv("JDECODE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/else")
    assert compilation_cache.root_folder() == pathlib.Path("/else/jdecode")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert compilation_cache.root_folder() == pathlib.Path("/home/someone/.cache/jdecode")
