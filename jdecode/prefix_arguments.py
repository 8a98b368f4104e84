"""The flag that keeps the beginnings of prompts in a folder, for later runs."""

import argparse
import contextlib
import pathlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jdecode import command_line, config, flag_names, streaming
from jdecode.serving import prefix_folder

if TYPE_CHECKING:
    import jdecode
    from jdecode import language_model
    from jdecode.weights import checkpoint

FLAG = "--prefix-cache"
NUM_PAGES = 512  # of 16 tokens; what a new folder has room for
_CACHE_FLAGS = {"cache dtype": "--kv-dtype", "cache eviction": "--eviction"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flag."""
    group = parser.add_argument_group("prompts of earlier runs")
    group.add_argument(
        FLAG,
        metavar="FOLDER",
        type=command_line.plain_text,
        help="do not compute again what this prompt has in common with those kept there, and keep it there, too",
    )


def check(name: str, chosen: command_line.Settings, cache: config.CacheConfig) -> "checkpoint.Checkpoint":
    """Makes the folder, and refuses before any weights are read what can be told without them.

    Args:
      name: of the folder.
      cache: of the request.

    Returns:
      The model, opened and not loaded.

    Raises:
      ValueError: the folder cannot be written, or holds other things; or the cache cannot be kept, or not there.
    """
    from jdecode.serving import prefix_cache, prefix_files  # late: they import jax
    from jdecode.weights import checkpoint

    opened = checkpoint.open_checkpoint(chosen.source)
    own = chosen.run.streaming
    model = opened.config if own is None else streaming.with_window(opened.config, own)
    with flag_names.named(_CACHE_FLAGS):
        prefix_cache.check_copies(model, cache, "float32")  # what the model computes in decides nothing here
        with _about_folder():
            is_held = prefix_folder.prepare(pathlib.Path(name))
            held = prefix_files.load(name)[0].cache.dtype if is_held else cache.dtype
        prefix_cache.check_dtype(held if cache.dtype == "auto" else cache.dtype, held)
    return opened


def open_cache(lm: "language_model.LanguageModel", name: str, cache: config.CacheConfig) -> "jdecode.PrefixCache":
    """Loads what a folder holds; one that holds nothing yet will hold what this run keeps.

    Raises:
      ValueError: as ``LanguageModel.load_prefix_cache``.
    """
    with _about_folder():
        if prefix_folder.is_held(pathlib.Path(name)):
            return lm.load_prefix_cache(name)
    return lm.init_prefix_cache(num_pages=NUM_PAGES, cache=cache)


def save(prefix_cache: "jdecode.PrefixCache", name: str) -> None:
    """Saves after the text was printed, and says on standard error when the prompt was too long to be kept.

    Raises:
      ValueError: it cannot be written.
    """
    try:
        prefix_cache.save(name)
    except OSError as error:
        raise ValueError(
            f"{FLAG}: {name}: expected a folder that can be written, got: {error.strerror or error}; the text is "
            "whole, its prompt was not kept, and the folder holds what it held"
        ) from error
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}; the text is whole, its prompt was not kept") from error
    if prefix_cache.statistics.prompts_not_kept:
        most = prefix_cache.statistics.num_pages * prefix_cache.page_len
        print(f"prefix cache: the prompt was not kept, for it has more than {most} tokens", file=sys.stderr, flush=True)


@contextlib.contextmanager
def _about_folder() -> Iterator[None]:
    """Says of a refusal within, which begins with a path, which flag that path is of."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{FLAG}: {error}") from error
