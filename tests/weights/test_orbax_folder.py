"""Orbax folders: written and loaded again bit by bit, on one device and over a mesh; every fault is one line."""

import json
import logging
import pathlib
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from orbax import checkpoint as ocp

import jdecode
from jdecode.weights import load, orbax_folder, orbax_save, parameter_tree, safetensors_save
from tests import tiny_model

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
SOURCES = [
    *(GOLDEN / "tiny" / name for name in ("llama_bf16", "llama_bias_tied", "gemma3_scaled", "mistral_w16")),
    GOLDEN / "gguf" / "llama_gqa.f16_q8.gguf",
]


def write(folder: pathlib.Path, name: str = "llama_gqa", *, dtype: str = "float32", **changes) -> load.LoadedWeights:
    """Writes a tiny checkpoint as an Orbax folder."""
    loaded = load.load_weights(GOLDEN / "tiny" / name, dtype=dtype)
    orbax_save.save_orbax(folder, loaded.params, loaded.config, **changes)
    return loaded


def replace_tree(folder: pathlib.Path, tree) -> None:
    """Puts another checkpoint in the place of a folder's own."""
    ocp.test_utils.erase_and_create_empty(folder / "params").rmdir()
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save((folder / "params").absolute(), args=ocp.args.PyTreeSave(tree))


