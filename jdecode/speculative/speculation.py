"""All that speculative decoding adds to a request, in one value."""

import dataclasses
from typing import Any

from jdecode import sampling
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import pace, speculative_round, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculation:
    """A draft, its parameters, and how it is used.

    Attributes:
      draft: what proposes.
      draft_params: of the draft; ``()`` for one that has none.
      num_draft_tokens: the most proposals of a round.
      verify: the rule of acceptance.
      costs: what decides how many proposals pay; ``None`` always proposes ``num_draft_tokens``.
    """

    draft: draft_lib.Draft
    draft_params: Any
    num_draft_tokens: int
    verify: verify.Verify
    costs: pace.Costs | None

    def step(
        self, model: transformer.Transformer, chain: sampling.Transform
    ) -> speculative_round.SpeculativeRound:
        """Returns the step that the device loop repeats."""
        return speculative_round.SpeculativeRound(
            model, chain, self.draft, self.verify, self.num_draft_tokens, self.costs
        )
