"""Converts a model: ``python -m jdecode.convert SOURCE OUTPUT [--format orbax] [--kv-heads N]``."""

import argparse
import json
import pathlib
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdecode import command_line, compilation_cache
from jdecode.training import corpus, train_config

if TYPE_CHECKING:
    from jdecode.weights import checkpoint

NAME = "jdecode.convert"
REPORT_NAME = "conversion.json"
FORMATS = ("safetensors", "orbax")
DEFAULT_UP_TRAIN_STEPS = 100
DEFAULT_LEARNING_RATE = 3e-4
# Flags that only act beside --kv-heads, and of those the ones that need steps to act on.
_POOLING_FLAGS = ("up_train", "corpus", "suffix", "learning_rate", "seed")
_STEP_FLAGS = ("learning_rate", "seed")
# All that a folder may hold of a tokenizer, in the forms that this engine and others read.
_TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "vocab.txt", "chat_template.jinja", "chat_template.json"),
)
_EPILOG = """examples:
  python -m jdecode.convert model.gguf model_folder                    # to safetensors and a Hugging Face config.json
  python -m jdecode.convert model_folder orbax_folder --format orbax --dtype bfloat16
  python -m jdecode.convert gqa_small one_head --kv-heads 1            # pools heads, then trains on for a while
  python -m jdecode.convert model_folder one_head --kv-heads 1 --up-train 500 --corpus FOLDER --suffix .txt

--dtype auto keeps every number: the dtype of the source where it has one, float32 where it mixes several or is
quantised. With --kv-heads, groups of neighbouring key/value heads become their mean, the model is trained on the corpus
(Python's own standard library unless given), and the report says the held-out loss before, after pooling and after
training, and the bytes of the cache before and after. The report is also written as conversion.json in OUTPUT.
"""


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Converts a model's files, or its key/value heads.", epilog=_EPILOG
    )
    text, count = command_line.plain_text, command_line.whole_number
    parser.add_argument(
        "source", metavar="SOURCE", type=text, help="a folder, a .gguf file, a packaged name or a hub id"
    )
    parser.add_argument("output", metavar="OUTPUT", type=text, help="a new folder")
    parser.add_argument("--format", choices=FORMATS, default=FORMATS[0], help="of the parameters")
    parser.add_argument("--dtype", metavar="DTYPE", type=command_line.dtype, default="auto", help="of the parameters")
    group = parser.add_argument_group("fewer key/value heads")
    group.add_argument("--kv-heads", metavar="N", type=count(1), help="a divisor of the model's; 1 is multi-query")
    steps = f"steps of training afterwards (default {DEFAULT_UP_TRAIN_STEPS}; 0 for none)"
    group.add_argument("--up-train", metavar="STEPS", type=count(), help=steps)
    group.add_argument("--corpus", metavar="FOLDER", type=text, help="of text files, to train on and to judge by")
    group.add_argument("--suffix", metavar=".TXT", action="append", help="of the files to read; may be repeated")
    rate = f"the peak (default {DEFAULT_LEARNING_RATE:g})"
    group.add_argument("--learning-rate", metavar="R", type=command_line.number, help=rate)
    group.add_argument("--seed", metavar="S", type=count(), help="of the order of the corpus (default 0)")
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")
    return parser


def _check_flags(arguments: argparse.Namespace) -> None:
    """Refuses flags that could not act."""

    def given(names: Sequence[str]) -> list[str]:
        return [f"--{name.replace('_', '-')}" for name in names if getattr(arguments, name) is not None]

    if arguments.kv_heads is None and (idle := given(_POOLING_FLAGS)):
        raise ValueError(f"{idle[0]}: expected --kv-heads beside it, got none; only pooled models are trained")
    if arguments.up_train == 0 and (idle := given(_STEP_FLAGS)):
        raise ValueError(f"{idle[0]}: expected steps of --up-train, got 0; leave one of them out")


def _check_output(source: str, output: pathlib.Path) -> None:
    """Refuses a folder that holds something, and one that belongs to the source."""
    origin = pathlib.Path(source).expanduser().resolve()
    if origin.exists() and not output.is_file() and origin in (output, *output.parents):
        raise ValueError(f"{output}: expected a folder outside the source, got {source}; give another folder")
    command_line.check_new_folder(output)


def _tokenizer_files(opened: "checkpoint.Checkpoint", scratch: pathlib.Path) -> list[pathlib.Path]:
    """Returns the tokenizer's files: those of the source as they are, or new ones where it has no such files."""
    if opened.source.is_dir():
        return [opened.source / name for name in _TOKENIZER_FILES if (opened.source / name).is_file()]
    if opened.tokenizer is None:
        return []
    opened.tokenizer.save(scratch / "tokenizer")
    return sorted((scratch / "tokenizer").iterdir())


