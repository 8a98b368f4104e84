"""What a draft hands to verification."""

import dataclasses

import jax


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Proposals:
    """At most G tokens a row, to follow its latest token.

    Attributes:
      token_BG: int32, ids of the target's vocabulary; those from ``num_B`` on mean nothing.
      num_B: int32, 0 to G.
      logits_BGV: float32, the logits that each token was drawn from, after the whole chain of transforms: their softmax
        is the draft's law q. ``None`` for a draft that does not draw: then all of q lies on the token.
    """

    token_BG: jax.Array
    num_B: jax.Array
    logits_BGV: jax.Array | None
