"""The flags of speculative decoding, which several front doors share."""

import argparse
import dataclasses
from typing import TYPE_CHECKING, Any

from jdecode import command_line, config

if TYPE_CHECKING:
    from jdecode import request

NO_DRAFT = "none"
# Those of jdecode.drafts, which imports jax; a test holds them together.
DRAFTS_WITHOUT_WEIGHTS = ("ngram", "layer_skip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of speculative decoding."""
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--draft",
        metavar="NAME_OR_PATH",
        type=command_line.plain_text,
        help="what proposes tokens: ngram, layer_skip, weights of a smaller model with the same tokens, or none",
    )
    group.add_argument(
        "--num-draft-tokens",
        metavar="G",
        type=command_line.whole_number(1, config.MOST_DRAFT_TOKENS),
        help="the most tokens proposed at once",
    )
    group.add_argument(
        "--verify",
        choices=config.VERIFY_RULES,
        help="rejection accepts most; coupled keeps the text that the seed has without a draft",
    )
    group.add_argument(
        "--adaptive-draft",
        action=argparse.BooleanOptionalAction,
        help="propose fewer tokens, or none, while few are accepted (the default)",
    )


def settings(arguments: argparse.Namespace, base: config.SpeculativeConfig) -> config.SpeculativeConfig:
    """Lays the flags of ``add_arguments`` over a config.

    Raises:
      ValueError: a flag acts on a draft, and there is none.
    """
    draft = base.draft if arguments.draft is None else arguments.draft
    draft = None if draft == NO_DRAFT else draft
    flags = {
        "num_draft_tokens": arguments.num_draft_tokens,
        "verify": arguments.verify,
        "adaptive": arguments.adaptive_draft,
    }
    given = {name: value for name, value in flags.items() if value is not None}
    if draft is None and given:
        shown = {"adaptive": "--adaptive-draft" if arguments.adaptive_draft else "--no-adaptive-draft"}
        name = next(iter(given))
        flag = shown.get(name, f"--{name.replace('_', '-')}")
        raise ValueError(f"{flag}: acts on a draft, and there is none; add --draft, or leave it out")
    return dataclasses.replace(base, draft=draft, **given)


def drafting(chosen: command_line.Settings, own: config.SpeculativeConfig) -> "request.DraftOptions":
    """Returns the options of ``LanguageModel.stream`` about the draft, which is loaded where it is a model.

    Raises:
      ValueError, FileNotFoundError: the draft's weights cannot be read.
    """
    draft: Any = own.draft
    if draft is None:
        return {}
    if draft not in DRAFTS_WITHOUT_WEIGHTS:
        from jdecode import language_model  # late: it imports jax

        mesh_config = None if chosen.run.mesh == config.MeshConfig() else chosen.run.mesh
        try:
            draft = language_model.load(draft, dtype=chosen.weight_dtype, mesh=mesh_config)
        except (ValueError, FileNotFoundError) as error:
            raise type(error)(f"--draft: {error}; or give {' or '.join(DRAFTS_WITHOUT_WEIGHTS)}") from None
    return {
        "draft": draft,
        "num_draft_tokens": own.num_draft_tokens,
        "verify": own.verify,
        "adaptive_draft": own.adaptive,
    }
