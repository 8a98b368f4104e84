"""Transforms one after another, as one transform."""

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jdecode.sampling import protocol


@dataclasses.dataclass(frozen=True)
class Chain:
    """Applies transforms in order. Its state is the tuple of theirs.

    Attributes:
      transforms: in the order of application.
    """

    transforms: tuple[protocol.Transform, ...]

    def init(self, params: protocol.SamplingParams, batch: int, vocab: int) -> tuple[Any, ...]:
        """Returns the states of the transforms."""
        return tuple(transform.init(params, batch, vocab) for transform in self.transforms)

    def apply(self, logits_BV: jax.Array, state: tuple[Any, ...]) -> jax.Array:
        """Returns the logits after every transform.

        Args:
          logits_BV: any float dtype; they are float32 from here on.
          state: of ``init`` or ``accept``.

        Returns:
          float32 [B, V]. A row that held a NaN is NaN throughout, so that no ban can hide a broken model.

        Raises:
          TypeError: when a transform returns another shape or dtype (at trace time).
        """
        logits_BV = logits_BV.astype(jnp.float32)
        is_nan_B1 = jnp.isnan(jnp.max(logits_BV, axis=-1, keepdims=True))
        pairs = zip(self.transforms, state, strict=True)
        for is_skippable, run in itertools.groupby(pairs, _is_skippable):
            apply = _skip_unused if is_skippable else _apply_each
            logits_BV = apply(logits_BV, list(run))
        return jnp.where(is_nan_B1, jnp.nan, logits_BV)

    def accept(self, state: tuple[Any, ...], token_B: jax.Array, live_B: jax.Array) -> tuple[Any, ...]:
        """Returns the states after ``token_B`` was emitted by the rows of ``live_B``."""
        pairs = zip(self.transforms, state, strict=True)
        return tuple(transform.accept(own, token_B, live_B) for transform, own in pairs)


def _is_skippable(pair: tuple[protocol.Transform, Any]) -> bool:
    return isinstance(pair[0], protocol.SkippableTransform)


def _skip_unused(logits_BV: jax.Array, run: list[tuple[Any, Any]]) -> jax.Array:
    """Applies skippable transforms, each with its state, unless no row uses any: one test for all of them."""
    is_used_B = functools.reduce(jnp.logical_or, [transform.used(own) for transform, own in run])
    states = [own for _, own in run]

    def apply(logits_BV: jax.Array, states: list[Any]) -> jax.Array:
        return _apply_each(logits_BV, [(transform, own) for (transform, _), own in zip(run, states, strict=True)])

    return lax.cond(jnp.any(is_used_B), apply, lambda logits_BV, _: logits_BV, logits_BV, states)


def _apply_each(logits_BV: jax.Array, run: list[tuple[Any, Any]]) -> jax.Array:
    """Applies transforms, each with its state, from left to right."""
    for transform, own in run:
        name = type(transform).__name__
        with jax.named_scope(name):
            out_BV = transform.apply(logits_BV, own)
        if not isinstance(out_BV, jax.Array) or out_BV.shape != logits_BV.shape or out_BV.dtype != jnp.float32:
            got = f"{out_BV.dtype} of shape {out_BV.shape}" if isinstance(out_BV, jax.Array) else repr(out_BV)
            raise TypeError(
                f"transform {name}: expected float32 logits of shape {logits_BV.shape} from apply, "
                f"got {got}; cast or reshape before returning"
            )
        logits_BV = out_BV
    return logits_BV


def chain(*transforms: protocol.Transform) -> Chain:
    """Composes transforms into one that applies them from left to right.

    Two chains of equal transforms are equal and hash alike, so they share one compilation:

    >>> from jdecode import sampling
    >>> chain(sampling.Temperature(), sampling.TopK()) == chain(sampling.Temperature(), sampling.TopK())
    True

    Raises:
      TypeError: for something that is not a hashable object with ``init``, ``apply`` and ``accept``.
    """
    for transform in transforms:
        shown = transform.__name__ if isinstance(transform, type) else type(transform).__name__
        if isinstance(transform, type) or not isinstance(transform, protocol.Transform):
            kind = "the class" if isinstance(transform, type) else "an object of class"
            raise TypeError(f"transform: expected an object with init, apply and accept, got {kind} {shown}")
        try:
            hash(transform)
        except TypeError:
            raise TypeError(
                f"transform {shown}: expected a hashable object, got one that is not; "
                "make it a frozen dataclass and keep arrays in the state that init returns"
            ) from None
    return Chain(transforms)
