"""The fields of GGUF files that all architectures share."""

import re
from collections.abc import Mapping
from typing import Any

from jdecode import config
from jdecode.models.families import strict_fields

_BLOCK = re.compile(r"blk\.(\d+)\.")


def architecture_fields(values: Mapping[str, Any]) -> strict_fields.StrictFields:
    """Picks the fields under the architecture's name, which are those that change what the model computes.

    Args:
      values: all fields of the file.

    Returns:
      The fields without the prefix ``<architecture>.``.
    """
    prefix = f"{values['general.architecture']}."
    return strict_fields.StrictFields(
        {name.removeprefix(prefix): value for name, value in values.items() if name.startswith(prefix)},
        f"GGUF fields {prefix}*",
    )


def sizes(fields: strict_fields.StrictFields, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Reads the sizes of the model and checks them against the tensors where they say the same.

    Args:
      fields: of ``architecture_fields``.
      shapes: tensor name to shape.

    Returns:
      The size arguments of ``ModelConfig``, with ``max_positions`` and ``num_layers``.

    Raises:
      ValueError: for a missing or malformed size, or one that contradicts the tensors.
    """
    num_layers = fields.take_count("block_count", largest=strict_fields.MAX_LAYERS)
    blocks = {int(found.group(1)) for name in shapes if (found := _BLOCK.match(name))}
    if blocks != set(range(num_layers)):
        raise ValueError(
            f"{fields.where}: expected tensors of the blocks 0 to {num_layers - 1} (block_count {num_layers}), got "
            f"{len(blocks)} blocks; the file is damaged or incomplete"
        )
    if "token_embd.weight" not in shapes:
        raise ValueError("GGUF: expected the tensor token_embd.weight, got none; the file holds no language model")
    vocab_size = fields.take_count("vocab_size", shapes["token_embd.weight"][0])
    hidden_size = fields.take_count("embedding_length")
    num_heads = fields.take_count("attention.head_count")
    head_dim = fields.take_count("attention.key_length", None)
    if head_dim is None:
        if hidden_size % num_heads:
            raise ValueError(
                f"{fields.where}: expected embedding_length to be a multiple of attention.head_count {num_heads} when "
                f"attention.key_length is not given, got {hidden_size}"
            )
        head_dim = hidden_size // num_heads
    fields.expect("attention.value_length", head_dim, why="keys and values have one width")
    fields.expect("rope.dimension_count", head_dim, why="the whole head is rotated")
    return {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": fields.take_count("feed_forward_length"),
        "num_heads": num_heads,
        "num_kv_heads": fields.take_count("attention.head_count_kv", num_heads),
        "head_dim": head_dim,
        "max_positions": fields.take_count("context_length", 2048),
        "num_layers": num_layers,
    }


def rope(fields: strict_fields.StrictFields, theta: float) -> config.RopeConfig:
    """Reads rope scaling: none, or linear under its newer and its older key.

    Args:
      fields: of ``architecture_fields``.
      theta: base of the frequencies.

    Returns:
      The settings.

    Raises:
      ValueError: for another type of scaling.
    """
    kind = fields.take_choice("rope.scaling.type", {"none": "none", "linear": "linear"}, "none")
    factor = fields.take_number("rope.scaling.factor", None)
    old_factor = fields.take_number("rope.scale_linear", None)
    if kind == "none":
        # The older key needs no type beside it; the newer factor without a type scales linearly too.
        factor = old_factor if factor is None else factor
        if factor is None or factor == 1.0:
            return config.RopeConfig(theta=theta)
    elif factor is None:
        raise ValueError(f"{fields.where}: expected rope.scaling.factor beside rope.scaling.type {kind}, got none")
    return config.RopeConfig(theta=theta, scaling="linear", factor=factor)
