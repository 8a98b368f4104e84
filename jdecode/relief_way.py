"""What a way to need less is: the question, its choices with what each takes, and words on its price."""

import dataclasses
from collections.abc import Callable

import jax

from jdecode.cache import ledger as ledger_lib


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """What the ways are asked about.

    Attributes:
      plan: the cache as it is planned; what factors are relative to.
      window: W of the what-if of a window on every full layer, in tokens.
      num_sinks: of the same.
      chunk_len: T, tokens of a prefill's chunk.
      operations_a_token: of its products with the weights.
    """

    plan: ledger_lib.Plan
    window: int
    num_sinks: int
    chunk_len: int
    operations_a_token: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Variant:
    """One choice of a way: what it takes, in bytes or in operations.

    Attributes:
      name: of the choice.
      is_planned: whether the plan has it so.
      formula_bytes: by the way's formula; ``None`` where work is saved, and not memory.
      allocated_bytes: of the traced cache's keys and values, or of the compiled program's temporaries; likewise.
      operations: multiplications and additions, by the way's formula; ``None`` where memory is saved.
      plan: the plan with this choice, where it is one of the cache.
    """

    name: str
    is_planned: bool
    formula_bytes: int | None = None
    allocated_bytes: int | None = None
    operations: int | None = None
    plan: ledger_lib.Plan | None = None

    @property
    def amount(self) -> int:
        """What the formula gives, in the unit of its way."""
        amount = self.formula_bytes if self.operations is None else self.operations
        assert amount is not None
        return amount


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
    """A way to need less memory, or less work.

    Attributes:
      name: of the way.
      shrinks: what becomes smaller.
      formula: of the bytes or operations, in the letters of ``jdecode.shapes``; b is the bytes of a number.
      costs: in quality or speed.
      suits: where it fits.
      variants: its choices for a plan.
    """

    name: str
    shrinks: str
    formula: str
    costs: str
    suits: str
    variants: Callable[[Question], list[Variant]]


def cache_variant(question: Question, name: str, plan: ledger_lib.Plan) -> Variant:
    """Returns the choice of another cache."""
    own = ledger_lib.ledger(plan)
    return Variant(
        name=name,
        formula_bytes=own.formula_stored_bytes,
        allocated_bytes=own.stored_bytes,
        is_planned=plan == question.plan,
        plan=plan,
    )


def pool_variant(name: str, plan: ledger_lib.Plan, num_pages: int) -> Variant:
    """Returns the choice of a cache in pages whose rows own fewer pages than they have columns.

    Args:
      plan: of a cache with pages.
      num_pages: P, in the pools.
    """
    layout, own = ledger_lib.abstract_cache(plan).paged_layout, ledger_lib.ledger(plan)
    assert layout is not None
    in_pages = sum(
        line.formula_bytes or 0
        for line in own.lines
        if line.is_stored and line.layout == ledger_lib.layout_name(layout)
    )
    rest = own.formula_stored_bytes - in_pages
    stores = ledger_lib.abstract_cache(plan, num_pages).stores
    return Variant(
        name=name,
        formula_bytes=rest + in_pages * num_pages // (plan.batch_size * layout.num_columns),
        allocated_bytes=sum(map(ledger_lib.leaf_bytes, jax.tree.leaves(stores))),
        is_planned=False,
    )
