"""Speculative decoding, measured beside what the arithmetic of ``speculative.speed_up`` expects of it.

Everything runs in one process, in turn, round after round, since machines drift: plain decoding, each γ, the adaptive
draft, and the loops that time a step of the draft and a block of the target. Medians over the rounds are compared.
"""

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tqdm

from jdecode import config as config_lib
from jdecode import drafts, language_model, step_cost
from jdecode import request as request_lib
from jdecode.speculative import draft_layer_skip, draft_model, draft_ngram, speed_up
from jdecode.speculative import speculation as speculation_lib

MOST_STEPS = 64
"""Steps of a timed loop: enough to hide what it takes to start one."""

_COUNTS = ("drafted", "tested", "accepted", "target_calls", "target_places", "new_tokens")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """What is measured, on one row.

    Attributes:
      lm: the target.
      prompt_ids: at least one.
      draft: as ``LanguageModel.stream`` takes it.
      verify: a name of ``config.VERIFY_RULES``.
      gammas: numbers of proposals, rising.
      rounds: how often each way is measured; round r draws with the seed of ``sampling``, or 0, plus r.
      max_new_tokens: of each text, at least 2: the first comes from the prefill. Texts do not stop at end tokens.
      sampling, cache: of all.
      capacity: cache slots; ``None`` for what the request needs.
    """

    lm: language_model.LanguageModel
    prompt_ids: list[int]
    draft: Any
    verify: str
    gammas: tuple[int, ...]
    rounds: int
    max_new_tokens: int
    sampling: config_lib.SamplingConfig
    cache: config_lib.CacheConfig = config_lib.CacheConfig()
    capacity: int | None = None

    @property
    def seed(self) -> int:
        """Of the first round."""
        return self.sampling.seed or 0

    @property
    def slots(self) -> int:
        """Slots of a row's cache."""
        return self.capacity or language_model.capacity_for(len(self.prompt_ids) + self.max_new_tokens)

    def generate(self, gamma: int, is_adaptive: bool, idx: int) -> Mapping[str, Any]:
        """Writes a text, plainly where ``gamma`` is 0, and returns its statistics."""
        drafting: request_lib.DraftOptions = {}
        if gamma:
            drafting = {
                "draft": self.draft,
                "num_draft_tokens": gamma,
                "verify": self.verify,
                "adaptive_draft": is_adaptive,
            }
        return self.lm.generate(
            [self.prompt_ids],
            max_new_tokens=self.max_new_tokens,
            sampling=dataclasses.replace(self.sampling, seed=(self.seed + idx) % 2**63),
            ignore_eos=True,
            cache=self.cache,
            capacity=self.capacity,
            **drafting,
        ).stats

    def speculation(self, gamma: int) -> speculation_lib.Speculation:
        """Returns the draft with its parameters, checked against the target."""
        made = drafts.make_speculation(
            self.lm,
            draft=self.draft,
            num_draft_tokens=gamma,
            verify=self.verify,
            adaptive_draft=False,
            cache=self.cache,
        )
        if made is None:
            raise ValueError("draft: expected one to measure, got none")
        return made


def measure(plan: Plan) -> dict[str, Any]:
    """Measures, and sets what was measured beside what was to be expected.

    Returns:
      What JSON can hold; ``_report`` and ``_block`` name the entries.

    Raises:
      ValueError, TypeError: a plan that cannot be honoured, one line.
    """
    most = plan.gammas[-1]
    ways = [(0, False), *((gamma, False) for gamma in plan.gammas), (most, True)]
    timers = _timers(plan)
    texts: dict[tuple[int, bool], list[Mapping[str, Any]]] = {way: [] for way in ways}
    seconds: dict[str, list[float]] = {name: [] for name in timers}
    # One round more than is counted: the first compiles.
    with tqdm.tqdm(total=(1 + plan.rounds) * (len(ways) + len(timers)), desc="measuring", disable=None) as bar:
        for idx in range(1 + plan.rounds):
            for way in ways:
                texts[way].append(plan.generate(*way, max(idx - 1, 0)))
                bar.update()
            for name, timer in timers.items():
                seconds[name].append(timer())
                bar.update()
    counted = {way: stats[1:] for way, stats in texts.items()}
    bandwidth = None if plan.lm.mesh is not None else step_cost.memory_bandwidth()
    return _report(plan, counted, {name: statistics.median(values[1:]) for name, values in seconds.items()}, bandwidth)


