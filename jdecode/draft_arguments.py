"""The flags of speculative decoding, which several front doors share."""

import argparse
import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jdecode import command_line, config, flag_names, streaming

if TYPE_CHECKING:
    from jdecode import language_model, request
    from jdecode.weights import checkpoint

NO_DRAFT = "none"
# Those of jdecode.drafts, which imports jax; a test holds them together.
NGRAM, LAYER_SKIP = DRAFTS_WITHOUT_WEIGHTS = ("ngram", "layer_skip")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of speculative decoding."""
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--draft",
        metavar="NAME_OR_PATH",
        type=command_line.name_text,
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


def load_models(
    chosen: command_line.Settings,
    own: config.SpeculativeConfig,
    opened: "checkpoint.Checkpoint | None" = None,
) -> "tuple[language_model.LanguageModel, request.DraftOptions]":
    """Loads the model, and the draft where it is one; whether they fit is checked before any weights are read.

    Args:
      opened: the model, where it is open already.

    Returns:
      The model, and the options of ``LanguageModel.stream`` about the draft.

    Raises:
      ValueError, FileNotFoundError: weights cannot be read, or the draft does not fit.
    """
    draft: Any = own.draft
    if draft is None:
        return command_line.load_model(chosen, opened), {}
    from jdecode.parallel import mesh as mesh_lib  # late: it imports jax

    mesh_lib.make_mesh(chosen.run.mesh)  # devices that are not there are no fault of the draft
    _check_cache(chosen.run.cache, own.num_draft_tokens)
    if draft != NGRAM:
        checked, opened = _checked(chosen, draft, opened)
        if draft != LAYER_SKIP:
            with _as_draft():  # the smaller one first: its faults show sooner
                draft = _windowed(command_line.load_weights(chosen, checked), chosen.run.streaming)
    lm = command_line.load_model(chosen, opened)
    return lm, {
        "draft": draft,
        "num_draft_tokens": own.num_draft_tokens,
        "verify": own.verify,
        "adaptive_draft": own.adaptive,
    }


def _check_cache(cache: config.CacheConfig, num_draft_tokens: int) -> None:
    """Refuses a cache that a draft does not go with."""
    from jdecode import drafts  # late: it imports jax

    with flag_names.named({"draft": "--draft", "num_draft_tokens": "--num-draft-tokens"}):
        drafts.check_cache(cache, num_draft_tokens)


def _checked(
    chosen: command_line.Settings, draft: str, target: "checkpoint.Checkpoint | None"
) -> "tuple[str | checkpoint.Checkpoint, checkpoint.Checkpoint]":
    """Opens draft and target without their weights, and refuses what does not fit; a name stays a name."""
    from jdecode import drafts  # late: it imports jax
    from jdecode.weights import checkpoint

    with _as_draft():
        opened = draft if draft in DRAFTS_WITHOUT_WEIGHTS else checkpoint.open_checkpoint(draft)
    target = checkpoint.open_checkpoint(chosen.source) if target is None else target
    own = chosen.run.streaming
    if own is not None:
        streaming.check(target.config, own)
        if isinstance(opened, checkpoint.Checkpoint) and streaming.is_wanting(opened.config):
            with _as_draft():
                streaming.check(opened.config, own)
    try:
        drafts.check_opened(target, opened)
    except ValueError as error:
        raise ValueError(f"--{error}") from None  # it begins with the word draft
    return opened, target


def _windowed(
    draft: "language_model.LanguageModel", own: config.StreamingConfig | None
) -> "language_model.LanguageModel":
    """Returns the draft with the target's window: its cache should not grow where the target's does not."""
    if own is None or not streaming.is_wanting(draft.config):
        return draft
    return draft.with_window(own.window, own.num_sinks)


@contextlib.contextmanager
def _as_draft() -> Iterator[None]:
    """Says of an error within that it is about the draft's weights."""
    try:
        yield
    except (ValueError, FileNotFoundError) as error:
        raise type(error)(f"--draft: {error}; or give {' or '.join(DRAFTS_WITHOUT_WEIGHTS)}") from None
