"""What compression costs: the log-likelihood of answers that stand in a long prompt, by way and budget.

Usage::

    python benchmarks/compression_quality.py FILE.gguf [--budgets 0.5,0.25] [--ways 'NAME;...'] [--prompts 10] [--json]

The ten prompts of retrieval_prompts.yaml (a fact somewhere in some 800 tokens, then a question) go through the model as
they are, without the text, and shortened in each way to a share of their tokens; the question and the beginning of the
reply always stay. ``answer`` is the mean over prompts of the answer's log-likelihood in nats, ``token`` that of its
tokens, ``tokens`` how many the model reads, or its cache keeps, on average. Weights and products are float32.
"""

import argparse
import dataclasses
import json
import pathlib
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import yaml

import jdecode
from jdecode.prompt_compression import token_scorer

PROMPTS = pathlib.Path(__file__).with_name("retrieval_prompts.yaml")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """One prompt, as ids.

    Attributes:
      text_ids, rest_ids: the prompt: a text, then the question and the beginning of the reply.
      answer_ids: what should follow.
      question: as text.
    """

    text_ids: list[int]
    rest_ids: list[int]
    answer_ids: list[int]
    question: str

    @property
    def ids(self) -> list[int]:
        """The whole prompt."""
        return self.text_ids + self.rest_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reading:
    """What a model is given for a case: the prompt's ids, and how its cache is kept (``None``: as it is)."""

    ids: Sequence[int]
    cache: jdecode.CacheConfig | None = None
    num_kept: int | None = None


