"""Speculative rounds whose target and draft are tables: the logits after a token are a row of a matrix.

Everything else is the package's own: the chain of transforms, the draft's draws, the rule, and what is emitted. So the
law of the emitted tokens is known from the target's table alone.
"""

import dataclasses
import functools
import types
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from scipy import stats

from jdecode import config, sampling
from jdecode.decode import state as state_lib
from jdecode.decode import stopping
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import drawing, proposals, speculative_round, statistics, verify
from jdecode.speculative import pace as pace_lib

VOCAB = 11
G = 3
START_TOKEN = 7
"""Each row's latest token at the start; it is the prompt, too."""

CHAIN = sampling.standard_chain()
PLAIN_CHAIN = sampling.Chain((sampling.Temperature(),))
"""Compiles much faster."""

FALSE_ALARM = 1e-4
"""Of one chi-square test."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Lengths:
    """Stands for a cache: tables remember nothing but how far they are."""

    length_B: jax.Array
    shared_B: None = None

    @property
    def batch_size(self) -> int:
        return self.length_B.shape[0]


@dataclasses.dataclass(frozen=True)
class TableModel:
    """The target; its params are a table (V, V)."""

    vocab_size: int = VOCAB

    @property
    def config(self) -> types.SimpleNamespace:
        return types.SimpleNamespace(vocab_size=self.vocab_size)

    def apply(self, table_VV, token_BT, cache: Lengths, *, num_tokens_B):
        return table_VV[token_BT], Lengths(length_B=cache.length_B + num_tokens_B)


@dataclasses.dataclass(frozen=True)
class TableDraft:
    """Draws from a table of its own."""

    def begin(self, params, prompts, *, num_samples, max_len):
        return ()

    def propose(self, task, params, memory, state, want_B):
        def feed(cache, token_B, is_asked_B):
            return params.draft[token_B], cache

        drawn, _ = drawing.propose(task, feed, (), state, want_B)
        return drawn, memory, state.cache

    def settle(self, memory, before, after):
        return memory


@dataclasses.dataclass(frozen=True)
class ArgmaxDraft(TableDraft):
    """The known fault: it takes the argmax, but reports the law that it should have drawn from."""

    def propose(self, task, params, memory, state, want_B):
        greedy = dataclasses.replace(state, is_random_B=jnp.zeros_like(state.is_random_B))
        return super().propose(task, params, memory, greedy, want_B)


@dataclasses.dataclass(frozen=True)
class PointDraft(TableDraft):
    """Always proposes its params, int32 (G,), and draws nothing."""

    def propose(self, task, params, memory, state, want_B):
        token_BG = jnp.broadcast_to(params.draft[None, :], (want_B.shape[0], task.most))
        return proposals.Proposals(token_BG=token_BG, num_B=want_B, logits_BGV=None), memory, state.cache


def rounds(
    rule: verify.Verify, draft: TableDraft = TableDraft(), chain: sampling.Chain = CHAIN
) -> speculative_round.SpeculativeRound:
    """Makes the step of a rule, which always proposes G tokens."""
    return speculative_round.SpeculativeRound(cast(Any, TableModel()), chain, cast(draft_lib.Draft, draft), rule, G)


def begin(
    step: speculative_round.SpeculativeRound,
    num_rows: int,
    fields: dict[str, Any],
    *,
    seed: int,
    output_len: int,
    stop_ids: tuple[int, ...] = (),
) -> speculative_round.SpeculativeState:
    """Makes rows that have the prompt ``START_TOKEN``, are equal but for their keys, and stand at three positions."""
    one = sampling.params_from_configs(
        [config.SamplingConfig(**fields)], vocab_size=VOCAB, prompts=[[START_TOKEN]], history_len=17,
        stop_ids=[stop_ids],
    )  # fmt: skip
    params = jax.tree.map(lambda leaf: jnp.repeat(leaf, num_rows, axis=0), one)
    decode = state_lib.init_state(
        cast(Any, Lengths(length_B=jnp.arange(num_rows, dtype=jnp.int32) % 3)),
        sampler=step.chain.init(params, num_rows, VOCAB),
        key_B=sampling.request_keys([seed] * num_rows, range(num_rows)),
        temperature_B=params.temperature_B,
        stop_ids_BX=jnp.asarray(stopping.padded([stop_ids] * num_rows)),
        max_new_B=jnp.full(num_rows, output_len, jnp.int32),
        output_len=output_len,
        num_top_logprobs=None,
    )
    decode = dataclasses.replace(decode, token_B=jnp.full(num_rows, START_TOKEN, jnp.int32))
    drafting = speculative_round.Drafting(
        memory=(), pace=pace_lib.begin(jnp.zeros(num_rows, bool), None, G), counts=statistics.no_counts(num_rows, G)
    )
    return speculative_round.SpeculativeState(decode=decode, drafting=drafting)


@functools.partial(jax.jit, static_argnums=0)
def run(
    step: speculative_round.SpeculativeRound, target_VV: jax.Array, draft: jax.Array, state, num_rounds: jax.Array
) -> speculative_round.SpeculativeState:
    """Runs so many rounds."""
    params = draft_lib.Params(target=target_VV, draft=draft)
    return jax.lax.fori_loop(0, num_rounds, lambda _, state: step(params, state), state)


def table(logits: np.ndarray) -> jax.Array:
    """Returns a table (V, V) as it is, or the one of a model that says the same (V,) after every token."""
    return jnp.asarray(np.broadcast_to(logits, (VOCAB, VOCAB)), jnp.float32)


def law(
    logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """Computes what the filters leave of a row of logits without ties: a plain model, in float64."""
    with np.errstate(divide="ignore"):
        weights = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-weights)
    if top_k:
        weights[order[top_k:]] = 0
    if top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= top_p * weights.sum()]] = 0
    weights[weights < min_p * weights.max()] = 0
    return weights / weights.sum()


def chi_square(counts: np.ndarray, expected_law: np.ndarray) -> tuple[float, float]:
    """Returns the statistic of counts against a law, and its limit at ``FALSE_ALARM``.

    Cells with an expected count under 10 are one cell. A count where the law has nothing is infinitely far off.
    """
    counts, expected = counts.ravel().astype(np.float64), expected_law.ravel() * counts.sum()
    if counts[expected == 0].any():
        return np.inf, 0.0
    is_rare = expected < 10
    if is_rare.any() and expected[is_rare].sum() < 10:  # fill the rest cell up with the least of the others
        is_rare[np.argmin(np.where(is_rare, np.inf, expected))] = True
    counts, expected = (
        np.append(values[~is_rare], values[is_rare].sum() if is_rare.any() else []) for values in (counts, expected)
    )
    counts, expected = counts[expected > 0], expected[expected > 0]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    return statistic, float(stats.chi2.isf(FALSE_ALARM, max(len(expected) - 1, 1)))


def assert_law(tokens: np.ndarray, expected_law: np.ndarray) -> None:
    """Holds tokens (N,), or tuples of n tokens (N, n), against a law (V,), or a joint law (V, …, V)."""
    tokens = np.asarray(tokens).reshape(len(tokens), -1)
    counts = np.zeros(expected_law.shape, np.int64)
    np.add.at(counts, tuple(tokens.T), 1)
    statistic, limit = chi_square(counts, expected_law)
    assert statistic < limit, (statistic, limit, counts, expected_law * len(tokens))
