"""Which units of a prompt stay, for a budget."""

from collections.abc import Sequence, Set

from jdecode.prompt_compression import units as units_lib


def required(division: units_lib.Division, protected: frozenset[int]) -> frozenset[int]:
    """Returns the tokens that stay whatever the budget.

    Args:
      division: of the prompt.
      protected: indices of the caller's protected tokens.

    Returns:
      Fixed tokens, the whole units of those that are protected, and the structure of their lines and sentences.
    """
    wanted = protected | division.roles
    kept = set(wanted | division.fixed)
    for idx in wanted:
        kept |= division.structure[idx]
    for unit in division.units:
        if not wanted.isdisjoint(unit.tokens):
            kept.update(unit.tokens)
    return frozenset(kept)


def additional(unit: units_lib.Unit, kept: Set[int]) -> frozenset[int]:
    """Returns the tokens that a unit takes beside those that are kept already: its own, and structure."""
    return unit.structure.union(unit.tokens) - kept


def select(
    division: units_lib.Division, scores: Sequence[float], always: frozenset[int], budget: int
) -> tuple[int, ...]:
    """Chooses the tokens that stay.

    The best units first, of equal ones the earlier; one for which the room that is left is too small is passed over.
    So where units are single tokens without structure, exactly ``budget`` tokens stay, and those that go are the ones
    of the least score.

    Args:
      division: of the prompt.
      scores: of its units.
      always: tokens that stay anyway, see ``required``; at most ``budget``.
      budget: tokens.

    Returns:
      Indices, ascending.
    """
    kept = set(always)
    for number in sorted(range(len(division.units)), key=lambda number: (-scores[number], number)):
        more = additional(division.units[number], kept)
        if len(kept) + len(more) <= budget:
            kept |= more
    return tuple(sorted(kept))
