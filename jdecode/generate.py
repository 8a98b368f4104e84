"""Writes text with a language model: ``python -m jdecode.generate --config smollm2_135m.yaml --prompt TEXT``."""

import argparse
import dataclasses
import json
import math
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jdecode import (
    command_line,
    config,
    draft_arguments,
    eviction_arguments,
    flag_names,
    prefix_arguments,
    prompt_arguments,
)

if TYPE_CHECKING:
    from jdecode import generation, language_model

NAME = "jdecode.generate"
_REQUEST_FLAGS = {
    "cache dtype": "--kv-dtype",
    "cache eviction": "--eviction",
    "capacity": "--capacity",
    "draft": "--draft",
    "logprobs": "--logprobs",
    "num_draft_tokens": "--num-draft-tokens",
    "stop": "--stop",
    "stop_token_ids": "--stop-token-id",
}
_EPILOG = """examples:
  python -m jdecode.generate --config smollm2_135m.yaml --prompt 'The capital of France is'
  python -m jdecode.generate --weights model.gguf --chat 'Why is the sky blue?' --temperature 0.8 --top-p 0.95
  echo 'Once upon a time' | python -m jdecode.generate --weights model.gguf --prompt-file - --json
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompt:
    """Holds the one prompt of a run: a text to continue, a chat message to answer, or token ids."""

    text: str | None = None
    chat: str | None = None
    token_ids: tuple[int, ...] | None = None


def _token_ids(text: str) -> tuple[int, ...]:
    parse = command_line.whole_number()
    try:
        return tuple(parse(part.strip()) for part in text.split(","))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(f"expected token ids such as 1,2,3, got {text!r}") from None


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Writes text with a language model.", epilog=_EPILOG
    )
    group = parser.add_argument_group("prompt (one of them; none: the config's own)")
    prompt = group.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", type=command_line.unicode_text, help="a text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same, from a file in UTF-8; - for stdin")
    prompt.add_argument("--prompt-ids", metavar="IDS", type=_token_ids, help="the same, as token ids such as 1,2,3")
    prompt.add_argument(
        "--chat", metavar="TEXT", type=command_line.plain_text, help="a message to answer, in the model's chat template"
    )
    prompt_arguments.add_arguments(parser)
    command_line.add_model_arguments(parser)
    eviction_arguments.add_arguments(parser.add_argument_group("what the cache keeps"))
    command_line.add_sampling_arguments(parser)
    group = parser.add_argument_group("ends")
    group.add_argument(
        "--stop",
        metavar="TEXT",
        action="append",
        default=[],
        type=command_line.plain_text,
        help="end before this text; may be given several times",
    )
    group.add_argument(
        "--stop-token-id",
        metavar="ID",
        action="append",
        default=[],
        type=command_line.whole_number(),
        help="end at this token; may be given several times",
    )
    group.add_argument("--ignore-eos", action="store_true", help="do not end at the model's own end tokens")
    draft_arguments.add_arguments(parser)
    prefix_arguments.add_arguments(parser)
    _add_output_arguments(parser)
    return parser


def _add_output_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("output")
    group.add_argument(
        "--num-samples", metavar="N", type=command_line.whole_number(1), default=1, help="texts for the one prompt"
    )
    group.add_argument(
        "--logprobs",
        metavar="N",
        type=command_line.whole_number(),
        help="with --json: log-probabilities of the tokens written, and of the N likeliest at each step",
    )
    group.add_argument("--json", action="store_true", help="print one JSON object (a list for several samples)")
    group.add_argument("--no-stream", action="store_true", help="print at the end, on a terminal too")


def _check_flags(arguments: argparse.Namespace) -> None:
    if arguments.logprobs is not None and not arguments.json:
        raise ValueError("--logprobs: printed with --json only; add --json, or leave it out")


def _read_prompt(arguments: argparse.Namespace, run: config.RunConfig) -> Prompt:
    if arguments.prompt_ids is not None:
        return Prompt(token_ids=arguments.prompt_ids)
    if arguments.chat is not None:
        return Prompt(chat=arguments.chat)
    if arguments.prompt is not None:
        return Prompt(text=arguments.prompt)
    if arguments.prompt_file is not None:
        return Prompt(text=command_line.read_text("--prompt-file", arguments.prompt_file))
    if run.prompt is None:
        raise ValueError("no prompt: give --prompt, --prompt-file, --prompt-ids or --chat")
    return Prompt(text=run.prompt)


def _encode(lm: "language_model.LanguageModel", prompt: Prompt) -> list[int]:
    if prompt.token_ids is not None:
        return list(prompt.token_ids)
    if prompt.chat is not None:
        return lm.encode_chat([{"role": "user", "content": prompt.chat}])
    return lm.encode(prompt.text or "")


def _echo(lm: "language_model.LanguageModel", prompt: Prompt) -> str:
    """Returns what stands before the continuation: the prompt, but nothing before the reply of a chat."""
    if prompt.token_ids is not None:
        return "" if lm.tokenizer is None else lm.tokenizer.decode(prompt.token_ids)
    return prompt.text or ""


def _plain(value: Any) -> Any:
    """Turns arrays and numpy scalars into what JSON knows; what it has no number for becomes null."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(entry) for entry in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def _json_text(
    result: "generation.GenerateResult",
    prompt_ids: Sequence[int],
    is_with_logprobs: bool,
    compression: dict[str, Any] | None,
) -> str:
    objects = []
    for row, text in enumerate(result.texts):
        length = int(result.lengths[row])
        entry = {
            "text": text,
            "token_ids": result.tokens[row][:length],
            "prompt_token_ids": prompt_ids,
            "finish_reason": result.finish_reasons[row],
            "seed": result.seeds[row],
            "stats": result.stats,
        }
        if compression is not None:
            entry["prompt_compression"] = compression
        if is_with_logprobs:
            entry["logprobs"] = [] if result.logprobs is None else result.logprobs[row][:length]
            entry["top_logprobs"] = result.top_logprobs[row][:length] if result.top_logprobs is not None else []
        objects.append(_plain(entry))
    is_unicode = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    return json.dumps(objects[0] if len(objects) == 1 else objects, ensure_ascii=not is_unicode, allow_nan=False)


