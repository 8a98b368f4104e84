"""How many tokens of a draft a target accepts a round, for one draft or several beside each other.

Usage::

    python benchmarks/draft_acceptance.py TARGET DRAFT [DRAFT ...] [--gamma 4 --gamma 8] [--prompts 64]
                                          [--new-tokens 192] [--temperature 0.8] [--top-p 1] [--seed 0] [--json]

The target continues places in the held-out files of the standard library (the ones that ``jdecode.train`` does not
train on): beginnings of files and random places in them in turn, greedily and at the temperature. Each draft is then
judged along these texts, the same ones for all, by what speculative sampling would accept in expectation
(``jdecode/training/acceptance.py``); nothing is drawn for it. ``±`` is one standard error over the texts. The last
columns compare a draft with the first one, text by text.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator

import numpy as np

import jdecode
from jdecode.training import acceptance, corpus, draft_scores, train_config

PROMPT_LEN = 48
BATCH_SIZE = 32


def make_prompts(lm, count: int, seed: int) -> list[list[int]]:
    """Takes prompts of ``PROMPT_LEN`` tokens from held-out files, every other one the beginning of a file."""
    files = corpus.read(train_config.CorpusConfig()).held_out
    end = list(lm.tokenizer.eos_token_ids[:1])  # a text begins after the end of another, as in training
    ids = [[*end, *lm.tokenizer.encode(file.text, add_special_tokens=False, parse_special=False)] for file in files]
    ids = [row for row in ids if len(row) >= PROMPT_LEN]
    rng = np.random.default_rng(seed)
    joined = np.concatenate([np.arange(len(row) - PROMPT_LEN + 1) for row in ids])
    owners = np.repeat(np.arange(len(ids)), [len(row) - PROMPT_LEN + 1 for row in ids])
    beginnings = [(row, 0) for row in rng.permutation(len(ids))[: count // 2]]
    drawn = rng.choice(len(joined), count - len(beginnings), replace=False)
    places = [*beginnings, *((owners[idx], joined[idx]) for idx in drawn)]
    return [ids[row][start : start + PROMPT_LEN] for row, start in places]


def write(lm, prompts: list[list[int]], num_new: int, sampling: jdecode.SamplingConfig) -> list[list[int]]:
    """Has the target continue prompts; each has a seed of its own."""
    texts: list[list[int]] = []
    for first in range(0, len(prompts), BATCH_SIZE):
        rows = prompts[first : first + BATCH_SIZE]
        seeds = range((sampling.seed or 0) + first, (sampling.seed or 0) + first + len(rows))
        configs = [dataclasses.replace(sampling, seed=seed) for seed in seeds]
        result = lm.generate(rows, max_new_tokens=num_new, sampling=configs)
        texts += [row[:length].tolist() for row, length in zip(result.tokens, result.lengths, strict=True)]
    return texts


def check_tokenizers(target, draft, name: str) -> None:
    """Refuses a draft whose tokens are not the target's, string by string."""
    ours, theirs = (
        None if lm.tokenizer is None else [lm.tokenizer.token_string(idx) for idx in range(lm.tokenizer.vocab_size)]
        for lm in (target, draft)
    )
    if ours is None or ours != theirs:
        raise SystemExit(f"{name}: expected a draft with the target's tokenizer, got another or none")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    """Yields a line for each way of writing, draft and γ."""
    target = jdecode.load(arguments.target, dtype=arguments.dtype)
    drafts = {name: jdecode.load(name, dtype=arguments.dtype) for name in arguments.drafts}
    for name, draft in drafts.items():
        check_tokenizers(target, draft, name)
    prompts = make_prompts(target, arguments.prompts, arguments.seed)
    drawn = jdecode.SamplingConfig(temperature=arguments.temperature, top_p=arguments.top_p, seed=arguments.seed)
    ways = {"greedy": jdecode.SamplingConfig(), f"temperature {arguments.temperature:g}": drawn}
    for way, sampling in ways.items():
        texts = write(target, prompts, arguments.new_tokens, sampling)
        first: dict[int, list[acceptance.Rounds]] = {}
        for name, draft in drafts.items():
            accept = draft_scores.accept_probabilities(
                (target.model, target.params), (draft.model, draft.params), prompts, texts, sampling
            )
            for gamma in arguments.gamma or [4, 8]:
                rounds = [acceptance.text_rounds(row, gamma) for row in accept]
                whole = acceptance.total(rounds)
                gain, gain_error = acceptance.difference(rounds, first.setdefault(gamma, rounds))
                yield {
                    "draft": name,
                    "text": way,
                    "top_p": sampling.top_p,
                    "gamma": gamma,
                    "new_tokens": sum(len(text) for text in texts),
                    "accepted_a_round": whole.accepted_a_round,
                    "standard_error": acceptance.standard_error(rounds),
                    "emitted_a_round": whole.emitted_a_round,
                    "acceptance_rate": whole.acceptance_rate,
                    "more_than_first": gain,
                    "more_than_first_standard_error": gain_error,
                }


def main() -> None:
    """Parses arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="what jdecode.load takes")
    parser.add_argument("drafts", nargs="+", metavar="draft", help="the same")
    parser.add_argument("--gamma", type=int, action="append", help="tokens that a draft proposes; may be repeated")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=192)
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    arguments = parser.parse_args()
    if not arguments.json:
        print("| text | draft | γ | accepted a round | emitted a round | α | more than the first draft |")
        print("|---|---|---|---|---|---|---|")
    for line in measure(arguments):
        if arguments.json:
            print(json.dumps(line), flush=True)
            continue
        gain = "" if line["draft"] == arguments.drafts[0] else f"{line['more_than_first']:+.3f}"
        gain += f" ± {line['more_than_first_standard_error']:.3f}" if gain else ""
        print(
            f"| {line['text']} | {line['draft']} | {line['gamma']} | {line['accepted_a_round']:.3f} ± "
            f"{line['standard_error']:.3f} | {line['emitted_a_round']:.3f} | {line['acceptance_rate']:.3f} | {gain} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
