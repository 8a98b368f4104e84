"""A small prefix tree, and what the tests of it do and ask again and again."""

from jdecode import config
from jdecode.serving import page_table, pages, prefix_tree
from jdecode.serving.prefix_namespace import Namespace

NUM_PAGES, PAGE_LEN, MAX_PAGES = 13, 2, 9
CACHE = config.CacheConfig(dtype="float32")
BASE = Namespace(model="digest", cache=CACHE)


def constant_hash(parent_idx: int, tokens: tuple[int, ...]) -> int:
    del parent_idx, tokens
    return 0


def make_tree(windows=(), **options) -> prefix_tree.PrefixTree:
    pool = pages.PagePool(num_pages=NUM_PAGES, page_len=PAGE_LEN)
    return prefix_tree.PrefixTree(pool, windows=windows, **options)


def add(tree: prefix_tree.PrefixTree, tokens, namespace=BASE, *, free=True, **options) -> page_table.PageTable:
    """Has a text computed from its beginning and kept, without asking for what is held."""
    table = page_table.PageTable(tree.pool, max_pages=MAX_PAGES)
    table.append(len(tokens))
    tree.insert(namespace, tokens, table, **options)
    tree.check()
    if free:
        table.free()
    return table


def held(tree: prefix_tree.PrefixTree, tokens, namespace=BASE, keep_last=0) -> int:
    """Returns how many tokens of a text are held, and leaves nothing locked."""
    match = tree.match(namespace, tokens, keep_last=keep_last)
    assert len(match.pages) == -(-match.num_tokens // PAGE_LEN)
    tree.unlock(match)
    tree.check()
    return match.num_tokens


def accounts(tree: prefix_tree.PrefixTree) -> tuple[int, int, int]:
    """Evictable, locked, free."""
    tree.check()
    assert tree.num_evictable + tree.pool.num_used + tree.pool.num_free == NUM_PAGES
    return tree.num_evictable, tree.pool.num_used, tree.pool.num_free
