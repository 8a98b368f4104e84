"""Random work on the prefix tree beside a naive model: one entry in a dict for each page, and a simulated memory.

The model knows no nodes and no splits. Its key is the namespace and *all* tokens up to the end of a page, so that its
parent is in the key; it finds by looking at every entry, and evicts page by page. A slot of the memory holds the
namespace and all tokens up to its own, which is what keys and values are a function of: a page given out for another
beginning, another namespace, or written over, shows there.
"""

import collections
import dataclasses
from typing import Any, ClassVar

import hypothesis
from hypothesis import stateful
from hypothesis import strategies as st

from jdecode import config
from jdecode.serving import page_table, pages, prefix_tree
from jdecode.serving.prefix_namespace import Namespace
from tests.serving import page_memory, prefix_case

NUM_PAGES, PAGE_LEN, MAX_PAGES = 11, 3, 7
MOST_REQUESTS = 4
BASE = Namespace(model="digest", cache=config.CacheConfig(dtype="float32"))
NAMESPACES = (dataclasses.replace(BASE, salt="a"), dataclasses.replace(BASE, adapter="a"))
TOKENS = st.sampled_from([65, 321])  # equal in their lowest eight bits
SETTINGS = hypothesis.settings(
    max_examples=80,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],  # which a busy machine would fail
)

Key = tuple[Namespace, tuple[int, ...]]


@dataclasses.dataclass
class Entry:
    """One page of the model."""

    page: int
    last_use: int


@dataclasses.dataclass
class Request:
    """A text under way."""

    namespace: Namespace
    tokens: list[int]
    table: page_table.PageTable


def _common_len(one, other) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


