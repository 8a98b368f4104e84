"""Which tokens lead a row: the greatest one, and the least leading set of a given mass. No sort.

The vocabulary is long (262,144 for some models) and a sort of it costs tens of milliseconds on a CPU. Most leading
sets are short, so their edge is looked for among the greatest few values; when it is not there, it is found by
bisection. float32 values compare in the order of an int32 image of their bits, hence 32 halvings find the edge
exactly, each one masked sum over the row. Both ways give the same set.

The masses are whole numbers, not floats: their sums are exact in any order, so that a set depends neither on the
batch, nor on fusion by the compiler, nor on how a mesh splits the vocabulary.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

# Probabilities are counted in units of a fixed point: 2**29 to 2**30 of them make one. A token's mass is off by at
# most half a unit, under 1e-9 of the whole.
_FIXED_POINT_BITS = 30

# How far below p a partial sum of probabilities counts as having reached p, relative to p. The partial sum of n tokens
# is off by at most n * 2**-30 from the rounding of the masses (in practice by its root: under 3e-7 for n = 262,144),
# and by the few 2**-24 with which float32 holds the logarithms of the probabilities and p itself.
SUM_SLACK = 1e-6

# How many of the greatest values are looked at before bisection. On a CPU they cost as much as a few halvings.
_HEAD_WIDTH = 256


def first_argmax(values_BV: jax.Array) -> jax.Array:
    """Returns the id of each row's greatest value, the lowest one of a tie.

    On a CPU this is several times faster than ``jnp.argmax``, which the compiler does not vectorise.

    Args:
      values_BV: float32. A row with a NaN gives V.

    Returns:
      int32 [B].
    """
    vocab = values_BV.shape[-1]
    id_BV = lax.broadcasted_iota(jnp.int32, values_BV.shape, 1)
    top_B1 = jnp.max(values_BV, axis=-1, keepdims=True)
    return jnp.min(jnp.where(values_BV == top_B1, id_BV, vocab), axis=-1)


def probability_masses(logits_BV: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the probabilities of the tokens as whole numbers, and their sum.

    Tokens of less than half a unit get 0, which leaves out at most V * 2**-30 of the mass.

    Args:
      logits_BV: float32, at least one of them finite in each row.

    Returns:
      int32 [B, V], in proportion to the softmax of the row, and int32 [B], their sum, about 2**29 to 2**30.
    """
    weights_BV = jnp.exp(logits_BV - jnp.max(logits_BV, axis=-1, keepdims=True))
    _, exponent_B1 = jnp.frexp(jnp.sum(weights_BV, axis=-1, keepdims=True))
    # A power of two: the product is exact, and a last bit of difference in the float sum changes nothing.
    unit_B1 = jnp.ldexp(jnp.float32(1), _FIXED_POINT_BITS - exponent_B1)
    mass_BV = jnp.round(weights_BV * unit_B1).astype(jnp.int32)
    return mass_BV, jnp.sum(mass_BV, axis=-1)


def mass_limit(total_B: jax.Array, p_B: jax.Array) -> jax.Array:
    """Returns the mass at which a leading set has reached the share ``p_B`` of ``total_B``, at least 1.

    Args:
      total_B: int32, the sum of the masses.
      p_B: float32, from 0 to 1.

    Returns:
      int32 [B], lower than exact by the relative ``SUM_SLACK``.
    """
    limit_B = jnp.ceil(total_B.astype(jnp.float32) * p_B * (1 - SUM_SLACK)).astype(jnp.int32)
    return jnp.maximum(limit_B, 1)


