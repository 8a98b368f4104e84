"""Trains a language model: ``python -m jdecode.train --config gqa_small.yaml --output runs/gqa_small``."""

import argparse
import dataclasses
import pathlib
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jdecode import command_line, compilation_cache, config_file
from jdecode.training import corpus, train_config

if TYPE_CHECKING:
    from jdecode import language_model
    from jdecode.text import tokenizer as tokenizer_lib
    from jdecode.training import task as task_lib

NAME = "jdecode.train"
TOKENIZER_FOLDER = "tokenizer"  # below the folder of a run: a resumed run reads it again
TEACHER_TEXT_NAME = "teacher_text.npz"  # the same for what the teacher wrote
_EPILOG = """examples:
  python -m jdecode.train --config gqa_small.yaml --output runs/small          # on Python's own standard library
  python -m jdecode.train --config gqa_small.yaml --output runs/small --resume # after it was stopped
  python -m jdecode.train --config gqa_draft.yaml --output runs/draft --distill runs/small/model
  python -m jdecode.train --config mine.yaml --output runs/mine --corpus FOLDER --suffix .txt --suffix .md

A run goes on to the end that its config says: num_steps cannot be raised when it is resumed. A run's folder holds
`checkpoints` and, in the end, `model`: weights, tokenizer, record, card and a picture of the losses (with
jdecode[plot]). `python -m jdecode.generate --weights runs/small/model` writes with it.
"""


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Trains a language model.", epilog=_EPILOG
    )
    count = command_line.whole_number(1)
    text = command_line.plain_text
    where = "as given, in ./configs/training, or shipped"
    parser.add_argument("--config", metavar="FILE", required=True, type=text, help=where)
    parser.add_argument("--output", metavar="FOLDER", required=True, type=text, help="of the run")
    parser.add_argument("--resume", action="store_true", help="go on from the folder's latest checkpoint")
    parser.add_argument("--corpus", metavar="FOLDER", type=text, help="of text files, to learn from")
    parser.add_argument(
        "--suffix", metavar=".TXT", action="append", type=text, help="of the files to read; may be repeated"
    )
    parser.add_argument("--distill", metavar="SOURCE", type=text, help="a teacher's weights")
    parser.add_argument("--init", metavar="SOURCE", type=text, help="weights to start from")
    parser.add_argument("--steps", metavar="N", type=count, help="of the optimiser")
    parser.add_argument("--seed", metavar="S", type=command_line.whole_number(), help="of first weights and order")
    return parser


def _config(arguments: argparse.Namespace) -> train_config.TrainConfig:
    """Lays the flags over the config."""
    config = config_file.load(arguments.config, train_config.TrainConfig, "training")
    suffixes = None if arguments.suffix is None else tuple(arguments.suffix)
    files = _given(source=arguments.corpus, suffixes=suffixes)
    run = _given(num_steps=arguments.steps, seed=arguments.seed)
    return dataclasses.replace(config, corpus=dataclasses.replace(config.corpus, **files), **run)


def _given(**flags: Any) -> dict[str, Any]:
    return {name: value for name, value in flags.items() if value is not None}


def _tokenizer(
    config: train_config.TrainConfig,
    files: corpus.Corpus,
    folder: pathlib.Path,
    source: "language_model.LanguageModel | None",
) -> "tokenizer_lib.Tokenizer":
    """Returns the tokenizer of the model that the run starts from or learns from, or a new one.

    A model's own also names the end tokens that a folder of a tokenizer cannot, so it counts in a resumed run, too.
    """
    from jdecode.text import tokenizer as tokenizer_lib
    from jdecode.training import vocabulary

    kept = folder / TOKENIZER_FOLDER
    if source is not None:
        assert source.tokenizer is not None
        return source.tokenizer
    if kept.is_dir():
        return tokenizer_lib.from_folder(kept)
    return vocabulary.train_tokenizer((document.text for document in files.train), config.architecture.vocab_size)


def _teacher(
    arguments: argparse.Namespace,
    config: train_config.TrainConfig,
    files: corpus.Corpus,
    folder: pathlib.Path,
    lm: "language_model.LanguageModel",
) -> "task_lib.Teacher":
    """Returns the teacher with the texts that it wrote, now or before."""
    from jdecode import SamplingConfig
    from jdecode.training import task as task_lib
    from jdecode.training import teacher_text

    kept = folder / TEACHER_TEXT_NAME
    texts: Sequence[Any] = []
    distill = config.distill
    if arguments.resume and kept.is_file():
        texts = teacher_text.load(kept)
    elif distill.generated_tokens and distill.generated_share:

        def generate(prompts: list[list[int]], max_new_tokens: int, seeds: Sequence[int]) -> Sequence[Sequence[int]]:
            sampling = [SamplingConfig(temperature=distill.generated_temperature, seed=seed) for seed in seeds]
            result = lm.generate(prompts, max_new_tokens=max_new_tokens, sampling=sampling)
            return [row[:length].tolist() for row, length in zip(result.tokens, result.lengths, strict=True)]

        assert lm.tokenizer is not None
        task_lib.num_written(config)  # before the teacher writes what no step would read
        end_token_id = lm.tokenizer.eos_token_ids[0]
        texts = teacher_text.write(
            generate,
            task_lib.encode(lm.tokenizer, files.train, end_token_id),
            num_tokens=distill.generated_tokens,
            text_len=config.sequence_len,
            end_token_id=end_token_id,
            seed=config.seed,
            is_quiet=not sys.stderr.isatty(),
        )
        teacher_text.save(kept, texts)
    return task_lib.Teacher(name=arguments.distill, model=lm.model, params=lm.params, texts=texts)


