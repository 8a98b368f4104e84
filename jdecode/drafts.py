"""From what a caller names as a draft to a ``Speculation`` that fits the target."""

from typing import TYPE_CHECKING, Any, Protocol

import jax

from jdecode import config as config_lib
from jdecode import request as request_lib
from jdecode import streaming
from jdecode.models import transformer
from jdecode.speculative import draft as draft_lib
from jdecode.speculative import draft_layer_skip, draft_model, draft_ngram, pace, speculation
from jdecode.speculative import verify as verify_lib
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.weights import checkpoint

if TYPE_CHECKING:
    from jdecode import language_model

DEFAULT = config_lib.SpeculativeConfig()

NGRAM, LAYER_SKIP = "ngram", "layer_skip"
"""Drafts without weights of their own, by name."""


def make_speculation(
    target: "language_model.LanguageModel",
    *,
    draft: Any = None,
    num_draft_tokens: int = DEFAULT.num_draft_tokens,
    verify: str = DEFAULT.verify,
    adaptive_draft: bool = DEFAULT.adaptive,
    cache: config_lib.CacheConfig,
    num_tokens: int | None = None,
) -> speculation.Speculation | None:
    """Checks a draft against its target.

    Args:
      draft: ``None``, ``"ngram"``, ``"layer_skip"``, a ``LanguageModel`` or a ``speculative.Draft`` without params.
      num_draft_tokens: the most proposals of a round.
      verify: a name of ``verify.RULES``.
      adaptive_draft: whether fewer are proposed while few are accepted.
      cache: layout and dtype, of the draft's cache too.
      num_tokens: of the longest text, prompt and output; ``None`` where it stays within the trained length.

    Raises:
      ValueError, TypeError: something that cannot be honoured, one line.
    """
    num_draft_tokens = request_lib.count(
        "num_draft_tokens", num_draft_tokens, least=1, most=config_lib.MOST_DRAFT_TOKENS
    )
    if not isinstance(verify, str) or verify not in verify_lib.RULES:
        raise ValueError(f"verify: expected one of {', '.join(verify_lib.RULES)}, got {verify!r}")
    if not isinstance(adaptive_draft, bool):  # a text such as "no" would count as true
        raise TypeError(f"adaptive_draft: expected True or False, got {adaptive_draft!r}")
    if not isinstance(cache, config_lib.CacheConfig):
        raise TypeError(f"cache: expected a CacheConfig, got {type(cache).__name__}")
    if draft is None:
        if (num_draft_tokens, verify, adaptive_draft) != (DEFAULT.num_draft_tokens, DEFAULT.verify, DEFAULT.adaptive):
            raise ValueError(
                "num_draft_tokens, verify, adaptive_draft: act on a draft, and there is none; give one, or leave these"
            )
        return None
    check_cache(cache, num_draft_tokens)
    # A draft's own cache keeps every token.
    own_cache = speculation.with_slack(cache, num_draft_tokens).without_eviction()
    chosen, params = _chosen(target, draft, own_cache)
    if isinstance(chosen, draft_model.ModelDraft) and num_tokens is not None:
        _check_length(target.config, chosen.model.config, num_tokens)
    return speculation.Speculation(
        draft=chosen,
        draft_params=params,
        num_draft_tokens=num_draft_tokens,
        verify=verify_lib.RULES[verify],
        costs=_costs(target, chosen, params) if adaptive_draft else None,
    )


def check_cache(cache: config_lib.CacheConfig, num_draft_tokens: int) -> None:
    """Refuses a cache that a draft does not go with.

    Raises:
      ValueError: it cannot take tokens back, or a draft would change which of them are exact; one line.
    """
    if cache.eviction == "h2o":
        raise ValueError(
            "draft: expected a cache that can take tokens back, got the eviction h2o, which cannot; use snapkv, or "
            "leave the draft out"
        )
    if speculation.with_slack(cache, num_draft_tokens).group_lag != cache.group_lag:
        most = (cache.group_lag or 1) - 1
        fewer = "fewer, or " if most else ""
        raise ValueError(
            f"num_draft_tokens: expected at most {most} beside a cache in {cache.dtype} with groups of "
            f"{cache.group_len} and slack {cache.slack}, got {num_draft_tokens} (more would keep other tokens exact, "
            f"and so change the text); give {fewer}a cache with slack {num_draft_tokens}, with and without the draft"
        )