def _print_texts(echo: str, texts: Sequence[str]) -> None:
    for row, text in enumerate(texts):
        if len(texts) > 1:
            print(f"--- sample {row + 1} of {len(texts)} ---")
        _print_end(f"{echo}{text}")


def _print_end(text: str) -> None:
    print(text, end="" if text.endswith("\n") else "\n", flush=True)


def _stream(
    lm: "language_model.LanguageModel", echo: str, prompt_ids: list[int], request: dict[str, Any]
) -> "generation.GenerateResult":
    """Prints the text as it comes, and returns the result."""
    stream = lm.stream(prompt_ids, **request)
    pending = echo  # printed with the first chunk: a request that is refused leaves standard output empty
    last = ""
    for chunk in stream:
        text = pending + chunk.text
        pending, last = "", text[-1:] or last
        print(text, end="", flush=True)
    if pending or last != "\n":
        _print_end(pending)
    assert stream.result is not None
    return stream.result


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Asked:
    """What the model reads: ids, the text that is shown for them, and what was left out of the prompt if anything."""

    prompt_ids: list[int]
    echo: str
    compression: dict[str, Any] | None = None


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    _check_flags(arguments)
    chosen = command_line.settings(arguments)
    speculative = draft_arguments.settings(arguments, chosen.run.speculative)
    cache = eviction_arguments.settings(arguments, chosen.run.cache)
    chosen = dataclasses.replace(chosen, run=dataclasses.replace(chosen.run, cache=cache))
    shortening = prompt_arguments.shortening(arguments)
    prompt = _read_prompt(arguments, chosen.run)
    opened = None
    if arguments.prefix_cache is not None:
        opened = prefix_arguments.check(arguments.prefix_cache, chosen, cache)
    lm, drafting = draft_arguments.load_models(chosen, speculative, opened)
    asked = _Asked(prompt_ids=_encode(lm, prompt), echo=_echo(lm, prompt))
    if shortening is not None:
        draft = drafting.get("draft")
        short = prompt_arguments.shorten(lm, asked.prompt_ids, shortening, message=prompt.chat, draft=draft)
        echo = asked.echo if prompt.chat is not None or short.text is None else short.text
        asked = _Asked(prompt_ids=list(short.ids), echo=echo, compression=short.stats)
    request: dict[str, Any] = {
        "max_new_tokens": chosen.run.max_new_tokens,
        "sampling": chosen.run.sampling,
        "num_samples": arguments.num_samples,
        "stop": tuple(arguments.stop),
        "stop_token_ids": tuple(arguments.stop_token_id),
        "ignore_eos": arguments.ignore_eos,
        "logprobs": arguments.logprobs,
        "cache": cache,
        "capacity": chosen.capacity,
        **drafting,
    }
    with flag_names.named(_REQUEST_FLAGS):
        if arguments.prefix_cache is not None:
            request["prefix_cache"] = prefix_arguments.open_cache(lm, arguments.prefix_cache, cache)
        _answer(lm, arguments, asked, request)
    if arguments.prefix_cache is not None:
        prefix_arguments.save(request["prefix_cache"], arguments.prefix_cache)


def _answer(
    lm: "language_model.LanguageModel",
    arguments: argparse.Namespace,
    asked: _Asked,
    request: dict[str, Any],
) -> None:
    """Runs the request and prints what came of it."""
    echo, prompt_ids, compression = asked.echo, asked.prompt_ids, asked.compression
    if arguments.json:
        result = lm.generate([prompt_ids], **request)
        print(_json_text(result, prompt_ids, arguments.logprobs is not None, compression), flush=True)
        return
    if sys.stdout.isatty() and not arguments.no_stream and arguments.num_samples == 1:
        result = _stream(lm, echo, prompt_ids, request)
    else:
        result = lm.generate([prompt_ids], **request)
        _print_texts(echo, result.texts)
    if compression is not None:
        prompt_arguments.print_statistics(compression)
    seeds = ", ".join(str(seed) for seed in dict.fromkeys(result.seeds))
    command_line.print_statistics(
        result.stats,
        num_prompt_tokens=len(prompt_ids),
        num_new_tokens=int(sum(result.lengths)),
        ended=f"ended by {', '.join(result.finish_reasons)}, seed {seeds}",
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
