"""What a cache takes in memory: ``python -m jdecode.ledger --config llama3_8b.yaml --batch 16 --context 4096``."""

import argparse
import dataclasses
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jdecode import command_line, config, config_file, eviction_arguments, ledger_report, plot_file, streaming
from jdecode.parallel import known_devices

if TYPE_CHECKING:
    from jdecode import ledger_figures

NAME = "jdecode.ledger"
_EPILOG = """examples:
  python -m jdecode.ledger --config llama3_8b.yaml --batch 16 --context 4096 --kv-dtype bfloat16
  python -m jdecode.ledger --config llama3_70b.yaml --batch 64 --mesh data=1,model=8 --memory h100-80gb
  python -m jdecode.ledger --config gemma3_270m.yaml --context 32768 --memory v5e --compare --plot memory.png

No weights are read and no arrays are made: the cache is traced as a run would allocate it, and a closed formula stands
beside it. --window asks what if every layer without a window had one, kept in a ring buffer. --compare shows the ways
to need less for this model. --weight-dtype auto is float32 for a CPU and bfloat16 elsewhere, by the device that
--memory names, or else by this machine; --kv-dtype auto is the same as that of the weights.
"""


def _memory(text: str) -> known_devices.Memory:
    try:
        return known_devices.memory(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Counts what a cache and its model take in memory.", epilog=_EPILOG
    )
    text, count = command_line.plain_text, command_line.whole_number
    group = parser.add_argument_group("model")
    group.add_argument(
        "--config", metavar="FILE", type=text, help="a config: as given, in ./configs, or in the package"
    )
    group.add_argument("--weights", metavar="PATH", type=text, help="a model whose shapes count; no weights are read")
    group.add_argument(
        "--weight-dtype", metavar="DTYPE", type=command_line.dtype, default="auto", help="of the weights"
    )
    group = parser.add_argument_group("cache")
    group.add_argument("--batch", metavar="B", type=count(1), default=1, help="requests (default 1)")
    group.add_argument("--context", metavar="S", type=count(1), help="tokens a request (default: as trained)")
    group.add_argument("--kv-dtype", metavar="DTYPE", type=command_line.cache_dtype, help="of cached keys and values")
    group.add_argument(
        "--layout",
        choices=config.CACHE_LAYOUTS,
        help="auto: rings where layers have windows; paged: and pages elsewhere",
    )
    group.add_argument("--page-len", metavar="Z", type=count(1), help="tokens a page, beside the layout paged")
    group.add_argument("--slack", metavar="N", type=count(), help="slots of a ring beyond its window")
    eviction_arguments.add_arguments(group)
    group.add_argument(
        "--new-tokens", metavar="N", type=count(1), help="of the context, after the prompt, beside --eviction"
    )
    group.add_argument("--window", metavar="W", type=count(1), help="what if every full layer had this window")
    group.add_argument("--sinks", metavar="N", type=count(), help="first tokens that stay (default 4)")
    group = parser.add_argument_group("devices")
    group.add_argument(
        "--mesh", metavar="AXES", type=command_line.mesh, help="such as data=1,model=8; need not be here"
    )
    names = ", ".join(device.name for device in known_devices.DEVICES)
    group.add_argument("--memory", metavar="SIZE", type=_memory, help=f"of a device, such as 16GiB, or one of {names}")
    group = parser.add_argument_group("output")
    group.add_argument("--compare", action="store_true", help="the ways to need less, side by side")
    group.add_argument("--plot", metavar="FILE.png", type=text, help="draw it too")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuses flags that could not act."""
    if arguments.config is None and arguments.weights is None:
        raise ValueError("no model: expected --config or --weights, got neither; try --config llama3_8b.yaml")
    if arguments.sinks is not None and arguments.window is None and not arguments.compare:
        raise ValueError("--sinks: expected --window or --compare beside it, got neither; add one")
    if arguments.window is not None and arguments.layout == "full":
        raise ValueError("--window: expected --layout auto (a ring keeps the window), got full; leave one of them out")
    if arguments.plot is not None:
        plot_file.check(pathlib.Path(arguments.plot))


def _run(arguments: argparse.Namespace) -> tuple[config.RunConfig, config.ModelConfig]:
    """Returns the config, and the architecture that counts."""
    if arguments.config is not None:
        run = config_file.load(arguments.config)
    else:
        run = config.RunConfig(name=arguments.weights, weights=arguments.weights)
    if arguments.weights is None:
        if run.architecture is None:
            raise ValueError(
                f"config {run.name}: expected an architecture, got weights alone; add --weights {run.weights}"
            )
        return run, run.architecture
    from jdecode.weights import checkpoint  # late: it imports jax

    model = checkpoint.open_checkpoint(arguments.weights).config
    difference = run.architecture and command_line.architecture_difference(run.architecture, model)
    if difference:
        raise ValueError(
            f"--weights {arguments.weights}: config {run.name} expected {difference}; leave out --config or --weights"
        )
    return run, model


def _weight_dtype(arguments: argparse.Namespace) -> str:
    """Returns what ``jdecode.load`` would choose on the device in question."""
    if arguments.weight_dtype != "auto":
        return arguments.weight_dtype
    platform = arguments.memory.platform if arguments.memory is not None else None
    if platform is None:
        import jax  # late: it takes a while, and may take hold of a device

        platform = jax.default_backend()
    return "float32" if platform == "cpu" else "bfloat16"


def _cache(arguments: argparse.Namespace, base: config.CacheConfig) -> config.CacheConfig:
    given = {
        "dtype": arguments.kv_dtype,
        "layout": arguments.layout,
        "slack": arguments.slack,
        "page_len": arguments.page_len,
    }
    if arguments.layout not in (None, "paged"):  # a config's pages are not those of another layout
        base = dataclasses.replace(base, page_len=None)
    given = {name: value for name, value in given.items() if value is not None}
    cache = eviction_arguments.settings(arguments, dataclasses.replace(base, **given))
    if arguments.window is not None and cache.layout == "full":
        raise ValueError("--window: expected the layout auto, got full of the config; add --layout auto")
    return cache


def _num_new(arguments: argparse.Namespace, cache: config.CacheConfig, usual: int, context: int) -> int:
    """Returns the tokens after the prompt, for which a compressed cache has slots."""
    if cache.eviction is None:
        if arguments.new_tokens is not None:
            raise ValueError("--new-tokens: acts on --eviction, and there is none; add one, or leave it out")
        return 0
    if arguments.new_tokens is None:
        return max(min(usual, context - 1), 1)
    if arguments.new_tokens >= context:
        raise ValueError(
            f"--new-tokens: expected fewer than the context of {context} tokens, which has the prompt too, got "
            f"{arguments.new_tokens}; give fewer, or a longer --context"
        )
    return arguments.new_tokens


def _question(arguments: argparse.Namespace) -> "ledger_figures.Question":
    run, model = _run(arguments)
    from jdecode import ledger_figures  # late: it imports jax
    from jdecode.cache import ledger

    asked = None
    if arguments.window is not None or run.streaming is not None:
        asked = command_line.streaming_settings(arguments, run.streaming)
    if asked is not None:
        streaming.check(model, asked)
        model = streaming.with_window(model, asked)
    cache = _cache(arguments, run.cache)
    if arguments.slack and (cache.layout == "full" or all(layer.window is None for layer in model.layers)):
        raise ValueError("--slack: expected layers with windows, in rings, got none; leave it out, or add --window")
    if cache.eviction is not None and all(layer.window is not None for layer in model.layers):
        raise ValueError(
            f"--eviction {cache.eviction}: expected layers without a window, got none; leave it out, or --window"
        )
    context = arguments.context or model.max_positions
    plan = ledger.Plan(
        model=model,
        cache=cache,
        batch_size=arguments.batch,
        capacity=context,
        compute_dtype=_weight_dtype(arguments),
        mesh=arguments.mesh or run.mesh,
        num_new=_num_new(arguments, cache, run.max_new_tokens, context),
    )
    return ledger_figures.Question(
        name=run.name,
        plan=plan,
        memory=arguments.memory,
        window=None if asked is None else asked.window,
        num_sinks=arguments.sinks if asked is None else asked.num_sinks,
        compare=arguments.compare,
    )


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    _check_flags(arguments)
    question = _question(arguments)
    from jdecode import ledger_figures

    report = ledger_figures.figures(question)
    print(json.dumps(report, allow_nan=False) if arguments.json else ledger_report.table(report), flush=True)
    if arguments.plot is not None:
        ledger_report.write_plot(pathlib.Path(arguments.plot), report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