def _check_length(target: config_lib.ModelConfig, draft: config_lib.ModelConfig, num_tokens: int) -> None:
    """Refuses a draft that stays behind where the target goes on for ever: its cache grows, and its proposals fail."""
    if not streaming.is_endless(target) or streaming.is_endless(draft):
        return
    if num_tokens > max(target.max_positions, draft.max_positions):
        raise ValueError(
            f"draft: expected one that goes on past its trained length, as the target does, for a text of "
            f"{num_tokens:,} tokens, got one trained for {draft.max_positions:,}; give one with a window "
            "(draft=lm.with_window(W)), or ngram"
        )


def _chosen(
    target: "language_model.LanguageModel", draft: Any, cache: config_lib.CacheConfig
) -> tuple[draft_lib.Draft, Any]:
    """Returns the draft and its parameters."""
    from jdecode import language_model

    if isinstance(draft, str) and draft == NGRAM:  # an array would compare element by element
        return draft_ngram.NgramDraft(), ()
    if isinstance(draft, str) and draft == LAYER_SKIP:
        return draft_layer_skip.LayerSkipDraft.of(target.model), ()
    if isinstance(draft, language_model.LanguageModel):
        _check_vocabulary(target, draft)
        if draft.mesh != target.mesh:
            raise ValueError("draft: expected a model on the target's devices, got another mesh; load both with one")
        return draft_model.ModelDraft(draft.model, cache, draft.mesh), draft.params
    if isinstance(draft, draft_lib.Draft) and not isinstance(draft, type | draft_model.ModelDraft):
        return draft, ()
    raise TypeError(
        f"draft: expected None, {NGRAM!r}, {LAYER_SKIP!r} or a loaded language model, got {draft!r:.80}; "
        "load a model with jdecode.load"
    )


class _WithVocabulary(Protocol):
    """A model, loaded or only opened."""

    @property
    def config(self) -> config_lib.ModelConfig: ...

    @property
    def tokenizer(self) -> tokenizer_lib.Tokenizer | None: ...


def check_opened(target: checkpoint.Checkpoint, draft: checkpoint.Checkpoint | str) -> None:
    """Checks, before any weights are read, whether a draft fits its target.

    Args:
      target: opened, not loaded.
      draft: likewise, or the name of a draft without weights of its own.

    Raises:
      ValueError: it does not fit, one line.
    """
    if isinstance(draft, checkpoint.Checkpoint):
        _check_vocabulary(target, draft)
    elif draft == LAYER_SKIP:
        draft_layer_skip.LayerSkipDraft.of(transformer.Transformer(target.config))


def _check_vocabulary(target: _WithVocabulary, draft: _WithVocabulary) -> None:
    """Refuses a draft whose ids stand for other strings. Ids that only one of them has are never proposed."""
    if target.tokenizer is None or draft.tokenizer is None:
        if draft.config.vocab_size != target.config.vocab_size:
            raise ValueError(
                f"draft: expected a model with the target's {target.config.vocab_size} tokens, got one with "
                f"{draft.config.vocab_size}, and no tokenizers to compare"
            )
        return
    differs = target.tokenizer.first_difference(draft.tokenizer)
    if differs is None or differs >= min(target.tokenizer.vocab_size, draft.tokenizer.vocab_size):
        return
    own, other = target.tokenizer.token_string(differs), draft.tokenizer.token_string(differs)
    raise ValueError(
        f"draft: expected the target's tokens, got another string for id {differs} ({other!r}, not {own!r}); "
        "use a draft with the same tokenizer, or ngram"
    )


def _costs(target: "language_model.LanguageModel", draft: draft_lib.Draft, params: Any) -> pace.Costs:
    """Says what a round takes, from sizes alone: a clock would make texts depend on the machine."""
    share = 0.0
    if isinstance(draft, draft_layer_skip.LayerSkipDraft):
        share = draft.model.config.num_layers / target.config.num_layers
    elif isinstance(draft, draft_model.ModelDraft):
        share = sum(leaf.nbytes for leaf in jax.tree.leaves(params)) / target.weight_bytes
    platform = next(iter(jax.tree.leaves(target.params)[0].devices())).platform
    return pace.estimate(
        platform,
        target_bytes=target.weight_bytes,
        draft_share=share,
        is_drawn=share > 0,
        is_look_up=isinstance(draft, draft_ngram.NgramDraft),
    )
