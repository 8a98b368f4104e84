"""Runs speculative decoding round by round, below ``generate``."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config, language_model, sampling
from jdecode.decode import loop, prefill, stopping
from jdecode.speculative import draft_model, speculation, speculative_round, verify

CHAIN = sampling.standard_chain()
MAX_LEN = 256


@dataclasses.dataclass(frozen=True)
class PausingDraft:
    """Asks a draft for nothing in some rounds.

    Attributes:
      draft: the one that is asked.
      most: by round, over and over, the most tokens that are asked for.
    """

    draft: Any
    most: tuple[int, ...]

    def begin(self, params, prompts, *, num_samples, max_len):
        own = self.draft.begin(params, prompts, num_samples=num_samples, max_len=max_len)
        return {"own": own, "round": jnp.int32(0)}

    def propose(self, task, params, memory, state, want_B):
        most = jnp.asarray(self.most)[memory["round"] % len(self.most)]
        found, own, cache = self.draft.propose(task, params, memory["own"], state, jnp.minimum(want_B, most))
        return found, {"own": own, "round": memory["round"] + 1}, cache

    def settle(self, memory, before, after):
        return {**memory, "own": self.draft.settle(memory["own"], before, after)}


def with_model(
    draft: language_model.LanguageModel, num_draft_tokens: int, *, rule: str = "rejection", most: tuple[int, ...] = ()
) -> speculation.Speculation:
    """Makes the speculation with a model, which may pause."""
    own: Any = draft_model.ModelDraft(draft.model, config.CacheConfig(slack=num_draft_tokens))
    return speculation.Speculation(
        draft=PausingDraft(own, most) if most else own,
        draft_params=draft.params,
        num_draft_tokens=num_draft_tokens,
        verify=verify.RULES[rule],
        costs=None,
    )


def begin(
    lm: language_model.LanguageModel,
    prompts: list[list[int]],
    own: speculation.Speculation,
    *,
    max_new: int,
    **fields: Any,
) -> speculative_round.SpeculativeState:
    """Reads the prompts and draws the first tokens."""
    slack = config.CacheConfig(slack=own.num_draft_tokens)
    cache = lm.init_cache(batch_size=len(prompts), capacity=MAX_LEN, cache=slack)
    cache, logits_BV = prefill.prefill(lm.model, lm.params, prompts, cache)
    params = sampling.params_from_configs(
        [config.SamplingConfig(**fields)] * len(prompts),
        vocab_size=lm.config.vocab_size,
        prompts=prompts,
        history_len=MAX_LEN,
        stop_ids=[()] * len(prompts),
    )
    decode = loop.begin(
        CHAIN,
        params,
        cache,
        logits_BV,
        key_B=sampling.request_keys([11] * len(prompts), range(len(prompts))),
        stop_ids_BX=stopping.padded([()] * len(prompts)),
        max_new_B=jnp.full(len(prompts), max_new, jnp.int32),
        output_len=max_new,
    )
    drafting = own.begin(lm.params, decode, prompts, num_samples=1, max_len=MAX_LEN)
    return speculative_round.SpeculativeState(decode=decode, drafting=drafting)


def run(
    lm: language_model.LanguageModel,
    own: speculation.Speculation,
    state: speculative_round.SpeculativeState,
    max_tokens: int = loop.ALL_TOKENS,
) -> speculative_round.SpeculativeState:
    """Runs rounds until a row has ``max_tokens`` more; 1 runs one round."""
    return loop.run(own.step(lm.model, CHAIN), own.params(lm.params), state, max_tokens)


def text(state: speculative_round.SpeculativeState, prompt: list[int], row: int) -> list[int]:
    """Returns prompt and output of a row."""
    num_new = int(state.decode.num_new_B[row])
    return [*prompt, *np.asarray(state.decode.tokens_BM)[row, :num_new].tolist()]


def rows_held(cache, row: int, layer: int) -> dict[int, np.ndarray]:
    """Returns the keys and values, one after the other, that a layer holds of a row's text, by position."""
    position_S = np.asarray(cache.positions[cache.layout_idx[layer]])[row]
    store = cache.stores[layer]
    data_SX = np.concatenate([np.asarray(rows.data_BSX)[row] for rows in (store.keys, store.values)], axis=-1)
    length = int(cache.length_B[row])
    return {int(position): data_SX[slot] for slot, position in enumerate(position_S) if position < length}


def fresh_cache(lm: language_model.LanguageModel, texts: list[list[int]], slack: int) -> Any:
    """Reads texts into a new cache."""
    cache = lm.init_cache(batch_size=len(texts), capacity=MAX_LEN, cache=config.CacheConfig(slack=slack))
    return prefill.prefill(lm.model, lm.params, texts, cache)[0]


def num_bytes(tree: Any) -> int:
    """Counts the bytes of a tree of arrays."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
