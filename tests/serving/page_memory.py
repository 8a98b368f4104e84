"""A pool's memory as lists: what a device would hold, were it told what the tables say."""

from collections.abc import Hashable, Sequence

from jdecode.serving import page_table, pages

POISON = "poison"


class PageMemory:
    """Slots of P pages of Z tokens; a slot holds whatever its token's keys and values are a function of."""

    def __init__(self, pool: pages.PagePool) -> None:
        self.pool = pool
        self.slots: list[list[Hashable]] = [[POISON] * pool.page_len for _ in range(pool.num_pages)]

    def write(self, table: page_table.PageTable, plan: page_table.Append, contents: Sequence[Hashable]) -> None:
        """Does what ``plan`` asks for, as a device would: copies first, through the padded row of ids."""
        assert plan.end - plan.start == len(contents)
        self.pool.check_table(table.padded_ids(), plan.end)
        for page in plan.new_pages:
            self.slots[page] = [POISON] * self.pool.page_len
        for source, target in plan.copies:
            self.slots[target] = list(self.slots[source])
        ids = table.padded_ids()
        for position, content in zip(range(plan.start, plan.end), contents, strict=True):
            column, offset = divmod(position, self.pool.page_len)
            self.slots[ids[column]][offset] = content

    def read(self, page_ids: Sequence[int], length: int) -> list[Hashable]:
        """Returns the contents of positions 0 .. length - 1."""
        slots = [slot for page in page_ids for slot in self.slots[page]]
        return slots[:length]

    def poison_free_pages(self) -> None:
        """Overwrites what nobody may read any more."""
        for page in range(self.pool.num_pages):
            if self.pool.references(page) == 0 and not self.pool.is_kept(page):
                self.slots[page] = [POISON] * self.pool.page_len