def keep_leading(
    order_BV: jax.Array, mass_BV: jax.Array | None, limit_B: jax.Array, *, head_width: int = _HEAD_WIDTH
) -> jax.Array:
    """Marks, in each row, the tokens before which less than a given mass has gone by.

    The tokens are taken from the greatest ``order_BV`` down, equal ones by id from the lowest up. The first is always
    marked.

    Args:
      order_BV: float32, no NaN (a row with one gets any marks).
      mass_BV: int32, at least 0, with row sums under 2**31; None counts every token as 1.
      limit_B: int32, at least 1.
      head_width: how many values are looked at before bisection, 0 for bisection alone. The result does not depend
        on it. Static.

    Returns:
      bool [B, V].
    """
    # -0 and numbers that the hardware may flush compare equal to 0, but have other bits: make them one value.
    order_BV = jnp.where(order_BV == 0, 0.0, order_BV)
    width = min(head_width, order_BV.shape[-1])
    if width == 0:
        return _mark_to(order_BV, *_edge_by_bisection(order_BV, mass_BV, limit_B))
    head_BX, id_BX = lax.top_k(order_BV, width)
    head_mass_BX = jnp.ones_like(id_BX) if mass_BV is None else jnp.take_along_axis(mass_BV, id_BX, axis=-1)
    sum_BX = jnp.cumsum(head_mass_BX, axis=-1)

    def edge_in_head() -> tuple[jax.Array, jax.Array]:
        num_kept_B1 = jnp.sum(sum_BX - head_mass_BX < limit_B[:, None], axis=-1, keepdims=True)
        edge_B1 = jnp.take_along_axis(head_BX, num_kept_B1 - 1, axis=-1)
        return edge_B1, jnp.take_along_axis(id_BX, num_kept_B1 - 1, axis=-1)

    edge_B1, last_id_B1 = lax.cond(
        jnp.all(sum_BX[:, -1] >= limit_B), edge_in_head, lambda: _edge_by_bisection(order_BV, mass_BV, limit_B)
    )
    return _mark_to(order_BV, edge_B1, last_id_B1)


def _mark_to(order_BV: jax.Array, edge_B1: jax.Array, last_id_B1: jax.Array) -> jax.Array:
    """Marks the tokens over the edge, and those at the edge up to the last id."""
    id_BV = lax.broadcasted_iota(jnp.int32, order_BV.shape, 1)
    return (order_BV > edge_B1) | ((order_BV == edge_B1) & (id_BV <= last_id_B1))


def _edge_by_bisection(
    order_BV: jax.Array, mass_BV: jax.Array | None, limit_B: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns the value of the last token that ``keep_leading`` marks, float32 [B, 1], and its id, int32 [B, 1]."""
    vocab = order_BV.shape[-1]

    def mass_where(mask_BV: jax.Array) -> jax.Array:
        counted_BV = mask_BV.astype(jnp.int32) if mass_BV is None else jnp.where(mask_BV, mass_BV, 0)
        return jnp.sum(counted_BV, axis=-1)

    def is_short_of_limit(image_B: jax.Array) -> jax.Array:
        return mass_where(order_BV > _float_of_image(image_B)[:, None]) < limit_B

    top_B = jnp.max(order_BV, axis=-1)
    lowest_B = jnp.full_like(top_B, -jnp.inf)
    # The edge is the least value over which there is less than the limit.
    edge_B1 = _float_of_image(_least(is_short_of_limit, _image(lowest_B), _image(top_B), 32))[:, None]

    def last_id_of_ties() -> jax.Array:
        id_BV = lax.broadcasted_iota(jnp.int32, order_BV.shape, 1)
        missing_B = limit_B - mass_where(order_BV > edge_B1)

        def reaches_limit(id_B: jax.Array) -> jax.Array:
            return mass_where((order_BV == edge_B1) & (id_BV <= id_B[:, None])) >= missing_B

        first_B = jnp.zeros_like(limit_B)
        return _least(reaches_limit, first_B, first_B + vocab, vocab.bit_length())

    has_ties = jnp.any(jnp.sum(order_BV == edge_B1, axis=-1) > 1)
    last_id_B = lax.cond(has_ties, last_id_of_ties, lambda: jnp.full_like(limit_B, vocab))
    return edge_B1, last_id_B[:, None]


def _least(
    holds: Callable[[jax.Array], jax.Array], low_B: jax.Array, high_B: jax.Array, num_halvings: int
) -> jax.Array:
    """Returns the least int32 from ``low_B`` up for which ``holds``, or ``high_B``; ``holds`` must be monotone."""

    def halve(_: jax.Array, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low_B, high_B = bounds
        middle_B = (low_B >> 1) + (high_B >> 1) + (low_B & high_B & 1)  # floor of the mean, without overflow
        holds_B = holds(middle_B)
        is_open_B = low_B < high_B
        return jnp.where(is_open_B & ~holds_B, middle_B + 1, low_B), jnp.where(is_open_B & holds_B, middle_B, high_B)

    return lax.fori_loop(0, num_halvings, halve, (low_B, high_B))[1]


def _image(values: jax.Array) -> jax.Array:
    """Returns int32 in the order of the float32 ``values``: the bits, those of negative numbers turned round."""
    bits = lax.bitcast_convert_type(values, jnp.int32)
    return jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


def _float_of_image(image: jax.Array) -> jax.Array:
    """Returns the float32 whose ``_image`` is ``image``."""
    return lax.bitcast_convert_type(jnp.where(image < 0, image ^ 0x7FFFFFFF, image), jnp.float32)
