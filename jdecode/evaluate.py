"""Judges a language model by held-out files: ``python -m jdecode.evaluate --weights runs/gqa_small/model``."""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from jdecode import command_line, config
from jdecode.training import corpus, train_config

if TYPE_CHECKING:
    import numpy as np

    from jdecode import language_model
    from jdecode.text import tokenizer as tokenizer_lib
    from jdecode.training import baselines, held_out

NAME = "jdecode.evaluate"
MOST_SEQUENCE_LEN = 1024
"""The sequence length, unless one is given, of a model that was trained for as much or more."""

_PADDING_ROW = (0,)  # fills up the last batch, so that it has the shape of the others
_EPILOG = """examples:
  python -m jdecode.evaluate --weights runs/small/model --baselines      # the held-out part of the standard library
  python -m jdecode.evaluate --weights FILE.gguf --corpus FOLDER --suffix .txt --suffix .md --limit-pieces 100 --json

Only held-out files are judged: the same ones that jdecode.train holds out for the same corpus, suffixes and share. Each
token is predicted once, from at least half a sequence of what stands before it, or all there is. A file begins with the
control token that the tokenizer puts before a text; where it puts none, with the end token, as in training; where there
is no end token either, with nothing, and the file's first token is not judged. It ends with the end token, if there is
one, which counts as a token and as no byte. A model gets the loss of its training.json with the sequence length of its
training.
"""


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Judges a language model by held-out files.", epilog=_EPILOG
    )
    command_line.add_model_arguments(parser)
    defaults = train_config.CorpusConfig()
    group = parser.add_argument_group("text")
    group.add_argument(
        "--corpus",
        metavar="FOLDER",
        type=command_line.plain_text,
        default=defaults.source,
        help=f"of text files, or {train_config.STANDARD_LIBRARY} (the default)",
    )
    group.add_argument("--suffix", metavar=".TXT", action="append", help="of the files to read; may be repeated")
    group.add_argument(
        "--held-out-share", metavar="P", type=command_line.number, default=defaults.held_out_share, help="of the files"
    )
    group.add_argument(
        "--sequence-len",
        metavar="N",
        type=command_line.whole_number(2),
        help=f"tokens that the model sees at once; else what it was trained for, {MOST_SEQUENCE_LEN:,} at most",
    )
    group.add_argument(
        "--limit-pieces", metavar="N", type=command_line.whole_number(1), help="judge N sequences, evenly spread"
    )
    group = parser.add_argument_group("output")
    group.add_argument("--baselines", action="store_true", help="what xz and byte counts need for the same files")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _no_sampling() -> argparse.Namespace:
    """Returns the flags of sampling as they are when none is given: the config's settings ask for them."""
    parser = command_line.ArgumentParser()
    command_line.add_sampling_arguments(parser)
    return parser.parse_args([])


def _read_corpus(arguments: argparse.Namespace) -> corpus.Corpus:
    suffixes = tuple(arguments.suffix or train_config.CorpusConfig().suffixes)
    return corpus.read(
        train_config.CorpusConfig(source=arguments.corpus, suffixes=suffixes, held_out_share=arguments.held_out_share)
    )


def _cut(
    lm: "language_model.LanguageModel",
    tokenizer: "tokenizer_lib.Tokenizer",
    documents: Sequence[corpus.Document],
    sequence_len: int,
) -> "list[held_out.Piece]":
    """Turns documents into ids and cuts them; the command's help says how a document begins and ends."""
    import numpy as np

    from jdecode.training import held_out

    ends = [*tokenizer.eos_token_ids, *lm.end_token_ids][:1]
    starts = [*(idx for idx in tokenizer.prefix_ids[-1:] if tokenizer.is_special(idx)), *ends][:1]
    pieces: list[held_out.Piece] = []
    for document in documents:
        ids = tokenizer.encode(document.text, add_special_tokens=False, parse_special=False)
        if max(ids, default=0) >= lm.config.vocab_size:
            raise ValueError(
                f"tokenizer: expected ids under the model's vocab_size {lm.config.vocab_size}, got {max(ids)} in "
                f"{document.name}"
            )
        tokens = [*starts, *ids, *ends]
        if len(tokens) > 1:
            pieces += held_out.pieces([np.asarray(tokens[1:], np.int32)], sequence_len, tokens[0])
    return pieces


def _scorer(
    lm: "language_model.LanguageModel", cache: config.CacheConfig, capacity: int, say: Callable[[int], Any]
) -> "Callable[[list[list[int]]], list[np.ndarray]]":
    """Returns a function that scores up to a batch of rows with the model's own cache.

    Args:
      lm: the model.
      cache: layout and dtype.
      capacity: slots a row.
      say: is told how many rows are done.
    """
    from jdecode.decode import prefill
    from jdecode.training import held_out

    def score(rows: list[list[int]]) -> "list[np.ndarray]":
        filled = [*rows, *[list(_PADDING_ROW)] * (held_out.BATCH_SIZE - len(rows))]
        empty = lm.init_cache(batch_size=len(filled), capacity=capacity, cache=cache)
        scores = prefill.score(lm.model, lm.params, filled, empty)[: len(rows)]
        say(len(rows))
        return scores

    return score


