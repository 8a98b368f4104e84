"""The README's Python runs as it stands, and its commands are what the checks run."""

import pathlib
import re
import shutil

import pytest

ROOT = pathlib.Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_python_blocks_run_in_order(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(ROOT / "tests/golden/gguf/llama_gqa.f32.gguf", tmp_path / "model.gguf")
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": "readme"}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    result = names["result"]
    assert len(blocks) == 5
    assert result.lengths.tolist() == [8]  # pyright: ignore[reportAttributeAccessIssue]


def test_every_flag_in_the_readme_exists() -> None:
    from jdecode import bench, chat, convert, evaluate, generate, ledger, train

    doors = (bench, chat, convert, evaluate, generate, ledger, train)
    known = "".join(door.build_parser().format_help() for door in doors)
    lines = [line for line in README.splitlines() if "python -m jdecode." in line]
    flags = {flag for line in lines for flag in re.findall(r"(--[a-z-]+)", line)}
    assert len(flags) >= 10
    assert not {flag for flag in flags if flag not in known and flag != "--only"}
