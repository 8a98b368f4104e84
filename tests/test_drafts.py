"""What fits a target as a draft, and what is refused with one line."""

import dataclasses
from typing import Any

import pytest

import jdecode
from jdecode import config, draft_arguments, drafts, generation, sampling
from jdecode import request as request_lib
from jdecode.parallel import device_memory
from jdecode.parallel import mesh as mesh_lib
from jdecode.speculative import draft_layer_skip, draft_model, draft_ngram, verify
from tests import tiny_model
from tests.speculative import drafts_under_test
from tests.test_chat_session import PLAIN, with_template

CHAIN = sampling.standard_chain()


def make(lm, draft, **options):
    return drafts.make_speculation(lm, draft=draft, cache=config.CacheConfig(), **options)


def test_names_and_rules_stand_in_one_place():
    assert draft_arguments.DRAFTS_WITHOUT_WEIGHTS == (drafts.NGRAM, drafts.LAYER_SKIP)
    assert tuple(verify.RULES) == config.VERIFY_RULES


def test_each_name_gives_its_draft():
    lm = tiny_model.load("llama_gqa")
    assert make(lm, None) is None
    ngram, skip = make(lm, "ngram"), make(lm, "layer_skip")
    assert ngram is not None and ngram.draft == draft_ngram.NgramDraft() and ngram.costs is not None
    assert skip is not None and isinstance(skip.draft, draft_layer_skip.LayerSkipDraft)
    assert skip.draft.model.config.layers == lm.config.layers[: max(1, lm.config.num_layers // 3)]
    own = draft_ngram.NgramDraft(longest=5)
    chosen = make(lm, own, adaptive_draft=False, num_draft_tokens=7, verify="coupled")
    assert chosen is not None and chosen.draft is own and chosen.costs is None
    assert chosen.num_draft_tokens == 7 and chosen.verify == verify.Coupled()


def test_equal_speculations_share_their_step():
    lm = tiny_model.load("mistral_w16")
    first, second = (make(lm, drafts_under_test.noisy(lm), num_draft_tokens=3) for _ in range(2))
    assert first is not None and second is not None
    assert first.step(lm.model, CHAIN) == second.step(lm.model, sampling.standard_chain())
    # A ring of the draft, too, must be able to take a block back.
    assert isinstance(first.draft, draft_model.ModelDraft) and first.draft.cache.slack == 3


def test_a_packaged_draft_fits_its_target_and_not_another():
    target, draft = jdecode.load("gqa_small", dtype="float32"), jdecode.load("gqa_draft", dtype="float32")
    assert make(target, draft) is not None
    with pytest.raises(ValueError, match=r"draft: expected the target's tokens, got another string for id \d+ \("):
        make(tiny_model.load_text(), draft)


def test_without_tokenizers_the_sizes_decide():
    shapes: dict[str, Any] = {
        "hidden_size": 16,
        "intermediate_size": 20,
        "num_heads": 2,
        "num_kv_heads": 1,
        "head_dim": 8,
    }
    layers = (config.LayerConfig(), config.LayerConfig())
    target = tiny_model.make(vocab_size=50, layers=layers, **shapes)
    assert make(target, tiny_model.make(vocab_size=50, layers=layers[:1], **shapes)) is not None
    with pytest.raises(ValueError, match="draft: expected a model with the target's 50 tokens, got one with 60"):
        make(target, tiny_model.make(vocab_size=60, layers=layers, **shapes))


@pytest.mark.parametrize("padded", ["target", "draft"])
def test_a_vocabulary_may_be_padded_on_either_side(padded):
    lm = tiny_model.load_text()
    assert lm.tokenizer is not None
    shapes: dict[str, Any] = {
        field: getattr(lm.config, field) for field in ("hidden_size", "intermediate_size", "num_heads")
    }
    shapes |= {"num_kv_heads": lm.config.num_kv_heads, "head_dim": lm.config.head_dim, "layers": lm.config.layers[:1]}
    wide = tiny_model.make(vocab_size=lm.config.vocab_size + 12, **shapes)
    wide = dataclasses.replace(wide, tokenizer=lm.tokenizer)
    target, draft = (wide, lm) if padded == "target" else (lm, wide)
    prompt = [5, 40, 41, 42, 40, 41]
    plain = target.generate(prompt, max_new_tokens=20, ignore_eos=True)
    result = target.generate(prompt, max_new_tokens=20, ignore_eos=True, draft=draft, adaptive_draft=False)
    assert tiny_model.rows(result) == tiny_model.rows(plain)


@pytest.mark.parametrize(
    ("draft", "error", "message"),
    [
        ("bigram", TypeError, "draft: expected None, 'ngram', 'layer_skip' or a loaded language model, got 'bigram'"),
        (7, TypeError, "draft: expected None, .* got 7"),
        (draft_ngram.NgramDraft, TypeError, "draft: expected None, .* got <class"),
    ],
)
def test_what_is_no_draft_is_refused(draft, error, message):
    with pytest.raises(error, match=message):
        make(tiny_model.load("llama_gqa"), draft)


def test_a_draft_on_other_devices_is_refused():
    lm = tiny_model.load("llama_gqa")
    elsewhere = dataclasses.replace(lm, mesh=mesh_lib.make_mesh(config.MeshConfig()))
    with pytest.raises(ValueError, match="draft: expected a model on the target's devices, got another mesh"):
        make(lm, elsewhere)
    assert make(elsewhere, elsewhere) is not None


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_w16"])  # with a full layer, and with rings alone
def test_caches_that_fit_only_one_by_one_are_refused(name, monkeypatch):
    lm, rows, limit = tiny_model.load(name), [[5, 6, 7], [8, 9]], {}
    monkeypatch.setattr(device_memory, "total_bytes", lambda mesh: limit.get("bytes"))

    options: Any = {"max_new_tokens": 300, "num_samples": 2, "num_draft_tokens": 3, "ignore_eos": True}
    held = lm.generate(rows, draft=lm, **options).stats
    # Beside the caches stand the tokens of the output, four bytes each, in a buffer of the next power of two.
    both = held["kv_cache_bytes"] + held["draft_cache_bytes"] + 4 * 512 * 4
    limit["bytes"] = both
    lm.stream(rows, draft=lm, **options)
    limit["bytes"] = both - 1
    message = r"^memory: expected at most .* GiB for cache, draft's cache and output of 4 rows x 512 slots; [^\n]+$"
    with pytest.raises(ValueError, match=message):
        lm.stream(rows, draft=lm, **options)
    lm.stream(rows, draft="ngram", **options)  # it has no cache


def test_a_conversation_whose_caches_fit_only_one_by_one_is_refused(monkeypatch):
    lm = tiny_model.load("llama_gqa")
    cache = lm.init_cache(batch_size=1, capacity=2000)
    monkeypatch.setattr(device_memory, "total_bytes", lambda mesh: 2 * cache.num_bytes)
    # The buffer of the output is a little more.
    lm.chat_session(capacity=2000)
    lm.chat_session(capacity=2000, draft="ngram")
    with pytest.raises(ValueError, match=r"^memory: .* for cache, draft's cache and output of 1 rows x 2000 slots; "):
        lm.chat_session(capacity=2000, draft=lm)


@pytest.mark.parametrize(
    ("cache", "most"),
    [
        # A quarter of a group is exact, and one more than the slack; what can be taken back must be less.
        (config.CacheConfig(dtype="int4", group_len=8), 1),
        (config.CacheConfig(dtype="int8_channel", group_len=8, slack=3), 3),
        (config.CacheConfig(dtype="int4"), 31),
        (config.CacheConfig(dtype="int4", slack=31), 31),
        (config.CacheConfig(dtype="int8"), config.MOST_DRAFT_TOKENS),
    ],
)
def test_a_draft_that_would_change_which_tokens_are_exact_is_refused(cache, most):
    lm = with_template(tiny_model.load_text(), PLAIN)
    options: Any = {"draft": "ngram", "cache": cache}
    assert drafts.make_speculation(lm, num_draft_tokens=most, **options) is not None
    if most == config.MOST_DRAFT_TOKENS:
        return
    message = (
        f"num_draft_tokens: expected at most {most} beside a cache in {cache.dtype} with groups of {cache.group_len} "
        f"and slack {cache.slack}, got {most + 1} (more would keep other tokens exact, and so change the text); "
        f"give fewer, or a cache with slack {most + 1}, with and without the draft"
    )
    options["num_draft_tokens"] = most + 1
    for act in (
        lambda: drafts.make_speculation(lm, **options),
        lambda: lm.generate([[5, 6]], **options),
        lambda: lm.stream([[5, 6]], **options),
        lambda: lm.chat_session(**options),
    ):
        with pytest.raises(ValueError) as refused:
            act()
        assert str(refused.value) == message
    # As it says: with as much slack on both sides, the same tokens are exact.
    options["cache"] = dataclasses.replace(cache, slack=most + 1)
    assert drafts.make_speculation(lm, **options) is not None


@pytest.mark.parametrize("slack", [0, 2, 3])
def test_a_cache_that_cannot_take_a_block_back_is_refused(slack):
    lm = tiny_model.load("mistral_w16")
    request = request_lib.resolve(
        [[5, 6]],
        vocab_size=lm.config.vocab_size,
        tokenizer=None,
        end_token_ids=(),
        max_new_tokens=4,
        sampling=config.SamplingConfig(),
        steps_per_look=8,
    )

    def stream():
        cache = lm.init_cache(batch_size=1, capacity=64, cache=config.CacheConfig(slack=slack))
        speculation = make(lm, "ngram", num_draft_tokens=4)
        return generation.TextStream(lm.model, lm.params, None, request, cache, speculation=speculation)

    if slack == 3:  # a ring of W + 3 slots can take 4 tokens back
        assert stream().result is None
        return
    with pytest.raises(ValueError, match=rf"cache: expected one that can take back 4 draft tokens, .* {slack + 1};"):
        stream()


def test_layers_that_a_model_has_not_are_refused():
    model = tiny_model.load("llama_gqa").model
    most = model.config.num_layers - 1
    assert draft_layer_skip.LayerSkipDraft.of(model, most).model.config.num_layers == most
    for num_layers in (0, most + 1):
        with pytest.raises(ValueError, match="draft layer_skip: expected"):
            draft_layer_skip.LayerSkipDraft.of(model, num_layers)