def refused(source: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> str:
    """Loads what cannot be loaded; returns the message, of one line, beside which nothing was printed."""
    capfd.readouterr()
    with pytest.raises(ValueError) as caught:
        load.load_weights(source)
    message = str(caught.value)
    assert message.startswith(str(source)) and "\n" not in message and len(message) < 600
    assert capfd.readouterr() == ("", "")
    return message


def same_bits(one, other) -> bool:
    left, right = parameter_tree.flat(one), parameter_tree.flat(other)
    return set(left) == set(right) and all(
        left[path].dtype == right[path].dtype and np.asarray(left[path]).tobytes() == np.asarray(right[path]).tobytes()
        for path in left
    )


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: path.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_written_and_loaded_again(tmp_path, source, dtype):
    loaded = load.load_weights(source, dtype=dtype)
    orbax_save.save_orbax(
        tmp_path / "new" / "a folder, 20%",
        loaded.params,
        loaded.config,
        eos_token_ids=loaded.eos_token_ids,
        bos_token_id=loaded.bos_token_id,
        generation_defaults=loaded.generation_defaults,
    )
    again = load.load_weights(tmp_path / "new" / "a folder, 20%", dtype=dtype)
    assert again.config == loaded.config
    assert (again.eos_token_ids, again.bos_token_id) == (loaded.eos_token_ids, loaded.bos_token_id)
    assert again.generation_defaults == loaded.generation_defaults
    assert same_bits(again.params, loaded.params)
    assert not list((tmp_path / "new" / "a folder, 20%").glob("*.safetensors*"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_as_other_formats_are(tmp_path, dtype):
    write(tmp_path / "m")
    assert same_bits(
        load.load_weights(tmp_path / "m", dtype=dtype).params,
        load.load_weights(GOLDEN / "tiny" / "llama_gqa", dtype=dtype).params,
    )


def test_language_model_comes_with_its_tokenizer(tmp_path):
    lm = tiny_model.load_text()
    assert lm.tokenizer is not None
    lm.tokenizer.save(tmp_path / "tokenizer")
    orbax_save.save_orbax(
        tmp_path / "m",
        lm.params["params"],
        lm.config,
        tokenizer_files=sorted((tmp_path / "tokenizer").iterdir()),
        eos_token_ids=lm.end_token_ids,
    )
    again = jdecode.load(tmp_path / "m", dtype="float32")
    assert again.end_token_ids == (2,)
    assert again.encode("The rest né") == lm.encode("The rest né")
    assert again.config == lm.config
    jax.tree.map(np.testing.assert_array_equal, again.params, lm.params)


def test_over_a_mesh_and_back(tmp_path):
    """Parameters that lie on eight devices are written whole, and a folder is placed parameter by parameter."""
    source = GOLDEN / "tiny" / "llama_gqa"
    mesh = jdecode.MeshConfig(data=2, model=4)
    spread = jdecode.load(source, dtype="float32", mesh=mesh)
    query = spread.params["params"]["layers_0"]["attention"]["query"]["weight"]
    assert not query.sharding.is_fully_replicated
    orbax_save.save_orbax(tmp_path / "m", spread.params["params"], spread.config)
    loaded = load.load_weights(tmp_path / "m")
    assert same_bits(loaded.params, load.load_weights(source).params)
    assert len(loaded.params["embedding"]["weight"].sharding.device_set) == 1
    again = jdecode.load(tmp_path / "m", dtype="float32", mesh=mesh)
    assert jax.tree.map(lambda leaf: leaf.sharding, again.params) == jax.tree.map(
        lambda leaf: leaf.sharding, spread.params
    )
    assert same_bits(again.params, spread.params)


def test_one_tensor_is_read_at_a_time(tmp_path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path / "m")
    asked = []
    restore = ocp.PyTreeCheckpointHandler.restore

    def spy(self, directory, *, args):
        asked.append(list(parameter_tree.flat(args.item)))
        restored = restore(self, directory, args=args)
        assert list(parameter_tree.flat(restored)) == asked[-1]
        return restored

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "restore", spy)
    loaded = load.load_weights(tmp_path / "m")
    assert sorted(asked) == sorted([path] for path in parameter_tree.flat(loaded.params))


def test_other_formats_do_not_import_orbax():
    program = (
        "import sys\nfrom jdecode.weights import load, orbax_save, safetensors_save\n"
        f"load.load_weights({str(GOLDEN / 'gguf' / 'llama_gqa.f32.gguf')!r})\n"
        "assert not [name for name in sys.modules if name.startswith('orbax')]"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_both_forms_in_one_folder_are_refused(tmp_path, capfd):
    loaded = write(tmp_path / "m")
    safetensors_save.save_hugging_face(tmp_path / "s", loaded.params, loaded.config)
    (tmp_path / "s" / "model.safetensors").rename(tmp_path / "m" / "model.safetensors")
    assert "expected safetensors or Orbax parameters in params, got both" in refused(tmp_path / "m", capfd)


@pytest.mark.parametrize("first", ["safetensors", "orbax"])
@pytest.mark.parametrize("second", ["safetensors", "orbax"])
def test_folder_that_holds_weights_is_not_written_to(tmp_path, first, second):
    save = {"safetensors": safetensors_save.save_hugging_face, "orbax": orbax_save.save_orbax}
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa")
    save[first](tmp_path / "m", loaded.params, loaded.config)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="expected a folder without weights, got one with"):
        save[second](tmp_path / "m", loaded.params, loaded.config)
    assert sorted(tmp_path.rglob("*")) == before


def test_remains_of_a_write_that_was_killed(tmp_path, capfd):
    """Orbax writes under another name first, and config.json comes last: neither step leaves what looks whole."""
    loaded = write(tmp_path / "m")
    (tmp_path / "m" / "params").rename(tmp_path / "m" / "params.orbax-checkpoint-tmp")
    (tmp_path / "m" / "config.json").unlink()
    assert "expected config.json in the folder, got none" in refused(tmp_path / "m", capfd)
    with pytest.raises(ValueError, match="expected a folder without weights, got one with an Orbax checkpoint"):
        orbax_save.save_orbax(tmp_path / "m", loaded.params, loaded.config)


def test_write_that_fails_leaves_no_model(tmp_path, capfd, monkeypatch: pytest.MonkeyPatch):
    def fail(self, directory, *args, **arguments):
        del self, args, arguments
        raise OSError(28, "No space left on device", str(directory))

    monkeypatch.setattr(ocp.Checkpointer, "save", fail)
    with pytest.raises(ValueError) as caught:
        write(tmp_path / "m")
    assert str(caught.value).startswith(f"{tmp_path / 'm' / 'params'}: expected to write an Orbax checkpoint, got: ")
    assert "No space left on device" in str(caught.value)
    assert "expected config.json" in refused(tmp_path / "m", capfd)


def test_parameters_are_checked_before_they_are_written(tmp_path):
    loaded = load.load_weights(GOLDEN / "tiny" / "llama_gqa")
    flat = parameter_tree.flat(loaded.params)
    del flat["final_norm/scale"]
    with pytest.raises(ValueError, match="got 'final_norm/scale' missing"):
        orbax_save.save_orbax(tmp_path / "m", parameter_tree.nested(flat), loaded.config)
    assert not (tmp_path / "m").exists()


def test_tensors_that_do_not_fit_the_configuration(tmp_path, capfd):
    loaded = write(tmp_path / "m")
    flat = parameter_tree.flat(loaded.params)

    def message(**changes) -> str:
        names = {name.replace("__", "/"): leaf for name, leaf in changes.items()}
        tree = {path: leaf for path, leaf in {**flat, **names}.items() if leaf is not None}
        replace_tree(tmp_path / "m", parameter_tree.nested(tree))
        return refused(tmp_path / "m", capfd)

    assert "expected tensor 'final_norm/scale', got none" in message(final_norm__scale=None)
    assert "expected only tensors that the model uses, got 'more/bias'" in message(more__bias=jnp.ones(3))
    # (64, 8, 12) by the configuration; Hugging Face's own shape is not that of this tree
    folded = flat["layers_1/attention/output/weight"].reshape(64, 96)
    got = message(layers_1__attention__output__weight=folded)
    assert (
        "tensor 'layers_1/attention/output/weight': expected shape (64, 8, 12) by the configuration, got (64, 96)"
        in got
    )
    assert "expected float32, bfloat16 or float16, got int32" in message(final_norm__scale=jnp.ones(64, jnp.int32))
    nothing = message(final_norm__scale=jnp.full(64, jnp.nan))
    assert "params: tensor final_norm/scale: expected finite numbers, got NaN or infinity" in nothing
    assert "'final_norm/scale', which is no array" in message(final_norm__scale="text")


def test_number_that_does_not_fit_the_dtype(tmp_path):
    loaded = write(tmp_path / "m")
    flat = parameter_tree.flat(loaded.params)
    replace_tree(tmp_path / "m", parameter_tree.nested({**flat, "final_norm/scale": jnp.full(64, 7e4)}))
    with pytest.raises(
        ValueError, match="tensor final_norm/scale: expected numbers up to 65504 for float16, got 70000"
    ):
        load.load_weights(tmp_path / "m", dtype="float16")
    assert load.load_weights(tmp_path / "m").params["final_norm"]["scale"][0] == 7e4


def largest_file(folder: pathlib.Path) -> pathlib.Path:
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def cut(path: pathlib.Path) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2])


