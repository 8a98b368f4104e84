"""What tells one family of models from another, as data: names in files, and readers of their configurations."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jdecode import config
from jdecode.models import parameter_shapes

# Keys of config.json that cannot change what inference computes, in any family: training settings, bookkeeping of
# the library that wrote the file, and token ids, which the loader reads separately.
IRRELEVANT_KEYS = frozenset(
    {
        # training
        "attention_dropout",
        "hidden_dropout",
        "initializer_range",
        # names and versions
        "_name_or_path",
        "name_or_path",
        "architectures",
        "transformers_version",
        "model_type",
        "transformers.js_config",
        "unsloth_fixed",
        "unsloth_version",
        "is_llama_config",
        # how the file's numbers are stored: every tensor says so itself
        "dtype",
        "torch_dtype",
        # what the other library returns and caches
        "use_cache",
        "cache_implementation",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "id2label",
        "label2id",
        # token ids: read with those of generation_config.json and of the tokenizer
        "bos_token_id",
        "eos_token_id",
        "pad_token_id",
        "unk_token_id",
    }
)

TensorReader = Callable[[str], np.ndarray]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """Describes how the files of one family map to ``ModelConfig`` and to the parameter tree.

    Name tables hold ``{i}`` where the number of the layer stands, on both sides.

    Attributes:
      name: of the family, as in ``ModelConfig.family``.
      model_types: values of ``model_type`` in ``config.json``.
      gguf_architectures: values of ``general.architecture`` in GGUF files.
      config_from_hugging_face: reads a ``config.json`` mapping; every key is used, known not to matter, or refused.
      config_to_hugging_face: the inverse, without ``dtype`` and token ids.
      config_from_gguf: reads GGUF fields, given also the shape of each tensor (as numpy sees it) and a reader of
        one tensor by name.
      hugging_face_table: parameter path to tensor name.
      gguf_table: parameter path to tensor name.
      gguf_rope_permuted: whether GGUF files hold query and key rows in the order of interleaved rope pairs.
      gguf_norm_offset: what GGUF files add to norm scales, compared with the Hugging Face file.
      gguf_config_tensors: tensors of GGUF files that ``config_from_gguf`` turns into numbers of the configuration.
    """

    name: str
    model_types: tuple[str, ...]
    gguf_architectures: tuple[str, ...]
    config_from_hugging_face: Callable[[Mapping[str, Any]], config.ModelConfig]
    config_to_hugging_face: Callable[[config.ModelConfig], dict[str, Any]]
    config_from_gguf: Callable[[Mapping[str, Any], Mapping[str, tuple[int, ...]], TensorReader], config.ModelConfig]
    hugging_face_table: Mapping[str, str]
    gguf_table: Mapping[str, str]
    gguf_rope_permuted: bool = False
    gguf_norm_offset: float = 0.0
    gguf_config_tensors: tuple[str, ...] = ()

    def hugging_face_names(self, model: config.ModelConfig) -> dict[str, str]:
        """Maps every parameter path of the model to its tensor name in Hugging Face files."""
        return _expand(self.hugging_face_table, model)

    def gguf_names(self, model: config.ModelConfig) -> dict[str, str]:
        """Maps every parameter path of the model to its tensor name in GGUF files."""
        return _expand(self.gguf_table, model)


def _expand(table: Mapping[str, str], model: config.ModelConfig) -> dict[str, str]:
    names = {}
    for path in parameter_shapes.parameter_shapes(model):
        if path.startswith("layers_"):
            layer, rest = path.removeprefix("layers_").split("/", 1)
            names[path] = table["layers_{i}/" + rest].replace("{i}", layer)
        else:
            names[path] = table[path]
    return names
