"""What every test relies on: eight CPU devices, strict shapes, one compilation cache, and where real models lie."""

import os
import pathlib
import sys

import pytest

NUM_DEVICES = 8
REAL_MODELS = {"smollm2": "smollm2-135m-instruct.q4_1.gguf", "gemma3": "gemma-3-270m.q4_k_m.gguf"}


def _prepare_environment() -> None:
    """Sets what jax reads when it is imported; commands that a test starts inherit it."""
    if "jax" in sys.modules:
        raise pytest.UsageError("tests/conftest.py: jax was imported before its environment was set")
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={NUM_DEVICES}".strip()
    base = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    # One for all workers: what another has compiled need not be compiled again. (An entry half written is, once more.)
    # The path is part of every program's key, so another path begins anew.
    os.environ.setdefault("JDECODE_CACHE", str(base / "jdecode-tests" / "main"))


_prepare_environment()

import jax  # noqa: E402

from jdecode import compilation_cache  # noqa: E402

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_enable_x64", False)
compilation_cache.enable(min_compile_seconds=0.05)


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Drops what a module has compiled: a program takes hundreds of memory maps, and a process may have 65,530."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def real_model_folder() -> pathlib.Path:
    """The folder of the real models, as tests/fetch_models.py leaves it; skips the test when it is absent."""
    folder = pathlib.Path(os.environ.get("JDECODE_TEST_MODELS") or "~/.cache/jdecode-test-models").expanduser()
    missing = [name for name in REAL_MODELS.values() if not (folder / name).is_file()]
    if missing:
        pytest.skip(f"no {' and no '.join(missing)} in {folder}: run `python tests/fetch_models.py`")
    return folder


@pytest.fixture(scope="session")
def smollm2_gguf(real_model_folder: pathlib.Path) -> pathlib.Path:
    """The file of SmolLM2-135M-Instruct (Llama architecture, byte-level vocabulary, chat template)."""
    return real_model_folder / REAL_MODELS["smollm2"]


@pytest.fixture(scope="session")
def gemma3_gguf(real_model_folder: pathlib.Path) -> pathlib.Path:
    """The file of Gemma-3-270M (five local layers to one global, sentencepiece-type vocabulary)."""
    return real_model_folder / REAL_MODELS["gemma3"]
