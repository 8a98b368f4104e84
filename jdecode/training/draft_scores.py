"""How likely a draft's proposal is accepted at each token of a text that the target wrote."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import config, sampling
from jdecode.models import transformer

SCORES_IN_MEMORY = 2**25
"""How many float32 scores of the vocabulary are formed at once, those of both models together."""

_PADDING_TOKEN = 0  # at the ends of rows; no token before it sees it


def accept_probabilities(
    target: tuple[transformer.Transformer, Any],
    draft: tuple[transformer.Transformer, Any],
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    sampling_config: config.SamplingConfig = config.SamplingConfig(),
    *,
    stop_token_ids: Sequence[int] = (),
) -> list[np.ndarray]:
    """Computes min(1, q(x) / p(x)) for each token x that the target wrote; see ``acceptance``.

    p and q are the laws of target and draft after the whole sampling chain, penalties and filters included, each
    after the same tokens. For a greedy config the result is 1 where the draft's argmax is x, and else 0. Both models
    run without a cache.

    Args:
      target, draft: model and parameters of each, over one vocabulary.
      prompts: ids, at least one a row.
      continuations: ids that the target wrote after each prompt, by ``sampling_config``.
      sampling_config: of both models. Its seed does not matter.
      stop_token_ids: what ``min_new_tokens`` holds back.

    Returns:
      float32, one entry for each token of each continuation. A token to which p gives nothing (it was written, but
      another order of summation moves it over a filter's edge) has 1 where q allows it, and 0 where not.

    Raises:
      ValueError: the vocabularies or the numbers of rows differ, a prompt is empty, or an id is outside the vocabulary.
      FloatingPointError: a model's logits are not finite.
    """
    vocab_size = target[0].config.vocab_size
    if draft[0].config.vocab_size != vocab_size:
        raise ValueError(
            f"draft: expected one with the target's vocabulary of {vocab_size}, got {draft[0].config.vocab_size}"
        )
    if len(prompts) != len(continuations):
        raise ValueError(f"continuations: expected {len(prompts)}, one for each prompt, got {len(continuations)}")
    if not all(len(prompt) for prompt in prompts):
        raise ValueError("prompts: expected at least one token in each, got an empty one")
    rows = [[*prompt, *written] for prompt, written in zip(prompts, continuations, strict=True)]
    for idx in {idx for row in rows for idx in row}:
        if not 0 <= idx < vocab_size:
            raise ValueError(f"token ids: expected 0 to {vocab_size - 1}, got {idx}")
    width = max((len(row) for row in rows), default=0)
    batch_size = max(min(SCORES_IN_MEMORY // (2 * max(width, 1) * vocab_size), len(rows)), 1)
    num_new = max((len(written) for written in continuations), default=0)
    result: list[np.ndarray] = []
    for first in range(0, len(rows), batch_size):
        chosen = [*range(first, min(first + batch_size, len(rows)))]
        filled = chosen + chosen[-1:] * (batch_size - len(chosen))  # one shape for all batches: one compilation
        scores_BT = _batch(
            target,
            draft,
            [prompts[idx] for idx in filled],
            [continuations[idx] for idx in filled],
            width=width,
            num_new=num_new,
            sampling_config=sampling_config,
            stop_token_ids=stop_token_ids,
        )
        result += [scores_BT[row, : len(continuations[idx])] for row, idx in enumerate(chosen)]
    if any(np.isnan(row).any() for row in result):
        raise FloatingPointError("logits: expected finite numbers of target and draft, got others")
    return result


def _batch(
    target: tuple[transformer.Transformer, Any],
    draft: tuple[transformer.Transformer, Any],
    prompts: Sequence[Sequence[int]],
    continuations: Sequence[Sequence[int]],
    *,
    width: int,
    num_new: int,
    sampling_config: config.SamplingConfig,
    stop_token_ids: Sequence[int],
) -> np.ndarray:
    """Returns float32 (B, ``num_new``); what lies past a row's continuation means nothing."""
    batch_size = len(prompts)
    tokens_BT = np.full((batch_size, width), _PADDING_TOKEN, np.int32)
    written_BM = np.full((batch_size, num_new), _PADDING_TOKEN, np.int32)
    for row, (prompt, written) in enumerate(zip(prompts, continuations, strict=True)):
        tokens_BT[row, : len(prompt) + len(written)] = [*prompt, *written]
        written_BM[row, : len(written)] = written
    numbers = sampling.params_from_configs(
        [sampling_config] * batch_size,
        vocab_size=target[0].config.vocab_size,
        prompts=prompts,
        history_len=width + num_new,
        stop_ids=[stop_token_ids] * batch_size,
    )
    arrays = (jnp.asarray(tokens_BT), jnp.asarray(written_BM), numbers)
    return np.asarray(_scores(target[0], draft[0], sampling.standard_chain(), target[1], draft[1], *arrays))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _scores(
    target: transformer.Transformer,
    draft: transformer.Transformer,
    chain: sampling.Chain,
    target_params: Any,
    draft_params: Any,
    tokens_BT: jax.Array,
    written_BM: jax.Array,
    numbers: sampling.SamplingParams,
) -> jax.Array:
    """Returns float32 (B, M): min(1, q / p) of each written token; NaN where logits are."""
    batch_size, vocab_size = tokens_BT.shape[0], target.config.vocab_size
    # Token m is predicted at the place before it; rows have prompts of different lengths.
    place_BM = numbers.prompt_len_B[:, None] - 1 + jnp.arange(written_BM.shape[1], dtype=jnp.int32)[None, :]
    place_BM = jnp.minimum(place_BM, tokens_BT.shape[1] - 1)
    target_BTV, _ = target.apply(target_params, tokens_BT)
    draft_BTV, _ = draft.apply(draft_params, tokens_BT)
    row_B1 = jnp.arange(batch_size)[:, None]
    laws = (target_BTV[row_B1, place_BM].swapaxes(0, 1), draft_BTV[row_B1, place_BM].swapaxes(0, 1))
    everyone_B = jnp.ones(batch_size, bool)

    def step(state: Any, inputs: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[Any, jax.Array]:
        target_BV, draft_BV, written_B = inputs
        log_p_B, log_q_B = (_log_probability(chain.apply(logits, state), written_B) for logits in (target_BV, draft_BV))
        # Where q has nothing, so has the result, even where p has nothing either and the difference would be NaN.
        is_allowed_B = log_q_B > -jnp.inf
        ratio_B = jnp.exp(jnp.minimum(jnp.where(is_allowed_B, log_q_B, 0) - log_p_B, 0))
        is_nan_B = jnp.isnan(log_p_B) | jnp.isnan(log_q_B)
        score_B = jnp.where(is_nan_B, jnp.nan, jnp.where(is_allowed_B, ratio_B, 0))
        return chain.accept(state, written_B, everyone_B), score_B

    state = chain.init(numbers, batch_size, vocab_size)
    _, score_MB = jax.lax.scan(step, state, (*laws, written_BM.swapaxes(0, 1)))
    return score_MB.swapaxes(0, 1)


def _log_probability(logits_BV: jax.Array, token_B: jax.Array) -> jax.Array:
    """Returns the log-probability of one token a row: float32 (B,), -inf for one that a filter dropped."""
    chosen_B = jnp.take_along_axis(logits_BV, token_B[:, None], axis=1)[:, 0]
    return chosen_B - jax.nn.logsumexp(logits_BV, axis=-1)