def _capacity(given: int | None, judged: "Sequence[held_out.Piece]") -> int:
    from jdecode import language_model

    longest = max(len(piece.tokens) for piece in judged)
    if given is not None and given < longest:
        raise ValueError(
            f"--capacity: expected at least {longest} slots for these sequences, got {given}; raise it, or lower "
            "--sequence-len"
        )
    return given or language_model.capacity_for(longest)


def _judge(
    lm: "language_model.LanguageModel",
    chosen: command_line.Settings,
    documents: Sequence[corpus.Document],
    sequence_len: int,
    limit: int | None,
) -> dict[str, Any]:
    """Returns the model's loss, as ``--json`` shows it."""
    import numpy as np
    import tqdm

    from jdecode.training import held_out

    tokenizer = lm.tokenizer
    if tokenizer is None:
        raise ValueError(f"{chosen.source}: expected weights that come with a tokenizer, got none")
    pieces = _cut(lm, tokenizer, documents, sequence_len)
    judged = pieces if limit is None else held_out.some(pieces, limit)
    if not judged:
        raise ValueError("corpus: expected a held-out file of two tokens or more, got none; give more text")
    token_num_bytes = np.asarray([len(tokenizer.token_bytes(idx)) for idx in range(tokenizer.vocab_size)])
    if not sum(token_num_bytes[piece.predicted].sum() for piece in judged):
        raise ValueError("--limit-pieces: expected pieces with text in them, got none; raise it, or leave it out")
    with tqdm.tqdm(total=len(judged), unit="piece", disable=not sys.stderr.isatty()) as progress:
        score = _scorer(lm, chosen.run.cache, _capacity(chosen.capacity, judged), progress.update)
        loss = held_out.evaluate_by(score, judged, token_num_bytes)
    loss.check_finite(chosen.source)
    return {
        "weights": chosen.source,
        "dtype": lm.model.dtype,
        "sequence_len": sequence_len,
        "pieces": len(judged),
        "pieces_in_all": len(pieces),
        "num_tokens": loss.num_tokens,
        "num_bytes": loss.num_bytes,
        "nats_a_token": loss.nats_a_token,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
    }


def _baselines(files: corpus.Corpus) -> "list[baselines.Baseline]":
    from jdecode.training import baselines

    train, judged = ([document.text.encode() for document in side] for side in (files.train, files.held_out))
    return baselines.baselines(train, judged)


def _print_table(result: dict[str, Any]) -> None:
    """Prints, for people, what ``--json`` prints for programs."""
    text, model = result["corpus"], result["model"]
    print(f"{text['held_out_files']:,} held-out files of {text['description']}, {text['held_out_bytes']:,} bytes")
    if model["pieces"] < model["pieces_in_all"]:
        print(f"judged by {model['pieces']:,} of {model['pieces_in_all']:,} pieces, {model['num_bytes']:,} bytes")
    print()
    note = f"{model['nats_a_token']:.4f} nats a token, perplexity {model['perplexity']:.2f}, "
    note += f"{model['num_tokens']:,} tokens in sequences of {model['sequence_len']:,}"
    rows = [(model["weights"], model["bits_per_byte"], note)]
    rows += [(entry["name"], entry["bits_per_byte"], "") for entry in result.get("baselines", ())]
    width = max(len(name) for name, _, _ in rows)
    print(f"{'':{width}}  bits a byte")
    for name, bits, note in rows:
        print(f"{name:{width}}  {bits:11.4f}  {note}".rstrip())


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv, _no_sampling())
    if arguments.baselines and arguments.limit_pieces is not None:
        raise ValueError("--limit-pieces: the baselines judge whole files; leave out --limit-pieces or --baselines")
    chosen = command_line.settings(arguments)
    files = _read_corpus(arguments)
    lm = command_line.load_model(chosen)
    sequence_len = arguments.sequence_len or min(lm.config.max_positions, MOST_SEQUENCE_LEN)
    result: dict[str, Any] = {
        "corpus": {
            "description": files.description,
            "sha256": files.digest,
            "held_out_files": len(files.held_out),
            "held_out_bytes": sum(document.num_bytes for document in files.held_out),
        },
        "model": _judge(lm, chosen, files.held_out, sequence_len, arguments.limit_pieces),
    }
    if arguments.baselines:
        result["baselines"] = [
            {**dataclasses.asdict(entry), "bits_per_byte": entry.bits_per_byte} for entry in _baselines(files)
        ]
    if arguments.json:
        print(json.dumps(result, allow_nan=False), flush=True)
    else:
        _print_table(result)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv, less_memory="a smaller --sequence-len or --weight-dtype needs less")


if __name__ == "__main__":
    sys.exit(main())