def _check_output(folder: pathlib.Path, resume: bool, source: str) -> None:
    """Refuses a folder that holds anything but the run to resume, and one that would become part of the corpus."""
    from jdecode.training import export, loop

    loop.check_folder(folder, resume)
    if resume:
        export.check_model_folder(folder)
    else:
        command_line.check_new_folder(folder)
    corpus.check_outside(folder, source)


def _load(config: train_config.TrainConfig, source: str | None) -> "language_model.LanguageModel | None":
    """Loads a model whose tokenizer the run can use, ``None`` for no source."""
    from jdecode import language_model
    from jdecode.training import task as task_lib

    if source is None:
        return None
    lm = language_model.load(source, dtype="float32", weight_layout="rows")
    if lm.tokenizer is None:
        raise ValueError(f"{source}: expected weights that come with a tokenizer, got none")
    task_lib.check_tokenizer(config, lm.tokenizer)
    return lm


def _check_models(
    arguments: argparse.Namespace,
    config: train_config.TrainConfig,
    start: "language_model.LanguageModel | None",
    teacher: "language_model.LanguageModel | None",
) -> None:
    """Refuses what cannot be written in the end, a start of another architecture, and a teacher of other tokens."""
    from jdecode.training import objective
    from jdecode.weights import model_folder

    model_folder.config_values(config.architecture)
    if teacher is not None:
        objective.check_vocabularies(config.architecture, teacher.config)
    if start is None:
        return
    difference = command_line.architecture_difference(config.architecture, start.config)
    if difference:
        raise ValueError(f"--init {arguments.init}: config {config.name} expected {difference}; give its own weights")
    if teacher is not None and start.tokenizer is not None and teacher.tokenizer is not None:
        token_id = start.tokenizer.first_difference(teacher.tokenizer)
        if token_id is not None:
            raise ValueError(
                f"--init {arguments.init}: expected the tokens of --distill {arguments.distill}, got another token "
                f"{token_id}; both models must share one tokenizer"
            )


def _command(arguments: argparse.Namespace) -> str:
    """Returns the command of the run, as one would type it."""
    words = ["python", "-m", NAME, "--config", arguments.config, "--output", arguments.output]
    for flag in ("corpus", "distill", "init", "steps", "seed"):
        if (value := getattr(arguments, flag)) is not None:
            words += [f"--{flag}", str(value)]
    for suffix in arguments.suffix or ():
        words += ["--suffix", suffix]
    return shlex.join(words)


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    config = _config(arguments)
    folder = pathlib.Path(arguments.output)
    files = corpus.read(config.corpus)
    if files.num_skipped:
        _say(f"{files.num_skipped} files skipped: no text in UTF-8")
    compilation_cache.enable()
    from jdecode.training import export, loop
    from jdecode.training import task as task_lib

    _check_output(folder, arguments.resume, config.corpus.source)
    start, taught_by = _load(config, arguments.init), _load(config, arguments.distill)
    _check_models(arguments, config, start, taught_by)
    source = taught_by or start or _load(config, config.tokenizer)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(config, files, folder, source)
    teacher = _teacher(arguments, config, files, folder, taught_by) if taught_by else None
    task = task_lib.make_task(config, files, tokenizer, teacher, arguments.init)
    if not (folder / TOKENIZER_FOLDER).exists():  # now, so that what cannot be a run leaves none of it
        tokenizer.save(folder / TOKENIZER_FOLDER)
    params, losses = loop.fit(
        task, folder, init_params=start.params if start else None, resume=arguments.resume, say=_say
    )
    record = export.export(task, params, losses, folder, _command(arguments))
    final = record["final"]
    print(
        f"{folder / export.MODEL_FOLDER}: held out {final['nats_a_token']:.4f} nats a token, perplexity "
        f"{final['perplexity']:.2f}, {final['bits_per_byte']:.4f} bits a byte"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    less_memory = "a smaller batch_size or sequence_len in the config needs less"
    return command_line.run(NAME, _main, argv, less_memory=less_memory)


if __name__ == "__main__":
    sys.exit(main())
