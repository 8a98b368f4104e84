"""What the front doors share: flags, the config beneath them, and how a command ends.

A flag wins over the config, and the config over the defaults. Everything that can be checked without the weights is
checked before they are read. This module imports no jax at its top, so that ``--help`` and bad flags answer at once.

A command ends with 0; with 2 and one line on standard error when the user can mend it; with 130 after Ctrl-C; and
quietly with 0 when the reader of its output goes away.
"""

import argparse
import contextlib
import dataclasses
import math
import os
import pathlib
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jdecode import compilation_cache, config, config_file, flag_names, streaming

if TYPE_CHECKING:
    from jdecode import language_model
    from jdecode.weights import checkpoint

TRACEBACK_VARIABLE = "JDECODE_TRACEBACK"  # set to anything: errors keep their traceback
INTERRUPTED_STATUS = 130  # what shells report for Ctrl-C
COUNT_LIMIT = 2**31 - 1  # counts and ids are held in 32 bits
DTYPES = ("auto", "float32", "bfloat16", "float16")  # of weights, and of cached keys and values
LATER_DTYPES = ("int8",)  # named by the flags already, refused by this version
MOST_NEW_TOKENS = 2**24  # that of jdecode.request, which imports jax; a test holds them together
ANY_MODEL_HINT = "run the packaged model with --config gqa_small.yaml, or another with --weights FILE.gguf"
_SAMPLING_FLAGS: tuple[tuple[str, str, str], ...] = (
    ("temperature", "T", "divides the logits; 0 takes the most likely token"),
    ("top_k", "K", "draw from the K most likely tokens; 0 for all"),
    ("top_p", "P", "draw from the fewest tokens whose probabilities reach P; 1 for all"),
    ("min_p", "P", "draw from tokens at least P times as likely as the likeliest; 0 for all"),
    ("typical_p", "P", "draw from the tokens of the most typical surprise, up to P; 1 for all"),
    ("repetition_penalty", "R", "make tokens of the prompt and the output less likely; 1 for none"),
    ("presence_penalty", "R", "subtracted once for a token that the output holds"),
    ("frequency_penalty", "R", "subtracted for each time that the output holds a token"),
    ("no_repeat_ngram_size", "N", "never write the same N tokens twice; 0 for off"),
    ("min_new_tokens", "N", "do not stop by an end token before N tokens"),
    ("seed", "S", "of the draws; when not given a fresh one, in benchmarks 0"),
)
_WHOLE_SAMPLING_FLAGS = ("top_k", "no_repeat_ngram_size", "min_new_tokens", "seed")


class ArgumentParser(argparse.ArgumentParser):
    """Parses flags; a mistake is one line on standard error and exit status 2."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter, **arguments)

    def error(self, message: str) -> NoReturn:
        name = self.prog.removeprefix("python -m ")
        self.exit(2, f"{name}: error: {_one_line(message)}\n")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Holds the config with the flags laid over it.

    Attributes:
      run: the config; its sampling, cache, streaming, mesh and ``max_new_tokens`` are those that count.
      source: where the weights come from.
      weight_dtype: of the weights in memory.
      capacity: cache slots a row; ``None`` for what the request needs.
    """

    run: config.RunConfig
    source: str
    weight_dtype: str
    capacity: int | None


def whole_number(low: int = 0, high: int = COUNT_LIMIT) -> Callable[[str], int]:
    """Returns an argparse type for whole numbers from ``low`` to ``high``."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = None
        if value is None or not low <= value <= high:
            raise argparse.ArgumentTypeError(f"expected a whole number from {low} to {high}, got {text!r}")
        return value

    return parse


def dtype(text: str) -> str:
    """Parses the name of a dtype for argparse."""
    if text in DTYPES:
        return text
    later = " (not in this version)" if text in LATER_DTYPES else ""
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(DTYPES)}, got {text!r}{later}")


def cache_dtype(text: str) -> str:
    """Parses what keys and values are stored in for argparse."""
    if text in config.CACHE_DTYPES:
        return text
    raise argparse.ArgumentTypeError(f"expected one of {', '.join(config.CACHE_DTYPES)}, got {text!r}")


def number(text: str) -> float:
    """Parses a number for argparse; whether it makes sense is for the config to say."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, got {text!r}") from None


