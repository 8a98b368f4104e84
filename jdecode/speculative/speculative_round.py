"""The speculative step: propose, verify in one call of the target, emit what holds, roll back.

::

    start = cache.length_B, the position of the latest token t, which no cache holds yet

    draft       d1 d2 … dn                       n = 0 … G proposals a row
    target      one call over [t, d1 … dn]       positions start … start + n; logits of the n + 1 places after them
    verify      a = 0 … n proposals accepted     a + 1 places are open: d1 … da and one token of the target's own
    emit        e = 1 … a + 1 tokens             fewer than are open where a row ends in mid-block
    roll back   cache.length_B = start + e       the position of the new latest token

It is a ``decode.step.Step``: the device loop drives it as it drives the plain one. Two blocks are compiled: one of
G + 1 places, and one of a single place for rounds in which no row proposes anything. Such a round is a plain step.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp

from jdecode import sampling
from jdecode.cache import kv_cache
from jdecode.decode import emission
from jdecode.decode import state as state_lib
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import pace as pace_lib
from jdecode.speculative import proposals as proposals_lib
from jdecode.speculative import statistics
from jdecode.speculative import verify as verify_lib


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafting:
    """What speculation carries from round to round, beside the target's rows.

    Attributes:
      memory: the draft's own.
      pace: how many tokens each row proposes.
      counts: what was drafted, tested and accepted so far.
    """

    memory: Any
    pace: pace_lib.Pace
    counts: statistics.Counts


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeState:
    """Rows in the middle of a speculative decode: ``decode`` is just what plain decoding has."""

    decode: state_lib.DecodeState
    drafting: Drafting

    @property
    def status_B(self) -> jax.Array:
        """How each row stands."""
        return self.decode.status_B

    @property
    def num_new_B(self) -> jax.Array:
        """How many tokens each row has emitted."""
        return self.decode.num_new_B


@dataclasses.dataclass(frozen=True)
class SpeculativeRound:
    """Advances every running row by 1 to ``num_draft_tokens`` + 1 tokens. See ``decode.step.Step``.

    Its params are ``draft.Params``. The target's cache must be able to take back ``num_draft_tokens`` tokens.

    Attributes:
      model: the target.
      chain: the transforms before each draw, of target and draft alike.
      draft: what proposes.
      verify: the rule of acceptance.
      num_draft_tokens: G, the most proposals of a round.
    """

    model: transformer.Transformer
    chain: sampling.Transform
    draft: draft_lib.Draft
    verify: verify_lib.Verify
    num_draft_tokens: int

    def __call__(self, params: draft_lib.Params, state: SpeculativeState) -> SpeculativeState:
        """Runs one round."""
        proposals, memory, cache = self.draft.propose(
            self._task(), params, state.drafting.memory, state.decode, self._want(state)
        )
        proposed = SpeculativeState(
            decode=dataclasses.replace(state.decode, cache=cache),
            drafting=dataclasses.replace(state.drafting, memory=memory),
        )
        is_block = jnp.any(proposals.num_B > 0)
        state = _once(is_block, lambda state: self._verify(params, state, proposals), proposed)
        return _once(~is_block, lambda state: self._verify(params, state, _cut(proposals, 0)), state)

    def _task(self) -> draft_lib.Task:
        return draft_lib.Task(
            chain=self.chain,
            vocab_size=self.model.config.vocab_size,
            most=self.num_draft_tokens,
            purpose=self.verify.draft_purpose,
            needs_law=self.verify.needs_law,
        )

    def _want(self, state: SpeculativeState) -> jax.Array:
        """Says how many tokens each row should propose."""
        want_B = pace_lib.want(state.drafting.pace)
        # The target adds a token of its own, so a row that lacks r tokens has use for r - 1 proposals.
        room_B = state.decode.max_new_B - state.num_new_B - 1
        return jnp.where(state.status_B == state_lib.RUNNING, jnp.minimum(want_B, room_B), 0)

    def _verify(
        self, params: draft_lib.Params, state: SpeculativeState, proposals: proposals_lib.Proposals
    ) -> SpeculativeState:
        """Runs the block through the target, and emits."""
        before, G = state.decode, proposals.token_BG.shape[1]
        is_live_B = before.status_B == state_lib.RUNNING
        start_B = before.cache.length_B
        with jax.named_scope("target"):
            logits_BPV, cache = self.model.apply(
                params.target,
                jnp.concatenate([before.token_B[:, None], proposals.token_BG], axis=1),
                before.cache,
                num_tokens_B=jnp.where(is_live_B, 1 + proposals.num_B, 0),
            )
        with jax.named_scope("verify"):
            processed_BPV = emission.process(self.chain, before.sampler, proposals.token_BG, logits_BPV)
            position_BP = start_B[:, None] + 1 + jnp.arange(G + 1, dtype=jnp.int32)[None, :]
            token_BP, num_accepted_B = self.verify.choose(
                processed_BPV, proposals, before.key_B, position_BP, before.is_random_B
            )
        after, num_emitted_B = emission.commit(self.chain, before, token_BP, num_accepted_B + 1, logits_BPV)
        after = dataclasses.replace(
            after, cache=kv_cache.truncate(cast(kv_cache.KVCache, cache), start_B + num_emitted_B)
        )
        return self._settled(state, after, proposals.num_B, num_accepted_B, num_emitted_B, G + 1)

    def _settled(
        self,
        state: SpeculativeState,
        after: state_lib.DecodeState,
        num_B: jax.Array,
        num_passed_B: jax.Array,
        num_emitted_B: jax.Array,
        num_places: int,
    ) -> SpeculativeState:
        """Brings the draft's memory, the counts and the pace up to date."""
        is_live_B = state.status_B == state_lib.RUNNING
        accepted_B = jnp.minimum(num_passed_B, num_emitted_B)
        # The place after the accepted ones was tested too, where it held a proposal and the row got there.
        is_refused_B = (num_passed_B < num_B) & (num_emitted_B > num_passed_B)
        tested_B = accepted_B + is_refused_B
        drafting = state.drafting
        counts = statistics.add_round(
            drafting.counts, is_live_B, num_places, drafted_B=num_B, tested_B=tested_B, accepted_B=accepted_B
        )
        is_nothing_B = (self._want(state) > 0) & (num_B == 0)
        pace = pace_lib.update(drafting.pace, accepted_B, tested_B, is_nothing_B)
        memory = self.draft.settle(drafting.memory, state.decode, after)
        return SpeculativeState(decode=after, drafting=Drafting(memory=memory, pace=pace, counts=counts))


def _once(
    is_wanted: jax.Array, advance: Callable[[SpeculativeState], SpeculativeState], state: SpeculativeState
) -> SpeculativeState:
    """Applies ``advance`` if ``is_wanted``: as a loop of one turn, for a conditional would copy the caches."""
    carry = (is_wanted, state)
    return jax.lax.while_loop(lambda carry: carry[0], lambda carry: (jnp.bool_(False), advance(carry[1])), carry)[1]


def _cut(proposals: proposals_lib.Proposals, most: int) -> proposals_lib.Proposals:
    """Returns the proposals of a block that is narrower; no row may have more than ``most``."""
    logits_BGV = None if proposals.logits_BGV is None else proposals.logits_BGV[:, :most]
    return dataclasses.replace(proposals, token_BG=proposals.token_BG[:, :most], logits_BGV=logits_BGV)
