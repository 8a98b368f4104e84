"""Writing a folder of a model: all that stands beside the weights, and the order that makes a cut write harmless.

Whatever form the weights have, the folder is a Hugging Face folder otherwise: ``config.json``, the tokenizer's files
and ``generation_config.json``. ``config.json`` is written last: a folder without it is refused, so a write that was cut
short is never taken for a model.
"""

import dataclasses
import json
import pathlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdecode import config
from jdecode.models import families, panels, parameter_shapes
from jdecode.weights import orbax_folder, parameter_tree, stored_tensor

WriteWeights = Callable[[pathlib.Path, Mapping[str, Any]], None]
"""Given the folder and the arrays by their paths, in the order of ``parameter_shapes``, writes them."""


def write(
    folder: str | pathlib.Path,
    params: Mapping[str, Any],
    model: config.ModelConfig,
    write_weights: WriteWeights,
    *,
    tokenizer_files: Sequence[str | pathlib.Path] = (),
    eos_token_ids: Sequence[int] = (),
    bos_token_id: int | None = None,
    generation_defaults: Mapping[str, Any] | None = None,
) -> None:
    """Writes a model.

    Args:
      folder: made when absent. Must hold no weights yet, as a reader could not tell old ones from new.
      params: nested dict of arrays (float32, bfloat16, float16), as ``load_weights`` returns it.
      model: the configuration of the parameters.
      write_weights: writes the checked parameters.
      tokenizer_files: copied into the folder.
      eos_token_ids: written into ``config.json``.
      bos_token_id: written into ``config.json``.
      generation_defaults: written as ``generation_config.json`` when given.

    Raises:
      ValueError: for parameters that do not fit the configuration, a configuration that the format cannot say, a
        tokenizer file that does not exist, or a folder that holds weights already.
    """
    folder = pathlib.Path(folder)
    values = config_values(model)
    arrays = _checked(params, model)
    _check_no_weights(folder)
    missing = [str(file) for file in tokenizer_files if not pathlib.Path(file).is_file()]
    if missing:
        raise ValueError(f"tokenizer_files: expected files that exist, got {missing[0]!r}")
    folder.mkdir(parents=True, exist_ok=True)
    for file in tokenizer_files:
        shutil.copyfile(file, folder / pathlib.Path(file).name)
    if generation_defaults:
        write_json(folder / "generation_config.json", generation_defaults)
    write_weights(folder, arrays)
    values["torch_dtype"] = str(arrays["embedding/weight"].dtype)
    values["bos_token_id"] = bos_token_id
    values["eos_token_id"] = list(eos_token_ids) if len(eos_token_ids) > 1 else next(iter(eos_token_ids), None)
    write_json(folder / "config.json", values)


def write_json(path: pathlib.Path, values: Mapping[str, Any]) -> None:
    """Writes one JSON object for people to read."""
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _check_no_weights(folder: pathlib.Path) -> None:
    if not folder.is_dir():
        return
    forms = {"safetensors": "*.safetensors*", "an Orbax checkpoint": f"{orbax_folder.NAME}*"}
    for form, pattern in forms.items():
        if any(folder.glob(pattern)):
            raise ValueError(f"{folder}: expected a folder without weights, got one with {form}; give a new folder")


def config_values(model: config.ModelConfig) -> dict[str, Any]:
    """Makes the mapping of ``config.json``.

    Raises:
      ValueError: reading it would not give the same configuration.
    """
    family = families.find_name(model.family)
    values = family.config_to_hugging_face(model)
    again = family.config_from_hugging_face(values)
    names = [field.name for field in dataclasses.fields(model)]
    lost = [name for name in names if getattr(model, name) != getattr(again, name)]
    if lost:
        raise ValueError(
            f"config: expected a model that the {model.family} format can describe, got one whose {', '.join(lost)} it "
            f"cannot say"
        )
    return values


def _checked(params: Mapping[str, Any], model: config.ModelConfig) -> dict[str, Any]:
    """Flattens the parameters, out of panels, and compares paths, shapes and dtypes with the configuration."""
    leaves = parameter_tree.flat(params).items()
    flat = {path: leaf.rows() if isinstance(leaf, panels.Panels) else leaf for path, leaf in leaves}
    shapes = parameter_shapes.parameter_shapes(model)
    if different := sorted(set(flat) ^ set(shapes)):
        state = "missing" if different[0] in shapes else "unknown"
        raise ValueError(f"params: expected the parameters of the configuration, got {different[0]!r} {state}")
    for path, shape in shapes.items():
        if tuple(flat[path].shape) != shape:
            raise ValueError(f"params: {path}: expected shape {shape}, got {tuple(flat[path].shape)}")
        if str(flat[path].dtype) not in stored_tensor.COMPUTE_DTYPES:
            known = ", ".join(stored_tensor.COMPUTE_DTYPES)
            raise ValueError(f"params: {path}: expected one of {known}, got {flat[path].dtype}")
    return {path: flat[path] for path in shapes}
