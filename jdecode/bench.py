"""Measures decoding: ``python -m jdecode.bench --speculative --config gqa_small.yaml --draft gqa_draft``."""

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from jdecode import command_line, config, draft_arguments, plot_file, speculative_report

NAME = "jdecode.bench"
LEAST_NEW_TOKENS = 2  # the first token of a text comes from the prefill, and is no decoding
_EPILOG = """examples:
  python -m jdecode.bench --speculative --config gqa_small.yaml --draft gqa_draft --num-draft-tokens 1,2,4,8
  python -m jdecode.bench --speculative --weights FILE.gguf --draft ngram --prompt-file notes.txt --plot speed.png

Plain decoding and each number of proposals run in turn, round after round, on one text that does not stop at end
tokens; so do loops that time a draft step (c) and a block of the target (v), in plain steps. What comes of it stands
beside what Leviathan et al. (2023) expect from the acceptance rate, c and v. The draft ngram is counted as proposing
only in the rounds in which it found something, and its c is that of a round. Each round draws with a seed of its own,
counted up from --seed, or from 0.
"""


def _gammas(text: str) -> tuple[int, ...]:
    parse = command_line.whole_number(1, config.MOST_DRAFT_TOKENS)
    try:
        return tuple(sorted({parse(part.strip()) for part in text.split(",")}))
    except argparse.ArgumentTypeError:
        raise argparse.ArgumentTypeError(
            f"expected numbers from 1 to {config.MOST_DRAFT_TOKENS} such as 1,2,4,8, got {text!r}"
        ) from None


def build_parser() -> command_line.ArgumentParser:
    """Builds the parser of all flags."""
    parser = command_line.ArgumentParser(
        prog=f"python -m {NAME}", description="Measures the speed of decoding.", epilog=_EPILOG
    )
    parser.add_argument(
        "--speculative", action="store_true", help="a draft beside plain decoding, and beside what is to be expected"
    )
    prompt = parser.add_argument_group("prompt (none: the config's own)").add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", type=command_line.unicode_text, help="a text to continue")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same, from a file in UTF-8; - for stdin")
    command_line.add_model_arguments(parser)
    command_line.add_sampling_arguments(parser)
    group = parser.add_argument_group("speculative decoding")
    group.add_argument(
        "--draft",
        metavar="NAME_OR_PATH",
        type=command_line.name_text,
        help="what proposes tokens: ngram, layer_skip, or weights of a smaller model with the same tokens",
    )
    group.add_argument(
        "--num-draft-tokens", metavar="LIST", type=_gammas, default=(1, 2, 4, 8), help="proposals a round; 1,2,4,8"
    )
    group.add_argument("--verify", choices=config.VERIFY_RULES, help="the rule of acceptance")
    group = parser.add_argument_group("output")
    group.add_argument("--rounds", metavar="N", type=command_line.whole_number(1), default=3, help="of which medians")
    group.add_argument("--plot", metavar="FILE.png", type=command_line.plain_text, help="draw the outcome too")
    group.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def _speculative(arguments: argparse.Namespace, base: config.SpeculativeConfig) -> config.SpeculativeConfig:
    """Returns the draft and the rule of the flags, or else of the config."""
    draft = arguments.draft or base.draft
    if draft is None or draft == draft_arguments.NO_DRAFT:
        raise ValueError("--draft: expected ngram, layer_skip or the weights of a model, got none; add --draft")
    most = max(arguments.num_draft_tokens)
    return config.SpeculativeConfig(draft=draft, num_draft_tokens=most, verify=arguments.verify or base.verify)


def _check_flags(arguments: argparse.Namespace) -> None:
    if not arguments.speculative:
        raise ValueError("nothing to measure: expected --speculative (a draft beside plain decoding), got none")
    if arguments.plot is not None:
        plot_file.check(pathlib.Path(arguments.plot))


def _prompt(arguments: argparse.Namespace, run: config.RunConfig) -> str:
    if arguments.prompt is not None:
        return arguments.prompt
    if arguments.prompt_file is not None:
        return command_line.read_text("--prompt-file", arguments.prompt_file)
    if run.prompt is None:
        raise ValueError("no prompt: give --prompt or --prompt-file")
    return run.prompt


def _measure(
    chosen: command_line.Settings, own: config.SpeculativeConfig, prompt: str, gammas: tuple[int, ...], rounds: int
) -> dict[str, Any]:
    lm, drafting = draft_arguments.load_models(chosen, own)
    from jdecode import speculative_bench  # late: it imports jax

    plan = speculative_bench.Plan(
        lm=lm,
        prompt_ids=lm.encode(prompt),
        draft=drafting.get("draft"),
        verify=own.verify,
        gammas=gammas,
        rounds=rounds,
        max_new_tokens=chosen.run.max_new_tokens,
        sampling=chosen.run.sampling,
        cache=chosen.run.cache,
        capacity=chosen.capacity,
    )
    return {"target": chosen.source, "draft": own.draft, **speculative_bench.measure(plan)}


def _main(argv: Sequence[str] | None) -> None:
    arguments = build_parser().parse_args(argv)
    _check_flags(arguments)
    chosen = command_line.settings(arguments)
    own = _speculative(arguments, chosen.run.speculative)
    if chosen.run.max_new_tokens < LEAST_NEW_TOKENS:
        raise ValueError(f"--max-new-tokens: expected at least {LEAST_NEW_TOKENS}, got {chosen.run.max_new_tokens}")
    prompt = _prompt(arguments, chosen.run)
    report = _measure(chosen, own, prompt, arguments.num_draft_tokens, arguments.rounds)
    print(json.dumps(report, allow_nan=False) if arguments.json else speculative_report.table(report), flush=True)
    if arguments.plot is not None:
        speculative_report.write_plot(pathlib.Path(arguments.plot), report)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command, and returns its exit status.

    Args:
      argv: arguments; ``None`` for those of the process.
    """
    return command_line.run(NAME, _main, argv)


if __name__ == "__main__":
    sys.exit(main())
