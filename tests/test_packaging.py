"""What is shipped: dependencies by lower bounds, the configs in the wheel, and no jax for who only asks for help."""

import pathlib
import re
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
    program = "import sys, jdecode; from jdecode import config, config_file; assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_wheel_holds_the_configs_and_finds_them(tmp_path: pathlib.Path):
    pytest.importorskip("hatchling", reason="hatchling is not installed: pip install 'jdecode[test]'")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    done = subprocess.run([*command, "--wheel-dir", str(tmp_path), str(ROOT)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("jdecode-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path / "installed")
    assert {f"jdecode/configs/{path.name}" for path in (ROOT / "configs").glob("*.yaml")} <= names
    assert {str(path.relative_to(ROOT)) for path in (ROOT / "jdecode").rglob("*.py")} <= names
    assert not [name for name in names if name.startswith(("tests/", "docs/", "configs/"))]
    assert any(name.endswith("licenses/LICENSE") for name in names)

    program = (
        "import pathlib, jdecode\nfrom jdecode import config_file\n"
        "assert 'installed' in jdecode.__file__, jdecode.__file__\n"
        "print(config_file.find('gqa_small.yaml').relative_to(pathlib.Path(jdecode.__file__).parent.resolve()))\n"
        "print(len(config_file.available()))\n"
    )
    (tmp_path / "elsewhere").mkdir()
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path / "elsewhere",
        env={"PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["configs/gqa_small.yaml", str(len(list((ROOT / "configs").glob("*.yaml"))))]