class PrefixMachine(stateful.RuleBasedStateMachine):
    """Requests that match, grow, fork, roll back, are kept, end and are evicted."""

    windows: tuple[int, ...] = ()
    slack = 1  # of the rings, in tokens
    options: ClassVar[dict[str, Any]] = {}

    def __init__(self) -> None:
        super().__init__()
        self.pool = pages.PagePool(num_pages=NUM_PAGES, page_len=PAGE_LEN)
        self.tree = prefix_tree.PrefixTree(self.pool, windows=self.windows, **self.options)
        self.memory = page_memory.PageMemory(self.pool)
        self.requests: list[Request] = []
        self.matches: list[prefix_tree.Match] = []
        self.model: dict[Key, Entry] = {}
        self.intact_from: dict[int, dict[int, int]] = {}  # of a kept page, by window
        self.clock = 0
        self.asked: list[tuple[int, int]] = []  # tokens asked and reused, for each match
        self.num_evicted = 0

    # The naive model.

    def _held(self) -> collections.Counter[int]:
        held = collections.Counter(page for request in self.requests for page in set(request.table.pages))
        held.update(page for match in self.matches for page in set(match.pages))
        return held

    def _model_match(self, namespace: Namespace, limit: list[int], match: prefix_tree.Match) -> None:
        texts = [text for owner, text in self.model if owner == namespace]
        longest = max((_common_len(text, limit) for text in texts), default=0)
        if self.windows:
            self._check_windows(namespace, limit, match, longest)
        else:
            assert match.num_tokens == longest
        self.clock += 1
        for column, page in enumerate(match.pages):
            end = min((column + 1) * PAGE_LEN, match.num_tokens)
            (entry,) = [  # the one whose page it is, and it does hold these tokens
                entry
                for (owner, text), entry in self.model.items()
                if entry.page == page and owner == namespace and list(text[:end]) == limit[:end]
            ]
            entry.last_use = self.clock

    def _check_windows(self, namespace: Namespace, limit: list[int], match: prefix_tree.Match, longest: int) -> None:
        def is_intact(page_ids, cut: int) -> bool:
            return all(
                self.intact_from[page_ids[position // PAGE_LEN]][window] <= position
                for window in self.windows
                for position in range(max(cut - window + 1, 0), cut)
            )

        assert match.num_tokens <= longest and is_intact(match.pages, match.num_tokens)
        whole = []
        for end in range(PAGE_LEN, longest + 1, PAGE_LEN):
            if (entry := self.model.get((namespace, tuple(limit[:end])))) is None:
                break
            whole.append(entry.page)
            assert match.num_tokens >= end or not is_intact(whole, end)

    def _model_insert(self, request: Request, text: tuple[int, ...], before: tuple[int, ...], held) -> int:
        """Updates the model, given the table's pages and everybody's references before; returns the tokens held."""
        self.clock += 1
        for column in range(-(-len(text) // PAGE_LEN)):
            start, end = column * PAGE_LEN, min((column + 1) * PAGE_LEN, len(text))
            key = (request.namespace, text[:end])
            entry = self.model.get(key)
            if end - start == PAGE_LEN and entry is not None:
                if request.table.pages[column] != entry.page:  # the tree gave up its own for one that is more intact
                    assert self.windows and not held[entry.page] and request.table.pages[column] == before[column]
                    entry.page = before[column]
                entry.last_use = self.clock
                continue
            siblings = [
                other
                for other in self.model
                if other[0] == request.namespace
                and other[1][:start] == text[:start]
                and start < len(other[1]) <= start + PAGE_LEN
            ]
            covering = [other for other in siblings if other[1][:end] == text[:end]]
            if covering:
                self.model[min(covering, key=lambda other: other[1])].last_use = self.clock
                return end
            if held[before[column]] > 1 or before[column] in {entry.page for entry in self.model.values()}:
                return start
            for other in siblings:
                if text[: len(other[1])] == other[1]:
                    del self.model[other]
            self.model[key] = Entry(page=before[column], last_use=self.clock)
        return len(text)

    def _evict(self, num_pages: int) -> None:
        held = self._held()
        num_freed = 0
        while num_freed < num_pages:
            ends = [
                key
                for key, entry in self.model.items()
                if not held[entry.page]
                and not any(
                    key[0] == other[0] and len(other[1]) > len(key[1]) and other[1][: len(key[1])] == key[1]
                    for other in self.model
                )
            ]
            if not ends:
                break
            oldest = min(ends, key=lambda key: self.model[key].last_use)
            assert [self.model[key].last_use for key in ends].count(self.model[oldest].last_use) == 1
            del self.model[oldest]
            num_freed += 1
        num_evictable = self.tree.num_evictable
        assert self.tree.evict(num_pages) == num_freed == min(num_pages, num_evictable)
        self.num_evicted += num_freed

    def _append(self, request: Request, tokens: list[int]) -> bool:
        """Makes room as an engine would, and writes; says whether it could."""
        if not tokens:
            return True
        if len(request.tokens) + len(tokens) > MAX_PAGES * PAGE_LEN:
            return False
        num_needed = request.table.pages_needed(len(tokens))
        if num_needed > self.pool.num_free:
            self._evict(num_needed - self.pool.num_free)
        if num_needed > self.pool.num_free:
            return False
        first = len(request.tokens)
        request.tokens.extend(tokens)
        ends = range(first + 1, len(request.tokens) + 1)
        contents = [(request.namespace, tuple(request.tokens[:end])) for end in ends]
        self.memory.write(request.table, request.table.append(len(tokens)), contents)
        return True

    def _free(self, request: Request) -> None:
        self.requests = [other for other in self.requests if other is not request]
        request.table.free()

    def _match(self, namespace: Namespace, tokens: list[int], keep_last: int) -> prefix_tree.Match:
        match = self.tree.match(namespace, tokens, keep_last=keep_last)
        limit = tokens[: max(len(tokens) - keep_last, 0)]
        self.asked.append((len(tokens), match.num_tokens))
        assert match.num_tokens <= len(limit)
        assert len(match.pages) == -(-match.num_tokens // PAGE_LEN)
        expected = [(namespace, tuple(tokens[: end + 1])) for end in range(match.num_tokens)]
        assert self.memory.read(match.pages, match.num_tokens) == expected
        self._model_match(namespace, limit, match)
        return match

    def _insert(self, request: Request, length: int) -> None:
        before, held, text = request.table.pages, self._held(), tuple(request.tokens[:length])
        intact_from = {window: max(length - window - self.slack, 0) for window in self.windows}
        were_kept = {page for page in range(NUM_PAGES) if self.pool.is_kept(page)}
        num_held = self.tree.insert(request.namespace, text, request.table, intact_from=intact_from)
        for page in set(range(NUM_PAGES)) - were_kept:
            if self.pool.is_kept(page):
                self.intact_from[page] = intact_from
        assert num_held == self._model_insert(request, text, before, held)

    # What may happen.

    def _text(self, data: st.DataObject) -> tuple[Namespace, list[int]]:
        """Draws a text, most often one that begins as one that is held, now and then of the other namespace."""
        known = [(owner, list(text)) for owner, text in self.model]
        known += [(request.namespace, list(request.tokens)) for request in self.requests]
        namespace, text = data.draw(st.sampled_from(known or [(NAMESPACES[0], [])]))
        if data.draw(st.sampled_from([False, False, False, True])):
            namespace = NAMESPACES[1 - NAMESPACES.index(namespace)]
        del text[len(text) - data.draw(st.integers(0, len(text))) :]
        return namespace, text + data.draw(st.lists(TOKENS, min_size=int(not text), max_size=6))

    @stateful.precondition(lambda self: len(self.requests) < MOST_REQUESTS)
    @stateful.rule(data=st.data(), keep_last=st.integers(0, 2))
    def start(self, data: st.DataObject, keep_last: int) -> None:
        namespace, tokens = self._text(data)
        match = self._match(namespace, tokens, keep_last)
        table = page_table.PageTable(self.pool, max_pages=MAX_PAGES, pages=match.pages, length=match.num_tokens)
        self.tree.unlock(match)
        request = Request(namespace, tokens[: match.num_tokens], table)
        self.requests.append(request)
        if not self._append(request, tokens[match.num_tokens :]):
            self._free(request)

    @stateful.precondition(lambda self: len(self.matches) < 2)
    @stateful.rule(data=st.data(), keep_last=st.integers(0, 2))
    def lock(self, data: st.DataObject, keep_last: int) -> None:
        self.matches.append(self._match(*self._text(data), keep_last))

    @stateful.precondition(lambda self: self.matches)
    @stateful.rule()
    def unlock(self) -> None:
        self.tree.unlock(self.matches.pop(0))

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), tokens=st.lists(TOKENS, min_size=1, max_size=5))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        self._append(data.draw(st.sampled_from(self.requests)), tokens)

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data())
    def roll_back(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        del request.tokens[data.draw(st.integers(0, len(request.tokens))) :]
        request.table.truncate(len(request.tokens))

    @stateful.precondition(lambda self: 0 < len(self.requests) < MOST_REQUESTS)
    @stateful.rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self.requests.append(Request(request.namespace, list(request.tokens), request.table.fork()))

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data())
    def insert(self, data: st.DataObject) -> None:
        request = data.draw(st.sampled_from(self.requests))
        self._insert(request, data.draw(st.integers(0, len(request.tokens))))

    @stateful.precondition(lambda self: self.requests)
    @stateful.rule(data=st.data(), is_kept=st.sampled_from([True, True, False]))
    def finish(self, data: st.DataObject, is_kept: bool) -> None:
        request = data.draw(st.sampled_from(self.requests))
        if is_kept:
            self._insert(request, len(request.tokens))
        self._free(request)

    @stateful.precondition(lambda self: self.model)
    @stateful.rule(num_pages=st.integers(0, 3))
    def evict(self, num_pages: int) -> None:
        self._evict(num_pages)

    # What always holds.

    @stateful.invariant()
    def accounts_are_those_of_the_model(self) -> None:
        self.tree.check()
        held, kept = self._held(), {entry.page for entry in self.model.values()}
        assert {page for page in range(NUM_PAGES) if self.pool.is_kept(page)} == kept and len(kept) == len(self.model)
        assert self.tree.num_pages == len(kept) and self.tree.num_locks == len(self.matches)
        assert self.tree.num_evictable == len(kept - set(held))
        assert self.pool.num_used == len(held)
        assert self.tree.num_evictable + self.pool.num_used + self.pool.num_free == NUM_PAGES

    @stateful.invariant()
    def memory_holds_every_text(self) -> None:
        self.memory.poison_free_pages()
        texts = [(request.namespace, request.tokens, request.table.pages) for request in self.requests]
        for namespace, tokens, page_ids in texts:
            expected = [(namespace, tuple(tokens[: end + 1])) for end in range(len(tokens))]
            assert self.memory.read(page_ids, len(tokens)) == expected
        for (namespace, text), entry in self.model.items():
            start = (len(text) - 1) // PAGE_LEN * PAGE_LEN
            expected = [(namespace, text[: end + 1]) for end in range(start, len(text))]
            assert self.memory.slots[entry.page][: len(expected)] == expected

    @stateful.invariant()
    def statistics_are_those_of_the_calls(self) -> None:
        num_hits = sum(reused > 0 for _, reused in self.asked)
        assert self.tree.statistics == prefix_tree.PrefixStatistics(
            hits=num_hits,
            misses=len(self.asked) - num_hits,
            tokens_asked=sum(asked for asked, _ in self.asked),
            tokens_reused=sum(reused for _, reused in self.asked),
            pages_evicted=self.num_evicted,
        )

    def teardown(self) -> None:
        for match in self.matches:
            self.tree.unlock(match)
        for request in self.requests:
            request.table.free()
        assert self.pool.num_used == 0 and self.tree.num_locks == 0
        assert self.tree.evict(NUM_PAGES) == len(self.model)
        self.tree.check()
        assert self.pool.num_free == NUM_PAGES


class CollidingMachine(PrefixMachine):
    """Where every hash is the same."""

    options: ClassVar[dict[str, Any]] = {"page_hash": prefix_case.constant_hash}


class WindowMachine(PrefixMachine):
    """Where layers with windows lose the beginning of a text as it grows."""

    windows = (2, 5)


PrefixMachine.TestCase.settings = CollidingMachine.TestCase.settings = WindowMachine.TestCase.settings = SETTINGS
TestPrefixMachine = PrefixMachine.TestCase
TestCollidingMachine = CollidingMachine.TestCase
TestWindowMachine = WindowMachine.TestCase
