"""Fewer key/value heads for a trained model: pooling, then training on (Ainslie et al. 2023, §2), judged at each step.

Pooling alone costs much of what the model knew, and a few steps on any text like its own bring most of it back. The
report says how much: the held-out loss before, after pooling and after up-training, and the bytes of the cache.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.cache import allocate
from jdecode.models import transformer
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus, held_out, loop, train_config
from jdecode.training import task as task_lib
from jdecode.weights import head_pooling, parameter_tree, stored_tensor

JUDGED_PIECES = 64
"""Pieces of the held-out files that each loss is taken over: the same ones before and after."""

MOST_SEQUENCE_LEN = 512
"""Tokens a sequence, or the model's trained length where that is shorter."""

# Eight sequences a step, two at a time: the logits of a large vocabulary are most of the memory.
_BATCH_SIZE, _ACCUMULATION_STEPS = 2, 4


def pool_and_train(
    params: Mapping[str, Any],
    model: config_lib.ModelConfig,
    num_kv_heads: int,
    *,
    tokenizer: tokenizer_lib.Tokenizer,
    files: corpus.Corpus,
    num_steps: int,
    optimizer: train_config.OptimizerConfig,
    seed: int,
    dtype: str,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, Any], config_lib.ModelConfig, dict[str, Any]]:
    """Pools the key/value heads of a model, trains it on, and judges what that did.

    Args:
      params: nested dict, float32. Used up: the optimiser takes over their memory.
      model: the configuration of the parameters.
      num_kv_heads: K', a divisor of the model's K.
      tokenizer: of the model.
      files: to train on, and to judge by.
      num_steps: of the optimiser; 0 for pooling alone.
      optimizer: AdamW and its learning rate.
      seed: of the order of the data.
      dtype: of the parameters that are returned, and of the cache that is counted.
      say: is given a line after each loss.

    Returns:
      The parameters, rounded to ``dtype``; their configuration; and the report, as JSON can say it: ``kv_heads``,
      ``losses`` (``before``, ``pooled``, ``up_trained``, the last one that of the rounded parameters), ``judged``,
      ``up_training`` (``None`` without) and ``cache`` (bytes).

    Raises:
      ValueError: ``num_kv_heads`` is no divisor of K, the tokenizer does not fit, or there is too little text.
      FloatingPointError: the training loss is not finite any more.
    """
    pooled_model = head_pooling.pooled_config(model, num_kv_heads)
    task = task_lib.make_task(_run_config(pooled_model, num_steps, optimizer, seed), files, tokenizer)
    judged = held_out.some(task.judged, JUDGED_PIECES)
    judge = functools.partial(_judge, judged=judged, token_num_bytes=task.token_num_bytes, say=say)
    losses: dict[str, Any] = {"before": judge("before", model, params)}
    rounded, _ = head_pooling.pool_kv_heads(params, model, num_kv_heads)
    losses["pooled"] = judge("pooled", pooled_model, _rounded(rounded, "float32" if num_steps else dtype))
    losses["up_trained"] = up_training = None
    if num_steps:
        trained, record = loop.fit(task, None, init_params={"params": rounded})
        rounded = trained["params"]
        losses["up_trained"] = judge("up-trained", pooled_model, _rounded(rounded, dtype))
        up_training = {
            "steps": num_steps,
            "learning_rate": optimizer.learning_rate,
            "seed": seed,
            "sequence_len": task.config.sequence_len,
            "sequences_a_step": task.config.sequences_a_step,
            "history": record["history"],
        }
    report = {
        "kv_heads": {"before": model.num_kv_heads, "after": num_kv_heads},
        "losses": losses,
        "judged": {
            "corpus": task.facts["corpus"],
            "pieces": len(judged),
            "tokens": sum(len(piece.predicted) for piece in judged),
        },
        "up_training": up_training,
        "cache": _cache_report(model, pooled_model, dtype),
    }
    return _rounded(rounded, dtype), pooled_model, report


def _judge(
    stage: str,
    model: config_lib.ModelConfig,
    params: Mapping[str, Any],
    *,
    judged: Sequence[held_out.Piece],
    token_num_bytes: np.ndarray,
    say: Callable[[str], None],
) -> dict[str, float]:
    """Returns the loss of parameters of any dtype, computed in float32."""
    module = transformer.Transformer(model, backend="banded", dtype="float32")
    loss = held_out.evaluate(module, {"params": _rounded(params, "float32")}, judged, token_num_bytes)
    loss.check_finite(stage)
    say(f"{stage}: {loss.nats_a_token:.4f} nats a token")
    return {
        "nats_a_token": loss.nats_a_token,
        "perplexity": loss.perplexity,
        "bits_per_byte": loss.bits_per_byte,
    }


def cache_bytes(model: config_lib.ModelConfig, dtype: str, capacity: int) -> int:
    """Returns the bytes of a cache of one row, as it would be allocated: rings where a layer has a window.

    Args:
      model: to cache keys and values of.
      dtype: of the cached numbers.
      capacity: tokens that the row must hold.
    """
    leaves = jax.tree.leaves(_cache_shapes(model, dtype, capacity))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def token_bytes(model: config_lib.ModelConfig, dtype: str) -> int:
    """Returns the bytes of one token's keys and values in all layers: 2 K H L times those of a number."""
    leaves = jax.tree.leaves(_cache_shapes(model, dtype, 1).stores)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)


def _cache_shapes(model: config_lib.ModelConfig, dtype: str, capacity: int) -> Any:
    init = functools.partial(
        allocate.init_cache, model, config_lib.CacheConfig(), batch_size=1, capacity=capacity, compute_dtype=dtype
    )
    return jax.eval_shape(init)


def _cache_report(before: config_lib.ModelConfig, after: config_lib.ModelConfig, dtype: str) -> dict[str, Any]:
    length = before.max_positions
    return {
        "dtype": dtype,
        "bytes_a_token": {"before": token_bytes(before, dtype), "after": token_bytes(after, dtype)},
        "tokens": length,
        "bytes": {"before": cache_bytes(before, dtype, length), "after": cache_bytes(after, dtype, length)},
    }


def _run_config(
    model: config_lib.ModelConfig, num_steps: int, optimizer: train_config.OptimizerConfig, seed: int
) -> train_config.TrainConfig:
    # Without a step the config is that of the judging only, and must be a valid one all the same.
    steps = max(num_steps, 1)
    if not num_steps:
        optimizer = train_config.OptimizerConfig(warmup_steps=0)
    return train_config.TrainConfig(
        name="up-training",
        architecture=model,
        optimizer=optimizer,
        sequence_len=min(model.max_positions, MOST_SEQUENCE_LEN),
        batch_size=_BATCH_SIZE,
        accumulation_steps=_ACCUMULATION_STEPS,
        num_steps=steps,
        seed=seed,
        evaluate_every=steps,
        checkpoint_every=steps,
    )


def _rounded(params: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Rounds all parameters, one after the other; a number that does not fit is refused, as loading refuses it."""
    target = stored_tensor.COMPUTE_DTYPES[dtype]
    flat = parameter_tree.flat(params)
    return parameter_tree.nested(
        {
            path: jax.device_put(stored_tensor.rounded(np.asarray(leaf), target, f"parameter {path}"))
            for path, leaf in flat.items()
        }
    )
