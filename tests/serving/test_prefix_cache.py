"""Prompts that are read with a prefix cache against cold ones: logits after the prompt and after six more tokens.

Numbers name the faults of other engines that a test is for: 4 pages, 5 prefix caches, 13 donation.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config as config_lib
from jdecode.cache import allocate, layout_full
from jdecode.decode import prefill, prompt_reader
from jdecode.models import digest
from jdecode.serving import page_copies, prefix_cache
from tests import tiny_models
from tests.serving.prefix_case import constant_hash
from tests.serving.prefix_reading import (
    AUTO,
    LM,
    PAGE_LEN,
    check,
    check_accounts,
    init,
    make_lm,
    poison_free_pages,
    read,
    text,
)
from tests.test_compile_counts import CompileLog

FULL = config_lib.CacheConfig(layout="full")
INT8 = config_lib.CacheConfig(dtype="int8")


@pytest.fixture
def short_chunks(monkeypatch):
    """Lets chunks be as short as the rings, so that these lose no token before it is copied."""
    monkeypatch.setattr(prefill, "LEAST_CHUNK_LEN", 4)


@pytest.mark.parametrize("cache", [FULL, INT8], ids=["full", "int8"])
def test_text_goes_on_from_every_cut(cache, short_chunks):
    prefixes = init(cache=cache)
    base, other = text(21), text(21, seed=3)
    assert check(prefixes, [base], cache) == 0
    for cut in range(21):
        assert base[cut] != other[cut]
        assert check(prefixes, [base[:cut] + other[cut:]], cache) == cut
    assert check(prefixes, [base], cache) == 20  # one token at least is computed
    assert check(prefixes, [base[:20]], cache) == 19  # exactly ten pages
    assert check(prefixes, [base + other], cache) == 21


def test_rings_whose_chunks_fit_lose_nothing(short_chunks):
    prefixes = init()
    base, other = text(27), text(27, seed=3)
    check(prefixes, [base])
    for cut in (1, 4, 9, 14, 26):
        assert check(prefixes, [base[:cut] + other[cut:]]) == cut
        poison_free_pages(prefixes)


def test_rings_that_forget_are_reused_only_where_they_are_intact():
    prefixes = init()
    base, other = text(40), text(40, seed=3)
    check(prefixes, [base])  # chunks of 16, rings of 4: 12 .. 15, 28 .. 31 and 36 .. 39 are kept of every layer
    assert check(prefixes, [base]) == 39
    assert check(prefixes, [base + other[:9]]) == 40
    assert check(prefixes, [base[:30] + other[30:]]) == 16
    assert check(prefixes, [base[:31] + other[31:]]) == 31  # 28, 29 and 30 are there
    assert check(prefixes, [base[:38] + other[38:]]) == 32
    assert check(prefixes, [base[:15] + other[15:]]) == 15
    assert check(prefixes, [base[:14] + other[14:]]) == 0  # needs 11, too


def test_every_window_must_be_intact_not_the_largest_alone():
    window, _, full = LM.config.layers
    lm = make_lm(dataclasses.replace(LM.config, layers=(window, dataclasses.replace(window, window=9), full)))
    prefixes = lm.init_prefix_cache(num_pages=200, page_len=PAGE_LEN)
    base, other = text(40), text(40, seed=3)
    check(prefixes, [base], lm=lm)  # chunks of 16, 16 and 8: the ring of 9 loses nothing of the last, that of 4 does
    assert check(prefixes, [base[:38] + other[38:]], lm=lm) == 32
    assert check(prefixes, [base[:30] + other[30:]], lm=lm) == 16
    assert check(prefixes, [base[:31] + other[31:]], lm=lm) == 31  # 23 .. 30 are there for the one, 28 .. 30 for both
    assert check(prefixes, [base + other[:9]], lm=lm) == 40


@pytest.mark.parametrize("dtype", ["int8", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_what_free_pages_hold_changes_no_bit(dtype, short_chunks):
    cache = config_lib.CacheConfig(dtype=dtype)
    clean, poisoned = (init(num_pages=24, cache=cache) for _ in range(2))
    base, other = text(27), text(27, seed=3)
    first, second = base[:9] + other[9:], base[:9] + other[9:15] + base[15:]
    for prompt in (base, first, second, other, second):  # some give way to others, and their pages are taken again
        readings = []
        for prefixes in (clean, poisoned):
            if prefixes is poisoned:
                poison_free_pages(prefixes)
            reader = prefixes.reader(LM.model, LM.params, cache)
            readings.append(read(reader, [prompt], cache))
        (expected, cold), (got, warm) = readings
        np.testing.assert_array_equal(got, expected)
        assert warm.stats == cold.stats
    assert poisoned.statistics.tokens_reused == 9 + 15 + 20 and poisoned.statistics.pages_evicted > 0
    check_accounts(poisoned)


def test_rows_of_a_batch_have_prefixes_of_their_own():
    prefixes = init()
    first, second = text(17), text(12, seed=3)
    check(prefixes, [first])
    check(prefixes, [second])
    prompts = [second + text(9, seed=4), text(5, seed=6), first + text(3, seed=7), first]
    assert check(prefixes, prompts) == 12 + 0 + 17 + 16
    assert prefixes.statistics.hits == 3 and prefixes.statistics.prompts == 6


def test_what_a_batch_has_in_common_is_computed_once():
    prefixes = init()
    base = text(20)
    prompts = [base + text(9, seed=4), [*base, 5], base, base + text(9, seed=4)]
    assert check(prefixes, prompts) == 20 + 20 + 19 + 20 - 20
    assert prefixes.statistics.hits == 3
    assert check(prefixes, prompts) == 28 + 20 + 19 + 28
    assert prefixes.statistics.tokens_asked == 2 * sum(map(len, prompts))


def test_least_recently_used_gives_way_and_what_does_not_fit_is_not_kept():
    prefixes = init(num_pages=13)
    texts = [text(8, seed=seed) for seed in (11, 12, 13)]
    for one in texts:
        assert check(prefixes, [one]) == 0
    assert check(prefixes, [texts[0]]) == 7  # now the second is the oldest
    assert check(prefixes, [text(9, seed=14)]) == 0
    assert check(prefixes, [texts[0]]) == 7 and check(prefixes, [texts[2]]) == 7
    before = prefixes.statistics
    assert check(prefixes, [text(27, seed=15)]) == 0  # 14 pages
    after = prefixes.statistics
    assert after.prompts_not_kept == before.prompts_not_kept + 1
    assert (after.pages_evicted, after.pages_held) == (before.pages_evicted, before.pages_held)
    assert check(prefixes, [texts[0]]) == 7


def test_rows_of_a_batch_that_do_not_fit_beside_the_others_are_not_kept():
    prefixes = init(num_pages=13)
    prompts = [text(20, seed=seed) for seed in (21, 22)]
    assert check(prefixes, prompts) == 0
    assert prefixes.statistics.prompts_not_kept == 1 and prefixes.statistics.pages_held == 10
    assert check(prefixes, prompts) == 19  # nor does the second give way to the first, which is in use
    assert check(prefixes, prompts[1:]) == 0 and check(prefixes, prompts[1:]) == 19


@pytest.mark.parametrize("page_hash", [None, constant_hash], ids=["hash", "constant_hash"])
def test_random_texts_in_few_pages_that_are_poisoned_when_free(page_hash):
    prefixes = prefix_cache.make(LM.model, LM.params, num_pages=17, page_len=PAGE_LEN, page_hash=page_hash)
    rng = np.random.default_rng(7)
    reused = 0
    for _ in range(12 if page_hash is None else 6):
        poison_free_pages(prefixes)
        # Of two ids that are equal in their lowest eight bits, so that texts begin alike again and again.
        first = rng.choice([65, 321], size=rng.integers(1, 4)).repeat(4)
        prompts = [[*first.tolist(), *rng.integers(1, 331, rng.integers(1, 9)).tolist()] for _ in range(2)]
        reused += check(prefixes, prompts)
    assert reused > 30 and prefixes.statistics.pages_evicted > 0


def test_copies_leave_the_pages_of_others_alone():
    prefixes = init(num_pages=9)
    check(prefixes, [text(7)])
    kept = [page for page in range(9) if prefixes._store.tree.pool.is_kept(page)]
    before = jax.tree.map(lambda leaf: np.asarray(leaf)[kept], prefixes._store.device.stores)
    check(prefixes, [text(7)[:3] + text(6, seed=4), text(30, seed=5)])  # shares, copies on write, and does not fit
    after = jax.tree.map(lambda leaf: np.asarray(leaf)[kept], prefixes._store.device.stores)
    jax.tree.map(np.testing.assert_array_equal, before, after)


def test_tenants_with_other_salts_share_nothing():
    prefixes = init(salt="secret")
    canary = text(12)
    check(prefixes, [canary])
    views = [prefixes.with_salt(None), prefixes.with_salt("other"), init()]
    for view in views:
        assert check(view, [canary]) == 0
        assert check(view, [canary]) == 11
    assert check(prefixes.with_salt("secret"), [canary]) == 11
    assert "secret" not in repr(prefixes.reader(LM.model, LM.params, AUTO))


def test_layouts_share_nothing():
    prefixes = init()
    assert check(prefixes, [text(12)]) == 0
    assert check(prefixes, [text(12)], FULL) == 0
    assert check(prefixes, [text(12)], dataclasses.replace(AUTO, slack=3)) == 11


def test_other_models_are_refused_however_like_they_are():
    prefixes = init()
    changed = jax.tree.map(jnp.copy, LM.params)
    same = LM.model, jax.tree.map(jnp.copy, LM.params)
    prefixes.reader(*same, AUTO)
    weight = changed["params"]["embedding"]["weight"]
    changed["params"]["embedding"]["weight"] = weight.at[3, 4].set(jnp.nextafter(weight[3, 4], jnp.inf))
    rope = config_lib.RopeConfig(theta=101.0)
    layers = (dataclasses.replace(LM.config.layers[0], rope=rope), *LM.config.layers[1:])
    other_rope = make_lm(dataclasses.replace(LM.config, layers=layers))
    for model, params in (
        (LM.model, changed),
        (dataclasses.replace(LM.model, dtype="bfloat16"), LM.params),
        (other_rope.model, LM.params),
    ):
        with pytest.raises(
            ValueError, match="prefix_cache: expected one that was made for this model, got another"
        ) as info:
            prefixes.reader(model, params, AUTO)
        assert "\n" not in str(info.value)


def test_digest_knows_every_array_by_its_name_and_shape():
    config, one = LM.config, jnp.arange(6.0)
    trees = [
        {"a": one, "b": one[:2]},
        {"b": one, "a": one[:2]},
        {"a": one[:2], "b": one[2:]},
        {"a": one.reshape(2, 3), "b": one[:2]},
        {"a": one.astype(jnp.bfloat16), "b": one[:2]},
        {"a": {"a": one}, "b": one[:2]},
    ]
    assert len({digest.model_digest(config, "float32", tree) for tree in trees}) == len(trees)
    assert digest.model_digest(config, "float32", trees[0]) == digest.model_digest(config, "float32", dict(trees[0]))


def test_request_of_another_dtype_is_refused():
    prefixes = init(cache=INT8)
    with pytest.raises(ValueError, match="cache dtype: expected int8, that of the prefix cache, got float32; take"):
        prefixes.reader(LM.model, LM.params, AUTO)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheOfTomorrow(config_lib.CacheConfig):
    """A config with an option that prefix caches know nothing of."""

    tomorrow: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherLayout(layout_full.FullLayout):
    """A layout that prefix caches know nothing of."""


def test_what_is_not_known_to_be_copied_is_refused(monkeypatch):
    prefixes = init()
    prefixes.reader(LM.model, LM.params, CacheOfTomorrow())
    with pytest.raises(ValueError, match="cache tomorrow: expected None beside a prefix cache, got 3"):
        prefixes.reader(LM.model, LM.params, CacheOfTomorrow(tomorrow=3))
    with pytest.raises(ValueError, match="cache eviction: expected none beside a prefix cache, got snapkv"):
        prefixes.reader(LM.model, LM.params, config_lib.CacheConfig(budget=3, eviction="snapkv"))
    each = "cache dtype: expected one that stores each token for itself"
    for refused, message in (
        (config_lib.CacheConfig(dtype="int4"), f"{each} beside a prefix cache, got 'int4'"),
        (config_lib.CacheConfig(dtype="int8_channel"), f"{each} beside a prefix cache, got 'int8_channel'"),
        (
            config_lib.CacheConfig(layout="paged"),
            "cache layout: expected auto or full beside a prefix cache, got 'paged'",
        ),
    ):
        with pytest.raises(ValueError, match=f"^{message}; "):
            LM.init_prefix_cache(num_pages=4, cache=refused)
    with monkeypatch.context() as patch:
        patch.setattr(allocate, "layer_layout", lambda layer, cache, capacity: OtherLayout(capacity=capacity))
        with pytest.raises(ValueError, match="cache layout: expected auto or full beside a prefix cache, got 'full'"):
            prefixes.reader(LM.model, LM.params, FULL)
    codec = allocate.make_codec(AUTO, "float32")
    monkeypatch.setattr(
        allocate, "make_codec", lambda cache, dtype, platform=None: dataclasses.replace(codec, keys=codec)
    )
    with pytest.raises(ValueError, match="cache dtype: expected one that stores each token for itself"):
        init()


@pytest.mark.parametrize(
    "page_len, num_pages, message",
    [
        (0, 4, "page_len: expected a count of at least 1, got 0$"),
        (True, 4, "page_len: expected a count of at least 1, got True$"),
        (2, 0, "num_pages: expected a count of at least 1, got 0$"),
        (2, 2**40, f"memory: expected at most .* for a prefix cache of {2**40} pages x 2 slots; take fewer, or"),
    ],
)
def test_sizes_are_refused(page_len, num_pages, message):
    with pytest.raises(ValueError, match=f"^{message}"):
        LM.init_prefix_cache(num_pages=num_pages, page_len=page_len)


@pytest.mark.parametrize("salt, got", [("", "an empty text"), (3, "int"), (b"secret", "bytes")])
def test_salts_are_texts(salt, got):
    with pytest.raises(ValueError, match=f"^salt: expected some text or None, got {got}$"):
        init(salt=salt)


def test_salts_may_hold_half_a_character():
    prefixes = init(salt="\ud800")
    prompt = list(range(1, 12))
    check(prefixes, [prompt])
    assert check(prefixes.with_salt("\ud801"), [prompt]) == 0 < check(prefixes.with_salt("\ud800"), [prompt])


@pytest.mark.slow
def test_devices_of_a_mesh_read_what_one_device_reads():
    mesh = jax.sharding.Mesh(np.asarray(jax.devices()[:4]).reshape(2, 2), ("data", "model"))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    lm = dataclasses.replace(LM, params=jax.device_put(LM.params, whole), mesh=mesh)
    prefixes = lm.init_prefix_cache(num_pages=20, page_len=PAGE_LEN)
    keys = prefixes._store.device.stores[0].keys
    assert keys.data_BSX.sharding.spec == jax.sharding.PartitionSpec(None, None, "model")  # pyright: ignore
    base = text(13)
    for prompts, reused in (([base, text(6, seed=3)], 0), ([base + text(5, seed=4), text(6, seed=3)], 13 + 5)):
        cold, _ = read(prompt_reader.PlainReader(), prompts, AUTO)
        warm, reading = read(prefixes.reader(lm.model, lm.params, AUTO, mesh=mesh), prompts, AUTO, lm)
        tiny_models.assert_rows_close(warm, cold)
        assert reading.stats["prefix_tokens_reused"] == reused
    with pytest.raises(ValueError, match="expected one on the devices of this model"):
        prefixes.reader(LM.model, LM.params, AUTO)


def test_mixed_load_compiles_nothing_new_after_a_warm_up():
    prefixes = init(num_pages=30)
    rng = np.random.default_rng(3)

    def load(num_requests: int) -> None:
        for _ in range(num_requests):
            # The same shapes, of 16 tokens a chunk and up to 16 pages, with other numbers.
            prompts = [[*text(20)[: rng.integers(18, 21)], *rng.integers(1, 331, 6).tolist()] for _ in range(2)]
            read(prefixes.reader(LM.model, LM.params, AUTO), prompts, AUTO)

    load(12)
    with CompileLog() as log:
        load(6)
    assert not {"keep", "restore", "copy_pages", "prefill_chunk", "take_rows"} & (log.traced | log.compiled).keys()
    assert not log.compiled


class Stop(Exception):
    """What stands for a failure in the middle of a request."""


@pytest.mark.parametrize("place", ["before", "after"])
def test_failing_copy_leaves_a_valid_prefix_cache(place, monkeypatch):
    prefixes, base = init(), text(20)
    check(prefixes, [base])
    real = page_copies.keep

    def failing(*arguments):
        if place == "after":
            real(*arguments)  # the pages are donated, and what came of them is lost
        raise Stop

    monkeypatch.setattr(page_copies, "keep", failing)
    with pytest.raises(Stop):
        read(prefixes.reader(LM.model, LM.params, AUTO), [base + text(5, seed=8)], AUTO)
    monkeypatch.setattr(page_copies, "keep", real)
    check_accounts(prefixes)
    is_lost = place == "after"
    assert prefixes.statistics.times_emptied == is_lost
    assert prefixes.statistics.pages_held == (0 if is_lost else 10)
    assert check(prefixes, [base + text(5, seed=8)]) == (0 if is_lost else 20)  # and nothing of the failed request
    assert check(prefixes, [base]) == (16 if is_lost else 19)  # the ring's last keys are at 16 and at 25


def test_failing_chunk_leaves_a_valid_prefix_cache(monkeypatch):
    prefixes, base = init(), text(36)
    real, calls = prefill.prefill_chunk, []

    def failing(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(prefill, "prefill_chunk", failing)
        with pytest.raises(KeyboardInterrupt):
            read(prefixes.reader(LM.model, LM.params, AUTO), [base], AUTO)
    check_accounts(prefixes)
    assert prefixes.statistics.pages_held == prefixes.statistics.prompts == 0
    poison_free_pages(prefixes)
    assert check(prefixes, [base]) == 0 and check(prefixes, [base]) == 35


def test_rows_that_are_not_finite_are_not_kept():
    weight = LM.params["params"]["embedding"]["weight"]
    broken = {"params": {**LM.params["params"], "embedding": {"weight": weight.at[7].set(jnp.nan)}}}
    reader = prefix_cache.make(LM.model, broken, num_pages=64, page_len=PAGE_LEN).reader(LM.model, broken, AUTO)
    cache = LM.init_cache(batch_size=2, capacity=64)
    ids = [token for token in text(9) if token != 7]
    reading = reader.read(LM.model, broken, [[*ids, 7], ids], cache)
    assert np.isfinite(np.asarray(reading.logits_BV)).all(axis=1).tolist() == [False, True]
    tree = reader.store.tree
    assert tree.match(reader.namespace, [*ids, 7, 7], record=False).num_tokens == len(ids)


def test_empty_prompts_and_wrong_rows_are_refused():
    prefixes = init()
    reader = prefixes.reader(LM.model, LM.params, AUTO)
    for prompts, message in (
        ([[]], "prompt of row 0: expected at least one token, got none"),
        ([[1], [2]], "prompts: expected 1, one for each row of the cache, got 2"),
        ([text(65)], "capacity: expected room for 65 tokens in row 0 .*, got 64 slots"),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            reader.read(LM.model, LM.params, prompts, LM.init_cache(batch_size=1, capacity=64))
    check_accounts(prefixes)
    assert prefixes.statistics.prompts == 0