def unicode_text(text: str) -> str:
    """Parses a text for argparse; bytes that are no text reach Python as lone surrogates, which no tokenizer knows."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise argparse.ArgumentTypeError(
            f"expected text in UTF-8, got other bytes at character {error.start}"
        ) from None
    return text


def plain_text(text: str) -> str:
    """Parses a text for argparse that must not be empty."""
    if not text:
        raise argparse.ArgumentTypeError("expected some text, got none")
    return unicode_text(text)


def name_text(text: str) -> str:
    """Parses the name of something for argparse, which no blank is."""
    if text and not text.strip():
        raise argparse.ArgumentTypeError(f"expected some text, got {text!r}")
    return plain_text(text)


def mesh(text: str) -> config.MeshConfig:
    """Parses ``data=1,model=8`` for argparse."""
    axes: dict[str, int] = {}
    known = [field.name for field in dataclasses.fields(config.MeshConfig)]
    for part in text.split(","):
        name, _, count = part.strip().partition("=")
        if name not in known or name in axes or not count.isdecimal() or not 1 <= int(count) <= COUNT_LIMIT:
            raise argparse.ArgumentTypeError(f"expected axes such as data=1,model=8, each once, got {text!r}")
        axes[name] = int(count)
    return config.MeshConfig(**axes)


def read_text(flag: str, name: str) -> str:
    """Reads a file in UTF-8 that a flag names, to its last byte; ``-`` is standard input.

    Raises:
      ValueError, OSError: it holds other bytes, or cannot be read.
    """
    data = sys.stdin.buffer.read() if name == "-" else pathlib.Path(name).read_bytes()
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ValueError(f"{flag} {name}: expected text in UTF-8, got other bytes from byte {error.start}") from None


def check_new_folder(folder: pathlib.Path) -> None:
    """Refuses to write where something stands already: what a user has is never replaced.

    Raises:
      ValueError: it is a file, or a folder that holds anything.
    """
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder}: expected a new folder, got a file; give another name")
    if folder.is_dir() and (found := sorted(path.name for path in folder.iterdir())):
        raise ValueError(f"{folder}: expected a new or an empty folder, got one that holds {found[0]!r}; give another")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say which model runs, and how it is held."""
    group = parser.add_argument_group("model")
    group.add_argument("--config", metavar="FILE", help="a config: as given, in ./configs, or in the package")
    group.add_argument("--weights", metavar="PATH_OR_ID", help="a folder, a .gguf file or a hub id")
    group.add_argument("--weight-dtype", metavar="DTYPE", type=dtype, default="auto", help="of weights in memory")
    group.add_argument("--kv-dtype", metavar="DTYPE", type=cache_dtype, help="of cached keys and values")
    group.add_argument("--capacity", metavar="S", type=whole_number(1), help="cache slots, for prompt and output")
    group.add_argument(
        "--window", metavar="W", type=whole_number(1), help="layers without a window see the latest W tokens alone"
    )
    group.add_argument("--sinks", metavar="N", type=whole_number(), help="and the first N (default 4), beside --window")
    group.add_argument("--mesh", metavar="AXES", type=mesh, help="devices along each axis, such as data=1,model=8")


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags that say how tokens are chosen and how many."""
    group = parser.add_argument_group("sampling")
    group.add_argument(
        "--max-new-tokens", metavar="N", type=whole_number(1, MOST_NEW_TOKENS), help="the most tokens to write"
    )
    for name, metavar, text in _SAMPLING_FLAGS:
        kind = number
        if name in _WHOLE_SAMPLING_FLAGS:
            kind = whole_number(high=2**63 - 1 if name == "seed" else COUNT_LIMIT)
        group.add_argument(f"--{name.replace('_', '-')}", metavar=metavar, type=kind, help=text)


def settings(arguments: argparse.Namespace) -> Settings:
    """Lays the flags over the config, and checks all that needs no weights.

    Raises:
      ValueError, FileNotFoundError: one line that says what was expected, what was got and what to do.
    """
    if arguments.config is None and arguments.weights is None:
        raise ValueError(f"no model: expected --config or --weights, got neither; {ANY_MODEL_HINT}")
    if arguments.weights == "":
        raise ValueError("--weights: expected a folder, a .gguf file or a hub id, got an empty text")
    if arguments.config is None:
        run = config.RunConfig(weights=arguments.weights)
    else:
        run = config_file.load(arguments.config)
    source = arguments.weights or run.weights
    if source is None:
        reason = run.no_weights or "it names no weights"
        raise ValueError(f"config {run.name}: {reason}, so there is nothing to run; {ANY_MODEL_HINT}")
    run = dataclasses.replace(
        run,
        sampling=_sampling(arguments, run.sampling),
        cache=dataclasses.replace(run.cache, dtype=arguments.kv_dtype or run.cache.dtype),
        streaming=streaming_settings(arguments, run.streaming),
        mesh=arguments.mesh or run.mesh,
        max_new_tokens=arguments.max_new_tokens or run.max_new_tokens,
    )
    return Settings(run=run, source=source, weight_dtype=arguments.weight_dtype, capacity=arguments.capacity)


def streaming_settings(
    arguments: argparse.Namespace, base: config.StreamingConfig | None
) -> config.StreamingConfig | None:
    """Lays ``--window`` and ``--sinks`` over a config.

    Raises:
      ValueError: there are sinks and no window.
    """
    flags = {"window": arguments.window, "num_sinks": arguments.sinks}
    given = {name: value for name, value in flags.items() if value is not None}
    if base is not None:
        return dataclasses.replace(base, **given)
    if given and arguments.window is None:
        raise ValueError("--sinks: expected --window beside it, got none; add one, or leave it out")
    return config.StreamingConfig(**given) if given else None


def _sampling(arguments: argparse.Namespace, base: config.SamplingConfig) -> config.SamplingConfig:
    given = {name: getattr(arguments, name) for name, _, _ in _SAMPLING_FLAGS}
    given = {name: value for name, value in given.items() if value is not None}
    with flag_names.named({name: f"--{name.replace('_', '-')}" for name in given}):
        return dataclasses.replace(base, **given)


def load_weights(chosen: Settings, source: "str | checkpoint.Checkpoint") -> "language_model.LanguageModel":
    """Loads any model in the dtype and on the devices of the settings, with compiled programs kept for the next run.

    Raises:
      ValueError, FileNotFoundError: the weights cannot be read.
    """
    compilation_cache.enable()
    from jdecode import language_model  # late: it imports jax

    mesh_config = None if chosen.run.mesh == config.MeshConfig() else chosen.run.mesh
    return language_model.load(source, dtype=chosen.weight_dtype, mesh=mesh_config)


def load_model(chosen: Settings, opened: "checkpoint.Checkpoint | None" = None) -> "language_model.LanguageModel":
    """Loads the model of the settings.

    Args:
      opened: the same, where it is open already.

    Raises:
      ValueError, FileNotFoundError: if the weights cannot be read, are not of the config's architecture, or cannot
        have the window that is asked for.
    """
    own = chosen.run.streaming
    if own is not None:  # what it refuses is refused before gigabytes are read
        from jdecode.weights import checkpoint  # late: it imports jax

        opened = checkpoint.open_checkpoint(chosen.source) if opened is None else opened
        streaming.check(opened.config, own)
    lm = load_weights(chosen, chosen.source if opened is None else opened)
    difference = chosen.run.architecture and architecture_difference(chosen.run.architecture, lm.config)
    if difference:
        raise ValueError(
            f"--weights {chosen.source}: config {chosen.run.name} expected {difference}; "
            "leave out --config, or give the config of these weights"
        )
    return lm if own is None else lm.with_window(own.window, own.num_sinks)


def architecture_difference(expected: config.ModelConfig, got: config.ModelConfig) -> str | None:
    """Says in words what was expected and what was got where two architectures differ, ``None`` where they do not.

    ``max_positions`` is information and may differ.
    """
    for field in dataclasses.fields(config.ModelConfig):
        theirs, ours = getattr(got, field.name), getattr(expected, field.name)
        if field.name == "max_positions" or _alike(theirs, ours):
            continue
        if field.name == "layers":
            return f"other layers than the {len(theirs)} of the weights"
        return f"{field.name} {ours}, got {theirs}"
    return None


def _alike(first: Any, second: Any) -> bool:
    """Compares configs; floats may differ by the rounding of a file that holds them in 32 bits."""
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        return all(_alike(getattr(first, f.name), getattr(second, f.name)) for f in dataclasses.fields(first))
    if isinstance(first, tuple) and isinstance(second, tuple):
        return len(first) == len(second) and all(_alike(a, b) for a, b in zip(first, second, strict=True))
    if isinstance(first, float) and isinstance(second, float):
        return math.isclose(first, second, rel_tol=1e-6)
    return first == second


def print_statistics(stats: Any, *, num_prompt_tokens: int, num_new_tokens: int, ended: str) -> None:
    """Prints what a run took, on standard error.

    Args:
      stats: mapping with the statistics of a result; times in seconds, sizes in bytes.
      num_prompt_tokens: of all prompts together; what a prefix cache held of them was not computed.
      num_new_tokens: written, all rows together.
      ended: why the text ended, and other words for the second line.
    """
    prefill = float(stats["prefill_seconds"])
    first = float(stats.get("first_token_seconds", prefill))
    num_read, read = num_prompt_tokens, f"{num_prompt_tokens} tokens"
    if "prefix_tokens_reused" in stats:
        num_read -= stats["prefix_tokens_reused"]
        read = f"{num_read} of {read} ({stats['prefix_tokens_reused']} from the prefix cache)"
    speed = num_read / prefill if prefill > 0 else 0.0
    mebibyte = 2.0**20
    lines = (
        f"prefill {read} in {prefill:.3f} s ({speed:.1f} tokens/s), first token after {first:.3f} s",
        f"decode {num_new_tokens} tokens in {float(stats['decode_seconds']):.3f} s "
        f"({float(stats['decode_tokens_per_second']):.1f} tokens/s), {ended}",
        f"cache {stats['kv_cache_bytes'] / mebibyte:.1f} MiB, weights {stats['weight_bytes'] / mebibyte:.1f} MiB, "
        f"compile {float(stats['compile_seconds']):.2f} s",
    )
    if "target_calls" in stats:
        lines = (
            *lines,
            f"draft {stats['accepted']} of {stats['drafted']} proposed tokens accepted, "
            f"{stats['target_calls']} calls of the target",
        )
    print("\n".join(lines), file=sys.stderr, flush=True)


def _one_line(error: BaseException | str) -> str:
    if isinstance(error, OSError) and error.strerror:
        name = "" if error.filename is None else f"{error.filename}: "
        return f"{name}{error.strerror}"
    return " ".join(str(error).split()) or type(error).__name__


def report(name: str, error: BaseException | str) -> None:
    """Prints one line about an error on standard error."""
    print(f"{name}: error: {_one_line(error)}", file=sys.stderr, flush=True)


def _is_out_of_memory(error: BaseException) -> bool:
    return isinstance(error, MemoryError) or "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)


LESS_MEMORY = "a smaller --capacity, --num-samples or --weight-dtype needs less"


def run(
    name: str,
    body: Callable[[Sequence[str] | None], None],
    argv: Sequence[str] | None,
    *,
    less_memory: str = LESS_MEMORY,
) -> int:
    """Runs a front door, and returns the exit status (see the module's text).

    Args:
      name: of the command, which its errors start with.
      body: parses the arguments, computes and prints.
      argv: arguments; ``None`` for those of the process.
      less_memory: what to do where memory runs out.
    """
    try:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # a stream that a test put in its place
                stream.reconfigure(errors="backslashreplace")  # pyright: ignore[reportAttributeAccessIssue]
        body(argv)
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes standard output once more when it ends: there must be something to write to.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return INTERRUPTED_STATUS
    except (ValueError, TypeError, ArithmeticError, OSError, ImportError) as error:
        if os.environ.get(TRACEBACK_VARIABLE):
            raise
        report(name, error)
        return 2
    except (RuntimeError, MemoryError) as error:
        if os.environ.get(TRACEBACK_VARIABLE) or not _is_out_of_memory(error):
            raise
        report(name, f"out of memory; {less_memory} ({_one_line(error)[:200]})")
        return 2
    return 0