DAMAGES = {
    "no table": lambda params: (params / "_METADATA").unlink(),
    "cut table": lambda params: cut(params / "_METADATA"),
    "empty table": lambda params: (params / "_METADATA").write_text("{}"),
    "cut data": lambda params: cut(largest_file(params)),
    "no data": lambda params: largest_file(params).unlink(),
    "no folder of data": lambda params: [shutil.rmtree(path) for path in params.rglob("d")],
    "no manifest": lambda params: (params / "manifest.ocdbt").unlink(),
    "cut manifest": lambda params: cut(params / "manifest.ocdbt"),
    "nothing": lambda params: ocp.test_utils.erase_and_create_empty(params),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_checkpoint_is_one_line(tmp_path, capfd, caplog, damage):
    write(tmp_path / "m")
    DAMAGES[damage](tmp_path / "m" / "params")
    caplog.set_level(logging.INFO, logger="absl")
    message = refused(tmp_path / "m", capfd)
    assert caplog.records == [] and logging.getLogger("absl").level == logging.INFO
    assert message.startswith(f"{tmp_path / 'm' / 'params'}: ") and "expected" in message
    assert message.endswith("; the checkpoint is damaged or incomplete")


@pytest.mark.parametrize("damage", ["no manifest", "cut manifest", "no folder of data"])
def test_faults_of_all_tensors_are_found_before_orbax_reads_them_at_once(tmp_path, capfd, monkeypatch, damage):
    """Orbax's threads would go on printing, at some time, what they find after the first fault."""
    write(tmp_path / "m")
    DAMAGES[damage](tmp_path / "m" / "params")

    def fail(*arguments):
        pytest.fail(f"Orbax was asked to read {arguments[1:]}")

    monkeypatch.setattr(ocp.PyTreeCheckpointHandler, "metadata", fail)
    refused(tmp_path / "m", capfd)


def test_checkpoint_of_something_else(tmp_path, capfd):
    write(tmp_path / "m")
    replace_tree(tmp_path / "m", [jnp.ones(3), jnp.ones(2)])
    assert "expected an Orbax checkpoint of a PyTree, got: a list instead of a dict" in refused(tmp_path / "m", capfd)


def test_configuration_is_a_hugging_face_one(tmp_path):
    write(tmp_path / "m", dtype="bfloat16", eos_token_ids=(2, 5), generation_defaults={"top_p": 0.5})
    values = json.loads((tmp_path / "m" / "config.json").read_text())
    assert (values["architectures"], values["torch_dtype"]) == (["LlamaForCausalLM"], "bfloat16")
    assert values["eos_token_id"] == [2, 5]
    assert json.loads((tmp_path / "m" / "generation_config.json").read_text()) == {"top_p": 0.5}
    assert sorted(path.name for path in (tmp_path / "m").iterdir()) == [
        "config.json",
        "generation_config.json",
        "params",
    ]
    # The format's own reader finds plain nested dicts.
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        tree = checkpointer.metadata((tmp_path / "m" / orbax_folder.NAME).absolute()).item_metadata.tree
    key = tree["layers_0"]["attention"]["key"]["weight"]
    assert (key.shape, key.dtype) == ((2, 12, 64), jnp.bfloat16)
