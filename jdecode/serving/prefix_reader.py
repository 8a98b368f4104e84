"""Reads prompts with a prefix cache: copies what is held, computes the rest, keeps what is new.

::

    match     each prompt's longest beginning that the tree holds; one token at least is left to compute
    room      a table for each prompt, pages for its new tokens; the least recently used give way
    restore   held pages -> the request's own cache, which is then an ordinary one that stands at the cut
    prefill   the rest, in chunks; after each chunk its tokens -> pages
    insert    the tables into the tree, once the device has done all of it

Nothing is held between two requests, and nothing gets into the tree before it is on the device: a request that fails
leaves the tree as it was.

**Rings.** A ring forgets, so a chunk is never longer than the smallest ring (but for rings under the least chunk), and
its tokens are copied before the next one writes over them: then pages hold every position for every layer, though the
request's cache does not. Where a chunk is longer, the tree is told from where on keys are intact.

**One batch.** What all prompts of a batch have in common is computed once, in a cache of one row, if nobody has yet.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode.cache import cache_rows, kv_cache, layout_ring
from jdecode.decode import prefill, prompt_reader
from jdecode.models import transformer
from jdecode.serving import device_pages, page_table, pages, prefix_nodes, prefix_store, prefix_tree
from jdecode.serving.prefix_namespace import Namespace


@dataclasses.dataclass(kw_only=True)
class _Row:
    """A prompt on its way.

    Attributes:
      ids: of the prompt.
      match: what the tree holds of it, locked.
      is_held: whether the tree has nothing to gain from it.
      table: with room for all of it; ``None`` where it is not to be kept, or cannot be.
      length: tokens that the cache holds so far.
      intact_from: for each window, from which position on all keys since have got into the table's pages.
      stages: lengths that were reached, with what was intact then; the last is the whole prompt.
    """

    ids: tuple[int, ...]
    match: prefix_tree.Match
    is_held: bool
    table: page_table.PageTable | None
    length: int
    intact_from: dict[int, int]
    stages: list[tuple[int, dict[int, int]]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrefixReader:
    """Reads prompts into an empty cache. See the module, and ``decode.prompt_reader.PromptReader``.

    ``PromptReading.stats`` holds ``prefix_tokens_reused``: how many of the prompts' tokens were not computed.
    """

    store: prefix_store.PrefixStore
    namespace: Namespace

    def read(
        self, model: transformer.Transformer, params: Any, prompts: Sequence[Sequence[int]], cache: kv_cache.KVCache
    ) -> prompt_reader.PromptReading:
        """Brings an empty cache to where it stands after the prompts; it is donated."""
        prefill.check_prompts(prompts, cache)
        rows = [tuple(map(int, prompt)) for prompt in prompts]
        with self.store.guarded():
            num_shared, is_first = self._read_common(model, params, rows, cache)
            cache, logits_BV, cuts = self._read_rows(model, params, rows, cache)
        num_reused = sum(cuts) - num_shared
        self.store.count(
            prompts=len(rows),
            hits=sum(cut > 0 for cut in cuts) - is_first,
            tokens_asked=sum(map(len, rows)),
            tokens_reused=num_reused,
        )
        stats = {"prefix_tokens_reused": num_reused}
        return prompt_reader.PromptReading(cache=cache, logits_BV=logits_BV, stats=stats)

    def _read_common(
        self, model: transformer.Transformer, params: Any, rows: list[tuple[int, ...]], cache: kv_cache.KVCache
    ) -> tuple[int, bool]:
        """Has the tree hold what all rows have in common.

        Returns:
          How many tokens were computed for that, and whether nothing of it was held before.
        """
        tree, pool = self.store.tree, self.store.tree.pool
        first, last = min(rows), max(rows)  # what these two have in common, all between them have, too
        common = first[: prefix_nodes.common_len(first, last)]
        if len(rows) == 1 or len(common) < pool.page_len:
            return 0, False
        match = tree.match(self.namespace, common, keep_last=0, record=False)
        num_pages = pages.pages_for(len(common), pool.page_len) - match.num_tokens // pool.page_len
        fits = num_pages <= pool.num_free + tree.num_evictable
        tree.unlock(match)
        if not fits or len(common) - match.num_tokens < pool.page_len:
            return 0, False
        *_, (cut,) = self._read_rows(model, params, [common], _first_row(cache))
        return len(common) - cut, cut == 0

    def _read_rows(
        self, model: transformer.Transformer, params: Any, prompts: list[tuple[int, ...]], cache: kv_cache.KVCache
    ) -> tuple[kv_cache.KVCache, jax.Array, list[int]]:
        """Returns the cache after the prompts, the logits (B, V) after them, and how many tokens of each were held."""
        device, rows = self.store.device, []
        try:
            rows.extend(self._lock(ids) for ids in prompts)
            device.copy([pair for row in rows for pair in self._make_room(row)], width=len(rows))
            cuts = [row.match.num_tokens for row in rows]
            if any(cuts):
                cache = device.restore(cache, [row.match.pages for row in rows], cuts)
            logits_BV = jnp.zeros((len(rows), model.config.vocab_size), jnp.float32)
            rest = [row.ids[cut:] for row, cut in zip(rows, cuts, strict=True)]
            for tokens_BT, num_tokens_B in prefill.chunks(rest, _chunk_len(cache)):
                arrays = (jnp.asarray(tokens_BT), jnp.asarray(num_tokens_B))
                cache, logits_BV = prefill.prefill_chunk(model, params, cache, logits_BV, *arrays)
                self._keep_chunk(rows, cache, num_tokens_B.tolist(), tokens_BT.shape[1])
            is_sound_B = np.asarray(jnp.isfinite(logits_BV).all(axis=1))
            jax.block_until_ready(device.stores)
            for row, is_sound in zip(rows, is_sound_B, strict=True):
                if is_sound:  # what is not finite is an error of the request, and is not kept
                    self._insert(row)
        finally:
            for row in rows:
                if row.table is not None:
                    row.table.free()
                self.store.tree.unlock(row.match)
        return cache, logits_BV, cuts

    def _lock(self, ids: tuple[int, ...]) -> _Row:
        tree = self.store.tree
        whole = tree.match(self.namespace, ids, keep_last=0, record=False)
        tree.unlock(whole)
        match = tree.match(self.namespace, ids, record=False)
        cut = match.num_tokens
        is_held = whole.num_tokens == len(ids) == cut + 1
        # A query at the cut sees W - 1 keys before it, and those the tree vouches for.
        intact_from = {window: max(cut - window + 1, 0) for window in self.store.windows}
        return _Row(ids=ids, match=match, is_held=is_held, table=None, length=cut, intact_from=intact_from)

    def _make_room(self, row: _Row) -> tuple[tuple[int, int], ...]:
        """Gives a row a table if its prompt can be kept; returns the pages to copy for it."""
        if row.is_held:
            return ()
        tree, pool, cut = self.store.tree, self.store.tree.pool, row.match.num_tokens
        max_pages = pages.pages_for(len(row.ids), pool.page_len)
        table = page_table.PageTable(pool, max_pages=max_pages, pages=row.match.pages, length=cut)
        num_needed = table.pages_needed(len(row.ids) - cut)
        if num_needed > pool.num_free + tree.num_evictable:  # then nothing is evicted for it either
            table.free()
            self.store.count(prompts_not_kept=1)
            return ()
        row.table = table
        tree.evict(max(num_needed - pool.num_free, 0))
        copies = table.append(len(row.ids) - cut).copies
        pool.check_table(table.padded_ids(), table.length)
        return copies

    def _keep_chunk(self, rows: list[_Row], cache: kv_cache.KVCache, num_tokens: list[int], width: int) -> None:
        """Copies the tokens that a chunk has brought into the pages of their tables."""
        spans = []
        for row, num_new in zip(rows, num_tokens, strict=True):
            start, row.length = row.length, row.length + num_new
            for window, ring_len in _ring_lens(cache):
                if num_new > ring_len:
                    row.intact_from[window] = max(row.intact_from[window], row.length - ring_len)
            if num_new:
                row.stages.append((row.length, dict(row.intact_from)))
            if row.table is None:
                spans.append(device_pages.Span())
            else:
                spans.append(device_pages.Span(start=start, num_tokens=num_new, pages=row.table.pages))
        if any(span.num_tokens for span in spans):
            self.store.device.keep(cache, spans, width)

    def _insert(self, row: _Row) -> None:
        """Gives the tree a row's table: in stages where keys are lost on the way, each as intact as it was then."""
        if row.table is None:
            return
        page_len = self.store.tree.pool.page_len
        *before, last = row.stages
        for length, intact_from in before:
            if intact_from != last[1] and length >= page_len:
                self._insert_stage(row, length - length % page_len, intact_from)
        self._insert_stage(row, *last)

    def _insert_stage(self, row: _Row, length: int, intact_from: dict[int, int]) -> None:
        assert row.table is not None
        clipped = {window: min(position, length) for window, position in intact_from.items()}
        self.store.tree.insert(self.namespace, row.ids[:length], row.table, intact_from=clipped)


@jax.jit
def _first_row(cache: kv_cache.KVCache) -> kv_cache.KVCache:
    return cache_rows.take_rows(cache, jnp.zeros(1, jnp.int32))


def _ring_lens(cache: kv_cache.KVCache) -> list[tuple[int, int]]:
    """Returns window and ring length of every layout that is a ring."""
    rings = [layout for layout in cache.layouts if isinstance(layout, layout_ring.RingLayout)]
    return [(ring.window, ring.ring_len) for ring in rings]


def _chunk_len(cache: kv_cache.KVCache) -> int:
    """Returns the tokens of a chunk: a power of two that no ring loses any of, unless that were under the least."""
    shortest = min((ring_len for _, ring_len in _ring_lens(cache)), default=prefill.CHUNK_LEN)
    power = 1 << (min(shortest, prefill.CHUNK_LEN).bit_length() - 1)
    return max(power, prefill.LEAST_CHUNK_LEN)