def _timers(plan: Plan) -> dict[str, Callable[[], float]]:
    """Returns what gives the seconds of a plain step, of the draft, and of each block."""
    lm, num_steps = plan.lm, min(MOST_STEPS, plan.max_new_tokens)
    # The clock runs over the middle of the text, so that the cache holds what it holds on the average.
    num_held = len(plan.prompt_ids) + (plan.max_new_tokens - num_steps) // 2
    held = (plan.prompt_ids * -(-num_held // len(plan.prompt_ids)))[:num_held]

    def target(gamma: int) -> float:
        slack = speculation_lib.with_slack(plan.cache, gamma)
        cache = lm.init_cache(batch_size=1, capacity=plan.slots, cache=slack)
        return step_cost.block_seconds(lm.model, lm.params, cache, held, block_len=gamma + 1, num_steps=num_steps)

    most = plan.gammas[-1]
    speculation = plan.speculation(most)

    def draft() -> float:
        own = speculation.draft
        if isinstance(own, draft_ngram.NgramDraft):
            return step_cost.look_up_seconds(
                own,
                lm.init_cache(batch_size=1, capacity=1),
                plan.prompt_ids,
                vocab_size=lm.config.vocab_size,
                num_draft_tokens=most,
                max_len=plan.slots,
                num_steps=num_steps,
            )
        if isinstance(own, draft_layer_skip.LayerSkipDraft):
            small = dataclasses.replace(lm, config=own.model.config, model=own.model)
            cache = small.init_cache(batch_size=1, capacity=plan.slots, cache=plan.cache)
            params = lm.params
        else:
            assert isinstance(own, draft_model.ModelDraft)
            cache, params = own.init_cache(1, plan.slots), speculation.draft_params
        return step_cost.block_seconds(own.model, params, cache, held, block_len=1, num_steps=num_steps)

    blocks = {f"block {gamma}": lambda gamma=gamma: target(gamma) for gamma in plan.gammas}
    return {"plain": lambda: target(0), "draft": draft, **blocks}


def _report(
    plan: Plan,
    texts: Mapping[tuple[int, bool], Sequence[Mapping[str, Any]]],
    seconds: Mapping[str, float],
    bandwidth: float | None,
) -> dict[str, Any]:
    """Puts everything together; times in seconds, speed-ups relative to plain decoding.

    Args:
      texts: statistics of each way, (γ, adaptive), round by round.
      seconds: of a step of each timer.
      bandwidth: bytes a second, ``None`` where it was not measured.
    """
    lm, draft = plan.lm, plan.speculation(plan.gammas[-1]).draft
    plain = texts[0, False]
    plain_speed = _median_speed(plain)
    cost = seconds["draft"] / seconds["plain"]
    operations = 0.0
    if not isinstance(draft, draft_ngram.NgramDraft):
        own = draft.model.config  # pyright: ignore[reportAttributeAccessIssue]
        operations = step_cost.operations_a_token(own) / step_cost.operations_a_token(lm.config)
    blocks = []
    for gamma in plan.gammas:
        measured = _measured(texts[gamma, False], plain_speed, gamma)
        block_cost = seconds[f"block {gamma}"] / seconds["plain"]
        is_look_up = isinstance(draft, draft_ngram.NgramDraft)
        blocks.append(_expected(measured, cost if is_look_up else gamma * cost, block_cost, operations, is_look_up))
    held = plain[0]["kv_cache_bytes"] * (len(plan.prompt_ids) + plan.max_new_tokens / 2) / plan.slots
    return {
        "verify": plan.verify,
        "prompt_tokens": len(plan.prompt_ids),
        "new_tokens": plan.max_new_tokens,
        "rounds": plan.rounds,
        "seed": plan.seed,
        "sampling": dataclasses.asdict(plan.sampling),
        "plain": {
            "tokens_per_second": plain_speed,
            "tokens_per_second_by_round": _speeds(plain),
            "step_seconds": seconds["plain"],
            "bandwidth_bytes_per_second": bandwidth,
            "bandwidth_share": bandwidth and (lm.weight_bytes + held) * plain_speed / bandwidth,
        },
        "draft_seconds": seconds["draft"],
        "cost_ratio": cost,
        "operations_ratio": operations,
        "blocks": blocks,
        "adaptive": _measured(texts[plan.gammas[-1], True], plain_speed, plan.gammas[-1]),
        "best": {name: _best(blocks, name) for name in ("measured", "predicted", "predicted_by_place", "leviathan")},
    }


def _speeds(stats: Sequence[Mapping[str, Any]]) -> list[float]:
    return [entry["decode_tokens_per_second"] for entry in stats]


def _median_speed(stats: Sequence[Mapping[str, Any]]) -> float:
    return statistics.median(_speeds(stats))


def _measured(stats: Sequence[Mapping[str, Any]], plain_speed: float, gamma: int) -> dict[str, Any]:
    """Sums up the rounds of one way.

    ``acceptance_rate`` is α, accepted of tested proposals (``None`` where none was tested), and so it is by place;
    ``tokens_a_round`` is what a call of the target emitted; ``proposing`` is the share of calls that had proposals.
    """
    total = {name: sum(entry[name] for entry in stats) for name in _COUNTS}
    decoded = total["new_tokens"] - len(stats)  # the first token of each text comes from the prefill
    tested_G = [sum(entry["tested_by_place"][place] for entry in stats) for place in range(gamma)]
    accepted_G = [
        sum(round((entry["acceptance_by_place"][place] or 0) * entry["tested_by_place"][place]) for entry in stats)
        for place in range(gamma)
    ]
    speed = _median_speed(stats)
    return {
        "num_draft_tokens": gamma,
        "tokens_per_second": speed,
        "tokens_per_second_by_round": _speeds(stats),
        "speed_up": {"measured": speed / plain_speed},
        "tokens_a_round": decoded / total["target_calls"],
        "proposing": (total["target_places"] - total["target_calls"]) / gamma / total["target_calls"],
        "acceptance_rate": total["accepted"] / total["tested"] if total["tested"] else None,
        "acceptance_by_place": [
            hits / tests if tests else None for hits, tests in zip(accepted_G, tested_G, strict=True)
        ],
        **{name: total[name] for name in ("drafted", "tested", "accepted", "target_calls")},
    }


def _expected(
    measured: dict[str, Any], draft_cost: float, block_cost: float, operations: float, is_look_up: bool
) -> dict[str, Any]:
    """Adds what the arithmetic says, given what was measured.

    In ``speed_up`` stand beside ``measured``: ``predicted``, from one α, c and v; ``predicted_by_place``, from a rate
    for each place, c and v; ``leviathan``, from α and c with a block that costs a plain step. ``other_cost`` is what a
    round took beyond draft and block, in plain steps: drawing, verification, and what the clock of a busy machine adds.

    Args:
      draft_cost: of all proposals of a round, in plain steps.
      block_cost: v.
      operations: ĉ.
      is_look_up: whether the draft may have nothing to propose; such rounds are then counted as what they are.
    """
    gamma, alpha = measured["num_draft_tokens"], measured["acceptance_rate"]
    proposing = measured["proposing"] if is_look_up else 1.0
    tokens = speed_up.expected_tokens(alpha or 0.0, gamma)
    by_place = speed_up.expected_tokens_by_place([rate or 0.0 for rate in measured["acceptance_by_place"]])
    gains = {
        **measured["speed_up"],
        "predicted": speed_up.round_speed_up(tokens, draft_cost, block_cost, proposing),
        "predicted_by_place": speed_up.round_speed_up(by_place, draft_cost, block_cost, proposing),
        "leviathan": speed_up.round_speed_up(tokens, draft_cost, 1.0, proposing),
    }
    return {
        **measured,
        "speed_up": gains,
        "draft_cost": draft_cost,
        "block_cost": block_cost,
        "other_cost": measured["tokens_a_round"] / measured["speed_up"]["measured"]
        - (draft_cost + proposing * block_cost + 1 - proposing),
        "expected_tokens": tokens,
        "expected_tokens_by_place": by_place,
        "operations_factor": speed_up.operations_factor(alpha or 0.0, gamma, operations, proposing),
    }


def _best(blocks: Sequence[Mapping[str, Any]], name: str) -> int:
    """Returns the γ with the greatest speed-up of a kind, 0 where plain decoding is the fastest."""
    gains = {0: 1.0, **{block["num_draft_tokens"]: block["speed_up"][name] for block in blocks}}
    return max(gains, key=lambda gamma: gains[gamma])
