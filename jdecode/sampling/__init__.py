"""From logits to a token: transforms, the chain of them, and the draw.

The functions ``chain.chain`` and ``draw.draw`` are reached through their modules, whose names they share.
"""

from jdecode.sampling.chain import Chain
from jdecode.sampling.draw import (
    INVALID_TOKEN,
    PURPOSE_ACCEPT,
    PURPOSE_DRAFT,
    PURPOSE_RESIDUAL,
    PURPOSE_TOKEN,
    keys_at,
    request_keys,
)
from jdecode.sampling.masks import LogitBias, MinNewTokens, PermittedTokens
from jdecode.sampling.penalties import NoRepeatNgram, TokenPenalties
from jdecode.sampling.protocol import PADDING_ID, SamplingParams, SkippableTransform, Transform
from jdecode.sampling.standard import params_from_configs, standard_chain
from jdecode.sampling.temperature import Temperature, is_random
from jdecode.sampling.truncation import MinP, TopK, TopP, TypicalP

__all__ = [
    "INVALID_TOKEN",
    "PADDING_ID",
    "PURPOSE_ACCEPT",
    "PURPOSE_DRAFT",
    "PURPOSE_RESIDUAL",
    "PURPOSE_TOKEN",
    "Chain",
    "LogitBias",
    "MinNewTokens",
    "MinP",
    "NoRepeatNgram",
    "PermittedTokens",
    "SamplingParams",
    "SkippableTransform",
    "Temperature",
    "TokenPenalties",
    "TopK",
    "TopP",
    "Transform",
    "TypicalP",
    "is_random",
    "keys_at",
    "params_from_configs",
    "request_keys",
    "standard_chain",
]
