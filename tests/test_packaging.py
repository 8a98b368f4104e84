"""What is shipped: dependencies by lower bounds, configs and models in the wheel, no jax for who only asks for help."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_dependencies_have_a_lower_bound_and_no_other():
    extras = [line for lines in PROJECT["optional-dependencies"].values() for line in lines]
    for requirement in [*PROJECT["dependencies"], *extras]:
        assert re.fullmatch(r"[A-Za-z0-9-]+(\[[a-z0-9]+\])?>=[0-9.]+", requirement), requirement


def test_package_without_a_front_door_imports_no_jax():
    program = (
        "import sys, jdecode; from jdecode import config, config_file; from jdecode.serving import prefix_tree; "
        "assert 'jax' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wheel_holds_configs_and_models_and_runs_from_an_empty_folder(tmp_path: pathlib.Path):
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'jdecode[test]'")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("jdecode-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    configs = {path.relative_to(ROOT) for path in (ROOT / "configs").rglob("*.yaml")}
    assert {f"jdecode/{path}" for path in configs} <= names and pathlib.Path(
        "configs/training/gqa_small.yaml"
    ) in configs
    models = {str(path.relative_to(ROOT)) for path in (ROOT / "jdecode/pretrained").rglob("*") if path.is_file()}
    assert models <= names and "jdecode/pretrained/gqa_small/model.safetensors" in models
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "jdecode").rglob("*.py")} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "configs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)

    program = (
        "import pathlib, jdecode\nfrom jdecode import config_file\n"
        "assert 'installed' in jdecode.__file__, jdecode.__file__\n"
        "print(config_file.find('gqa_small.yaml').relative_to(pathlib.Path(jdecode.__file__).parent.resolve()))\n"
        "print(len(config_file.available()), len(config_file.available('training')))\n"
    )
    done = _run_installed(tmp_path, ["-c", program])
    counts = [str(len(list((ROOT / folder).glob("*.yaml")))) for folder in ("configs", "configs/training")]
    assert done.stdout.split() == ["configs/gqa_small.yaml", *counts]

    flags = ["--config", "gqa_small.yaml", "--temperature", "0", "--max-new-tokens", "5"]
    done = _run_installed(tmp_path, ["-m", "jdecode.generate", *flags, "--prompt", "def read_file(path):"])
    assert done.stdout.startswith("def read_file(path):\n    ")


def _run_installed(folder: pathlib.Path, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Runs Python in an empty folder, where only the unpacked wheel and its dependencies can be imported."""
    empty = folder / "empty"
    shutil.rmtree(empty, ignore_errors=True)
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(folder / "installed")}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=empty, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not list(empty.iterdir())
    return done
