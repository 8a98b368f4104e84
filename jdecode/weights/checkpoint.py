"""A checkpoint that has been opened but not loaded: its configuration, tokens, and where each parameter lies.

All formats become one thing here, so that everything after it (loading, placing, checking) is written once.
"""

import dataclasses
import logging
import pathlib
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeVar

import numpy as np

from jdecode import config
from jdecode.models import families, parameter_shapes
from jdecode.models.families import family as family_lib
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.weights import gguf_file, hub, json_file, orbax_folder, packaged, safetensors_folder, stored_tensor

_LOG = logging.getLogger(__name__)

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model")
_GGUF_STOP_FIELDS = ("eos_token_id", "eot_token_id", "eom_token_id")

# Tensors of files that hold no weight: rope frequencies, which follow from the configuration.
_BUFFER_SUFFIXES = (".rotary_emb.inv_freq",)

_HEAD_NAME = "lm_head.weight"  # in Hugging Face files

_Tensor = TypeVar("_Tensor", bound=stored_tensor.SourceTensor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """Describes an opened checkpoint. Every tensor of the file has its place, and every parameter its tensor.

    Attributes:
      source: the folder or file that was opened.
      config: of the model.
      parameters: path to where the tensor lies; shapes have been checked.
      rope_permuted: whether query and key rows lie in the order of interleaved rope pairs.
      norm_offset: what the file adds to norm scales.
      tokenizer: ``None`` when the checkpoint has none.
      eos_token_ids: the union of what the configuration, the generation configuration and the tokenizer name.
      bos_token_id: ``None`` for none.
      generation_defaults: the generation configuration as it stands.
      notes: what a user may want to know, one sentence each.
    """

    source: pathlib.Path
    config: config.ModelConfig
    parameters: Mapping[str, stored_tensor.SourceTensor]
    rope_permuted: bool = False
    norm_offset: float = 0.0
    tokenizer: tokenizer_lib.Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation_defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def exact_dtype(self) -> str:
        """The one of ``COMPUTE_DTYPES`` that keeps every number of the files: theirs, where they have but one.

        float32 for files that mix dtypes, and for quantised ones, whose numbers are products of two or more.
        """
        names = {tensor.encoding.name for tensor in self.parameters.values()}
        return names.pop() if len(names) == 1 and names <= set(stored_tensor.COMPUTE_DTYPES) else "float32"


def open_checkpoint(source: str | pathlib.Path) -> Checkpoint:
    """Opens a checkpoint without reading its weights.

    Args:
      source: the name of a packaged model, a folder with ``config.json`` and safetensors or Orbax parameters, a
        ``.gguf`` file, or a hub id (``owner/name``) when no such path exists.

    Returns:
      The checkpoint.

    Raises:
      ValueError: one line that says what was expected, what was found, and what to do.
    """
    path = packaged.find(source) or pathlib.Path(source).expanduser()
    try:
        path.stat()
    except OSError as error:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise ValueError(f"{str(path)[:80]}: expected a readable path, got: {error.strerror}") from error
    if path.is_dir():
        return _open_folder(path)
    if path.suffix == ".gguf" and path.is_file():
        return _open_gguf(path)
    if path.exists():
        inside = f"; give its folder, {path.parent}" if path.suffix in (".safetensors", ".json") else ""
        raise ValueError(f"{path}: expected a folder or a .gguf file, got a file {path.name!r}{inside}")
    if isinstance(source, str) and hub.is_id(source):
        return _open_folder(hub.fetch(source))
    raise ValueError(
        f"{path}: expected a folder, a .gguf file, a hub id (owner/name) or a packaged model "
        f"({', '.join(packaged.names())}), got a path that does not exist"
    )


def _open_folder(folder: pathlib.Path) -> Checkpoint:
    if not (folder / "config.json").exists():
        files = sorted(path.name for path in folder.glob("*.gguf"))
        remedy = f"give the file {folder / files[0]}" if files else "give the folder of a Hugging Face checkpoint"
        if (folder / "model" / "config.json").exists():  # the folder of a training run
            remedy = f"give its {folder / 'model'}"
        raise ValueError(f"{folder}: expected config.json in the folder, got none; {remedy}")
    values = json_file.read_object(folder / "config.json")
    if "model_type" not in values:
        raise ValueError(f"{folder / 'config.json'}: expected the key 'model_type', got none; is it a model's file?")
    family = families.find(values["model_type"])
    model = family.config_from_hugging_face(values)
    generation = folder / "generation_config.json"
    defaults = json_file.read_object(generation) if generation.exists() else {}
    has_tokenizer = any((folder / name).exists() for name in _TOKENIZER_FILES)
    tokenizer = tokenizer_lib.from_folder(folder) if has_tokenizer else None
    parameters, notes = _folder_parameters(folder, family, model)
    # A text model inside another one keeps its token ids inside too.
    texts = [part for part in (values, values.get("text_config")) if isinstance(part, Mapping)]
    bos = _ids([*(part.get("bos_token_id") for part in texts), defaults.get("bos_token_id")], model, str(folder))
    return Checkpoint(
        source=folder,
        config=model,
        parameters=parameters,
        tokenizer=tokenizer,
        eos_token_ids=_ids(
            [
                *(part.get("eos_token_id") for part in texts),
                defaults.get("eos_token_id"),
                tokenizer.eos_token_ids if tokenizer is not None else None,
            ],
            model,
            str(folder),
        ),
        bos_token_id=_first(tokenizer.bos_token_id if tokenizer is not None else None, *bos),
        generation_defaults=defaults,
        notes=notes,
    )


def _folder_parameters(
    folder: pathlib.Path, family: family_lib.Family, model: config.ModelConfig
) -> tuple[Mapping[str, stored_tensor.SourceTensor], tuple[str, ...]]:
    """Finds the tensor of every parameter in a folder, and what is worth a note."""
    shapes, where = parameter_shapes.parameter_shapes(model), str(folder)
    if orbax_folder.is_held_by(folder):
        if any(folder.glob("*.safetensors*")):
            raise ValueError(
                f"{folder}: expected safetensors or Orbax parameters in {orbax_folder.NAME}, got both; which of them "
                f"count is not clear, so remove one"
            )
        return _match(orbax_folder.read_table(folder), {path: path for path in shapes}, shapes, where), ()
    tensors = safetensors_folder.read_headers(folder)
    spare = [_HEAD_NAME] if model.tie_embeddings else []
    parameters = _match(tensors, family.hugging_face_names(model), _file_shapes(shapes), where, spare)
    if model.tie_embeddings and _HEAD_NAME in tensors:
        return parameters, (_tied_head_note(tensors[_HEAD_NAME], parameters["embedding/weight"], where),)
    return parameters, ()


def _file_shapes(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    return {path: parameter_shapes.file_shape(path, shape) for path, shape in shapes.items()}


def _open_gguf(path: pathlib.Path) -> Checkpoint:
    file = gguf_file.read_header(path)
    architecture = file.fields.get("general.architecture")
    if not isinstance(architecture, str):
        raise ValueError(f"{path}: expected the field 'general.architecture', got none; the file is damaged")
    parts = file.fields.get("split.count", 0)
    if isinstance(parts, int) and parts > 1:
        raise ValueError(f"{path}: expected a whole model in one GGUF file, got one of {parts} parts; merge them first")
    family = families.find_gguf(architecture)
    shapes = {name: tensor.shape for name, tensor in file.tensors.items()}
    float32 = stored_tensor.COMPUTE_DTYPES["float32"]
    model = family.config_from_gguf(file.fields, shapes, lambda name: file.tensors[name].read_as(float32))
    used = {name: tensor for name, tensor in file.tensors.items() if name not in family.gguf_config_tensors}
    file_shapes = _file_shapes(parameter_shapes.parameter_shapes(model))
    parameters = _match(used, family.gguf_names(model), file_shapes, str(path))
    has_tokenizer = "tokenizer.ggml.model" in file.fields
    tokenizer = tokenizer_lib.from_gguf_fields(_tokenizer_fields(file.fields, path)) if has_tokenizer else None
    ids = {name: file.fields.get(f"tokenizer.ggml.{name}") for name in (*_GGUF_STOP_FIELDS, "bos_token_id")}
    stops = [*(ids[name] for name in _GGUF_STOP_FIELDS), tokenizer.eos_token_ids if tokenizer is not None else None]
    bos = _ids([ids["bos_token_id"]], model, str(path))
    return Checkpoint(
        source=path,
        config=model,
        parameters=parameters,
        rope_permuted=family.gguf_rope_permuted,
        norm_offset=family.gguf_norm_offset,
        tokenizer=tokenizer,
        eos_token_ids=_ids(stops, model, str(path)),
        bos_token_id=_first(tokenizer.bos_token_id if tokenizer is not None else None, *bos),
    )


def _tokenizer_fields(fields: Mapping[str, Any], path: pathlib.Path) -> dict[str, Any]:
    """Picks what the tokenizer reads, with the two arrays of one number a token as lists.

    The file is free to claim arrays of any length; as a list, a number takes eight times its bytes in the file, so
    the lengths are compared first.
    """
    chosen = {name: value for name, value in fields.items() if name.startswith("tokenizer.")}
    tokens = chosen.get("tokenizer.ggml.tokens")
    for name in ("tokenizer.ggml.scores", "tokenizer.ggml.token_type"):
        array = chosen.get(name)
        if array is None:
            continue
        if not isinstance(array, np.ndarray) or not isinstance(tokens, list) or len(array) != len(tokens):
            raise ValueError(f"{path}: {name}: expected one number for each token, got another count; it is damaged")
        chosen[name] = array.tolist()
    return chosen


def _match(
    tensors: Mapping[str, _Tensor],
    names: Mapping[str, str],
    shapes: Mapping[str, tuple[int, ...]],
    where: str,
    spare: Collection[str] = (),
) -> dict[str, _Tensor]:
    """Gives every parameter its tensor and checks that nothing is missing, left over, or of another shape.

    Args:
      tensors: of the checkpoint, by name.
      names: path of each parameter to the name of its tensor.
      shapes: path of each parameter to the shape of its tensor.
      where: starts the messages.
      spare: names that may be left over.
    """
    parameters = {}
    for path, expected in shapes.items():
        if names[path] not in tensors:
            tied = "; the configuration does not tie the head to the embedding" if path.startswith("head/") else ""
            raise ValueError(f"{where}: expected tensor {names[path]!r}, got none{tied}; the checkpoint is incomplete")
        tensor = tensors[names[path]]
        if tensor.shape != expected:
            raise ValueError(
                f"{where}: tensor {tensor.name!r}: expected shape {expected} by the configuration, got {tensor.shape}; "
                f"weights and configuration do not belong together"
            )
        parameters[path] = tensor
    left = sorted(set(tensors) - {tensor.name for tensor in parameters.values()} - set(spare))
    left = [name for name in left if not name.endswith(_BUFFER_SUFFIXES)]
    if left:
        raise ValueError(
            f"{where}: expected only tensors that the model uses, got {', '.join(map(repr, left[:3]))}"
            f"{f' and {len(left) - 3} more' if len(left) > 3 else ''}; the configuration does not describe this model"
        )
    return parameters


def _tied_head_note(head: stored_tensor.StoredTensor, embedding: stored_tensor.StoredTensor, where: str) -> str:
    """Compares a head that a tied model has no use for with the embedding, which it uses, as its configuration says."""
    if head.shape == embedding.shape and head.encoding == embedding.encoding and _equal(head, embedding):
        note = f"{where}: the head is tied; its own tensor lm_head.weight equals the embedding and was not loaded"
        _LOG.info(note)
        return note
    note = (
        f"{where}: the head is tied, so the embedding is used; the tensor lm_head.weight is different and was not "
        f"loaded (set tie_word_embeddings to false to use it)"
    )
    _LOG.warning(note)
    return note


def _equal(one: stored_tensor.StoredTensor, other: stored_tensor.StoredTensor) -> bool:
    """Compares the bytes of two tensors, some megabytes at a time."""
    step = 1 << 24
    with one.path.open("rb") as first, other.path.open("rb") as second:
        first.seek(one.offset)
        second.seek(other.offset)
        for start in range(0, one.num_bytes, step):
            count = min(step, one.num_bytes - start)
            if first.read(count) != second.read(count):
                return False
    return True


def _ids(values: Iterable[Any], model: config.ModelConfig, where: str) -> tuple[int, ...]:
    """Flattens numbers, lists of numbers and nothing into distinct token ids, in order."""
    ids: dict[int, None] = {}
    for value in values:
        for token_id in value if isinstance(value, list | tuple) else [value]:
            if token_id is None:
                continue
            if not isinstance(token_id, int | np.integer) or isinstance(token_id, bool):
                raise ValueError(f"{where}: expected special token ids that are whole numbers, got {token_id!r}")
            if not 0 <= token_id < model.vocab_size:
                raise ValueError(
                    f"{where}: expected special token ids from 0 to {model.vocab_size - 1}, got {token_id}; tokenizer "
                    f"and model do not belong together"
                )
            ids[int(token_id)] = None
    return tuple(ids)


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
