"""Talks with a chat model over several turns: ``python -m jdecode.chat --config smollm2_135m.yaml``.

The cache is kept between turns, so that a turn costs what it adds. Lines come from a terminal or from a pipe.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from jdecode import command_line, draft_arguments

if TYPE_CHECKING:
    from jdecode import chat_session

NAME = "jdecode.chat"
_ASK = "> "
_COMMANDS = "/reset forgets the conversation, /exit or the end of input leaves"


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Talks with a chat model.", epilog=_COMMANDS
    )
    parser.add_argument("--system", metavar="TEXT", type=command_line.plain_text, help="a message that leads all turns")
    parser.add_argument("--stats", action="store_true", help="print what each turn took, on standard error")
    command_line.add_model_arguments(parser)
    command_line.add_sampling_arguments(parser)
    draft_arguments.add_arguments(parser)
    return parser


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yields what the user says, line by line, until the end of input."""
    if is_terminal:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401  (input() then edits lines and keeps a history)
    while True:
        try:
            line = input(_ASK) if is_terminal else sys.stdin.readline()
        except EOFError:
            print()
            return
        except UnicodeDecodeError as error:
            raise ValueError(f"standard input: expected text in UTF-8, got other bytes at {error.start}") from None
        if not is_terminal and not line:
            return
        yield line.strip()


def _turn(session: "chat_session.ChatSession", text: str, max_new_tokens: int, is_with_stats: bool) -> None:
    stream = session.send(text, max_new_tokens=max_new_tokens)
    for chunk in stream:
        print(chunk.text, end="", flush=True)
    print(flush=True)
    if is_with_stats:
        result = stream.result
        assert result is not None
        command_line.print_statistics(
            result.stats,
            num_prompt_tokens=sum(len(ids) for ids in result.prompt_tokens),
            num_new_tokens=int(sum(result.lengths)),
            ended=f"ended by {result.finish_reasons[0]}",
        )


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    chosen = command_line.settings(arguments)
    speculative = draft_arguments.settings(arguments, chosen.run.speculative)
    lm, drafting = draft_arguments.load_models(chosen, speculative)
    session = lm.chat_session(
        sampling=chosen.run.sampling,
        cache=chosen.run.cache,
        capacity=chosen.capacity,
        system=arguments.system,
        **drafting,
    )
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if is_terminal:
        print(_COMMANDS, file=sys.stderr)
    for text in _lines(is_terminal):
        if text == "/exit":
            return
        if text == "/reset":
            session.reset()
        elif text.startswith("/") and " " not in text:
            _refuse(f"unknown command {text}: {_COMMANDS}", is_terminal)
        elif text:
            try:
                _turn(session, text, chosen.run.max_new_tokens, arguments.stats)
            except ValueError as error:
                _refuse(f"{error}; {_COMMANDS}", is_terminal)


def _refuse(message: str, is_terminal: bool) -> None:
    """On a terminal says what is wrong and goes on; in a pipe nobody can answer, so the run ends."""
    if not is_terminal:
        raise ValueError(message)
    command_line.report(NAME, message)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
