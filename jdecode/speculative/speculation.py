"""All that speculative decoding adds to a request, in one value."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax

from jdecode import config as config_lib
from jdecode import sampling
from jdecode.decode import state
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import draft_model, pace, speculative_round, statistics, verify


def with_slack(cache: config_lib.CacheConfig, num_draft_tokens: int) -> config_lib.CacheConfig:
    """Returns the config of a cache that can take back a whole block, in rings too."""
    return dataclasses.replace(cache, slack=max(cache.slack, num_draft_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """A draft, its parameters, and how it is used.

    Attributes:
      draft: what proposes.
      draft_params: of the draft's model; ``()`` for a draft that has none.
      num_draft_tokens: G, the most proposals of a round.
      verify: the rule of acceptance.
      costs: what decides how many proposals pay; ``None`` always proposes G.
    """

    draft: draft_lib.Draft
    draft_params: Any
    num_draft_tokens: int
    verify: verify.Verify
    costs: pace.Costs | None

    def step(self, model: transformer.Transformer, chain: sampling.Transform) -> speculative_round.SpeculativeRound:
        """Returns the step that the device loop repeats. Equal ones share a compilation."""
        return speculative_round.SpeculativeRound(model, chain, self.draft, self.verify, self.num_draft_tokens)

    def params(self, target: Any) -> draft_lib.Params:
        """Returns the parameters of that step, given the target's."""
        return draft_lib.Params(target=target, draft=self.draft_params)

    def cache_shapes(self, max_len: int) -> Any:
        """Returns the shapes of a row of the draft's own cache, for ``max_len`` tokens; no leaves where it has none."""
        if not isinstance(self.draft, draft_model.ModelDraft):
            return ()
        return jax.eval_shape(functools.partial(self.draft.init_cache, 1, max_len))

    def begin(
        self,
        target: Any,
        decode: state.DecodeState,
        prompts: Sequence[Sequence[int]],
        *,
        num_samples: int,
        max_len: int,
    ) -> speculative_round.Drafting:
        """Lets the draft read the prompts.

        Args:
          target: its parameters.
          decode: the rows, which have their first tokens.
          The others are those of ``draft.Draft.begin``.
        """
        params = self.params(target)
        memory = self.draft.begin(params, prompts, num_samples=num_samples, max_len=max_len)
        return speculative_round.Drafting(
            memory=memory,
            pace=pace.begin(decode.is_random_B, self.costs, self.num_draft_tokens),
            counts=statistics.no_counts(len(prompts) * num_samples, self.num_draft_tokens),
        )