def _pooled(
    arguments: argparse.Namespace,
    optimizer: train_config.OptimizerConfig,
    files: corpus.Corpus,
    opened: "checkpoint.Checkpoint",
    dtype: str,
) -> tuple[dict[str, Any], Any, dict[str, Any]]:
    """Returns parameters, configuration and report of the model with fewer heads."""
    from jdecode.training import up_training
    from jdecode.weights import head_pooling, load

    if opened.tokenizer is None:
        raise ValueError(
            f"--kv-heads: expected weights with a tokenizer, which reads the corpus, got {arguments.source}"
        )
    head_pooling.pooled_config(opened.config, arguments.kv_heads)  # before gigabytes are read
    return up_training.pool_and_train(
        load.load_opened(opened, dtype="float32").params,
        opened.config,
        arguments.kv_heads,
        tokenizer=opened.tokenizer,
        files=files,
        num_steps=_num_steps(arguments),
        optimizer=optimizer,
        seed=arguments.seed or 0,
        dtype=dtype,
        say=_say,
    )


def _num_steps(arguments: argparse.Namespace) -> int:
    return DEFAULT_UP_TRAIN_STEPS if arguments.up_train is None else arguments.up_train


def _optimizer(arguments: argparse.Namespace) -> train_config.OptimizerConfig:
    rate = DEFAULT_LEARNING_RATE if arguments.learning_rate is None else arguments.learning_rate
    return train_config.OptimizerConfig(
        learning_rate=rate, warmup_steps=_num_steps(arguments) // 10, final_share=0.1, weight_decay=0.0
    )


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    _check_flags(arguments)
    output = pathlib.Path(arguments.output).expanduser().resolve()
    _check_output(arguments.source, output)
    optimizer, files = _optimizer(arguments), None
    if arguments.kv_heads is not None:
        chosen = {"source": arguments.corpus, "suffixes": arguments.suffix and tuple(arguments.suffix)}
        if arguments.corpus:
            corpus.check_outside(output, arguments.corpus)
        files = corpus.read(train_config.CorpusConfig(**{name: value for name, value in chosen.items() if value}))
    compilation_cache.enable()
    from jdecode.weights import checkpoint, load, model_folder, orbax_save, parameter_tree, safetensors_save

    opened = checkpoint.open_checkpoint(arguments.source)
    model_folder.config_values(opened.config)  # before hours of training
    dtype = opened.exact_dtype if arguments.dtype == "auto" else arguments.dtype
    output.parent.mkdir(parents=True, exist_ok=True)
    # Beside the output, so that the finished folder is moved there whole, or not at all.
    with tempfile.TemporaryDirectory(prefix=f".{output.name}.", dir=output.parent) as scratch_name:
        scratch = pathlib.Path(scratch_name)
        if files is None:
            params, model, pooling = load.load_opened(opened, dtype=dtype).params, opened.config, {}
        else:
            params, model, pooling = _pooled(arguments, optimizer, files, opened, dtype)
        save = orbax_save.save_orbax if arguments.format == "orbax" else safetensors_save.save_hugging_face
        save(
            scratch / "model",
            params,
            model,
            tokenizer_files=_tokenizer_files(opened, scratch),
            eos_token_ids=opened.eos_token_ids,
            bos_token_id=opened.bos_token_id,
            generation_defaults=opened.generation_defaults,
        )
        leaves = parameter_tree.flat(params).values()
        report = {
            "source": arguments.source,
            "format": arguments.format,
            "dtype": dtype,
            "num_parameters": sum(leaf.size for leaf in leaves),
            "weight_bytes": sum(leaf.nbytes for leaf in leaves),
            "notes": list(opened.notes),
            **pooling,
        }
        model_folder.write_json(scratch / "model" / REPORT_NAME, report)
        if output.is_dir():  # an empty one
            output.rmdir()
        (scratch / "model").rename(output)
    print(json.dumps(report) if arguments.json else _text(report, output))


def _text(report: Mapping[str, Any], output: pathlib.Path) -> str:
    """Returns the report for people: a table of the losses, a line on the cache, a line on what was written."""
    lines = []
    if "losses" in report:
        heads = report["kv_heads"]
        names = {
            "before": f"before, {heads['before']} key/value heads",
            "pooled": f"pooled to {heads['after']}",
            "up_trained": f"after {report['up_training']['steps']} steps" if report["up_training"] else "",
        }
        lines.append(f"{'held out':<28}{'nats a token':>14}{'perplexity':>14}{'bits a byte':>14}")
        for stage, loss in report["losses"].items():
            if loss is not None:
                numbers = (f"{value:>14.4f}" for value in loss.values())
                lines.append(f"{names[stage]:<28}{''.join(numbers)}")
        cache = report["cache"]
        token, whole = cache["bytes_a_token"], cache["bytes"]
        lines.append(
            f"cache, {cache['dtype']}: {token['before']:,} bytes a token before, {token['after']:,} after; a row of "
            f"{cache['tokens']:,} tokens {whole['before']:,} bytes before, {whole['after']:,} after"
        )
    lines.append(
        f"{output}: {report['format']}, {report['dtype']}, {report['num_parameters']:,} parameters, "
        f"{report['weight_bytes']:,} bytes"
    )
    return "\n".join(lines)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv, less_memory="--dtype bfloat16, or no --up-train, needs less")


if __name__ == "__main__":
    sys.exit(main())