@dataclasses.dataclass(frozen=True)
class RememberingScorer:
    """Asks another scorer once: several ways and budgets need the same scores."""

    scorer: token_scorer.TokenScorer
    known: dict[tuple[int, ...], np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def window_len(self) -> int:
        """That of the other."""
        return self.scorer.window_len

    def surprise(self, ids: Sequence[int]) -> np.ndarray:
        """See ``TokenScorer``."""
        if tuple(ids) not in self.known:
            self.known[tuple(ids)] = self.scorer.surprise(ids)
        return self.known[tuple(ids)]


Way = Callable[[Case, int], Reading]
"""From a case and a budget in tokens to what the model is given."""


def cut(case: Case, budget: int, *, head_share: float = 0.0) -> Reading:
    """Keeps the latest tokens of the text, or some of the first and the rest of the latest ones."""
    room = budget - len(case.rest_ids)
    head = int(room * head_share)
    return Reading(ids=case.text_ids[:head] + case.text_ids[len(case.text_ids) - (room - head) :] + case.rest_ids)


def ways(lm: jdecode.LanguageModel) -> dict[str, Way]:
    """Returns the ways by name: cutting, choosing tokens before the model, choosing slots in its cache."""
    scorer = RememberingScorer(token_scorer.ModelScorer(lm=lm))

    def compressed(case: Case, budget: int, **options: Any) -> Reading:
        rest = range(len(case.text_ids), len(case.ids))
        short = jdecode.compress_prompt(lm, case.ids, budget=budget, protected=[rest], scorer=scorer, **options)
        return Reading(ids=short.ids)

    def evicted(case: Case, budget: int, eviction: str) -> Reading:
        budget -= budget % 16  # each size compiles programs of its own
        cache = jdecode.CacheConfig(budget=budget, eviction=eviction)
        return Reading(ids=case.ids, cache=cache, num_kept=budget)

    return {
        "tail": cut,
        "head and tail": lambda case, budget: cut(case, budget, head_share=0.5),
        "sentences, question": lambda case, budget: compressed(case, budget, question=case.question),
        "sentences": compressed,
        "words, question": lambda case, budget: compressed(case, budget, question=case.question, unit="word"),
        "words": lambda case, budget: compressed(case, budget, unit="word"),
        "tokens": lambda case, budget: compressed(case, budget, unit="token"),
        "snapkv": lambda case, budget: evicted(case, budget, "snapkv"),
        "h2o": lambda case, budget: evicted(case, budget, "h2o"),
    }


def text_of(prompt: dict[str, Any], passages: dict[str, str]) -> tuple[str, str]:
    """Returns a prompt's text with the fact in it, and what follows the text."""
    sentences = [
        (name, sentence) for name in prompt["passages"] for sentence in re.split(r"(?<=[.!?]) ", passages[name])
    ]
    place = round(prompt["depth"] * len(sentences))
    sentences.insert(place, (sentences[min(place, len(sentences) - 1)][0], prompt["fact"]))
    paragraphs = (" ".join(text for name, text in sentences if name == wanted) for wanted in prompt["passages"])
    return "\n\n".join(paragraphs), f"\n\nQuestion: {prompt['question']}\nAnswer: {prompt['lead']}"


def read_cases(lm: jdecode.LanguageModel, num_prompts: int) -> list[Case]:
    """Reads the prompts."""
    assert lm.tokenizer is not None
    data = yaml.safe_load(PROMPTS.read_text(encoding="utf-8"))
    cases = []
    for prompt in data["prompts"][:num_prompts]:
        text, rest = text_of(prompt, data["passages"])
        cases.append(
            Case(
                text_ids=lm.encode(text),
                rest_ids=lm.tokenizer.encode(rest, add_special_tokens=False),
                answer_ids=lm.tokenizer.encode(prompt["answer"], add_special_tokens=False),
                question=prompt["question"],
            )
        )
    return cases


def answer_scores(lm: Any, reading: Reading, answer_ids: list[int]) -> np.ndarray:
    """Returns float32 (len(answer_ids)), the log-probability of each token of an answer."""
    if reading.cache is None:
        return lm.score([[*reading.ids, *answer_ids]])[0][-len(answer_ids) :]
    return lm.score_continuation([list(reading.ids)], [answer_ids], cache=reading.cache)[0]


def measure(lm: jdecode.LanguageModel, cases: Sequence[Case], way: Callable[[Case], Reading]) -> dict[str, Any]:
    """Measures one way."""
    readings = [way(case) for case in cases]
    scores = [answer_scores(lm, reading, case.answer_ids) for reading, case in zip(readings, cases, strict=True)]
    return {
        "answer": float(np.mean([row.sum() for row in scores])),
        "token": float(np.mean(np.concatenate(scores))),
        "tokens": float(np.mean([reading.num_kept or len(reading.ids) for reading in readings])),
        "answers": [round(float(row.sum()), 2) for row in scores],
    }


def main() -> None:
    """Measures, and prints one line a way and budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--budgets", default="0.5,0.25")
    parser.add_argument("--ways", help="names of ways, with ; between them; all unless said")
    parser.add_argument("--prompts", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    lm = jdecode.load(arguments.file, dtype="float32")
    cases = read_cases(lm, arguments.prompts)
    known = ways(lm)
    names = list(known) if arguments.ways is None else arguments.ways.split(";")
    if unknown := [name for name in names if name not in known]:
        parser.error(f"--ways: expected some of {'; '.join(known)}, got {unknown[0]!r}")
    plans: list[tuple[str, float | None, Callable[[Case], Reading]]] = [
        ("whole prompt", None, lambda case: Reading(ids=case.ids)),
        ("question alone", None, lambda case: Reading(ids=case.rest_ids)),
    ]
    for share in map(float, arguments.budgets.split(",")):
        for name in names:
            way = known[name]
            plans.append((name, share, lambda case, way=way, share=share: way(case, int(share * len(case.ids)))))
    for name, share, way in plans:
        line = {"way": name, "budget": share, **measure(lm, cases, way)}
        shown = "      " if share is None else f"{share:6.0%}"
        print(
            json.dumps(line)
            if arguments.json
            else f"{name:22}{shown}  {line['answer']:7.2f} an answer, {line['token']:6.2f} a token, "
            f"{line['tokens']:.0f} tokens  {line['answers']}",
            flush=True,
        )


if __name__ == "__main__":
    main()
