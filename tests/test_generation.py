"""Ends, streams and text of a generation. ``tiny_model.RepeatPrompt`` makes each row write its prompt again."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, generation
from jdecode.decode import loop, prefill
from jdecode.speculative import speculation
from tests import tiny_model
from tests.speculative import drafts_under_test

STEPS = [1, 3, 8, loop.ALL_TOKENS]
EOS = 2
# Characters of 1, 2, 3 and 4 bytes; what the vocabulary lacks is written byte by byte, one token each.
UNICODE = "is the sea née 日本 🌞👩‍👦 한국 on it"


def encode(text: str) -> list[int]:
    """Returns ids that read as " " and the text where they continue a text."""
    tokenizer = tiny_model.load_text().tokenizer
    assert tokenizer is not None
    return tokenizer.encode(text, add_special_tokens=False)


def stream(scripts, *, lm=None, **options):
    """Returns the chunks and the result of rows that write ``scripts``."""
    lm = lm or tiny_model.load_text()
    options = {"max_new_tokens": 60, "transforms": [tiny_model.RepeatPrompt()], **options}
    text_stream = lm.stream(scripts, **options)
    assert text_stream.result is None
    chunks = list(text_stream)
    assert text_stream.result is not None
    return chunks, text_stream.result


def check_stream(chunks: list[generation.Chunk], result: generation.GenerateResult) -> None:
    """Checks that the chunks say what the result says."""
    for row, tokens in enumerate(tiny_model.rows(result)):
        own = [chunk for chunk in chunks if chunk.row == row]
        assert "".join(chunk.text for chunk in own) == result.texts[row]
        assert [token for chunk in own for token in chunk.token_ids] == tokens
        assert [chunk.finish_reason for chunk in own] == [None] * (len(own) - 1) + [result.finish_reasons[row]]


@pytest.mark.parametrize("steps", STEPS)
def test_unicode_is_never_shown_in_part(steps):
    script = [*encode(UNICODE), EOS]
    chunks, result = stream([script], steps_per_look=steps)
    check_stream(chunks, result)
    assert result.texts == [f" {UNICODE}"]
    assert tiny_model.rows(result) == [script]
    assert result.finish_reasons == ["stop"]
    assert not any("\ufffd" in chunk.text for chunk in chunks)
    assert max(len(chunk.token_ids) for chunk in chunks) <= steps
    # The first look sees one token; then come as many as were asked for.
    if steps == 8:
        assert [len(chunk.token_ids) for chunk in chunks[:3]] == [1, 8, 8]


@pytest.mark.parametrize("steps", [1, loop.ALL_TOKENS])
def test_text_that_is_cut_inside_a_character_ends_with_a_replacement(steps):
    # "is" is one token, the space another, then the sun's four bytes, of which three come: one unfinished character.
    script = encode("is 🌞")
    assert len(script) == 6
    chunks, result = stream([script], steps_per_look=steps, max_new_tokens=5)
    check_stream(chunks, result)
    assert result.texts == [" is \ufffd"]
    assert result.finish_reasons == ["length"]
    assert [chunk.text for chunk in chunks if "\ufffd" in chunk.text] == [chunks[-1].text]


# Tokens of the text: "▁the" "▁s" "h" "o" "re" "▁is" "▁the" "▁th" "is" "▁the" "▁h" ... (see the vocabulary).
SHORE = "the shore is this hat"


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize(
    ("stop", "text", "last"),
    [
        ("ore i", " the sh", "▁is"),  # over three tokens, in the middle of the last
        ("shore", " the ", "re"),  # from the middle of a token to the end of another
        (["hat", "is t"], " the shore ", "▁th"),  # the one that is complete first
        (" t", "", "▁the"),  # in the first token; the rest of that token does not leak
        ("zebra", f" {SHORE}", "</s>"),  # never
        ("hats", f" {SHORE}", "</s>"),  # held back to the end, then shown
    ],
)
def test_stop_strings(steps, stop, text, last):
    lm = tiny_model.load_text()
    assert lm.tokenizer is not None
    script = [*encode(SHORE), EOS]
    chunks, result = stream([script], stop=stop, steps_per_look=steps, logprobs=2)
    check_stream(chunks, result)
    assert result.texts == [text]
    assert result.finish_reasons == ["stop"]
    tokens = tiny_model.rows(result)[0]
    # The result ends with the token that completes the stop string, though the device may have run on.
    assert tokens == script[: len(tokens)]
    assert lm.tokenizer.token_string(tokens[-1]) == last
    assert result.logprobs is not None and result.top_logprobs is not None
    assert result.tokens.shape == result.logprobs.shape == (1, len(tokens))
    assert len(result.top_logprobs[0]) == len(tokens)
    assert result.stats["new_tokens"] == len(tokens)


@pytest.mark.parametrize("steps", STEPS)
def test_rows_meet_their_stop_strings_at_different_places(steps):
    scripts = [[*encode(text), EOS] for text in ("the sea is in", "this hat is the one", "a note on it")]
    chunks, result = stream(scripts, stop="is", steps_per_look=steps, max_new_tokens=5)
    check_stream(chunks, result)
    # " the" " s" "e" "a" " is" | " th" "is" | " a" " " "n" "o" "t": the last one is full before it ends.
    assert result.texts == [" the sea ", " th", " a not"]
    assert result.finish_reasons == ["stop", "stop", "length"]
    assert result.lengths.tolist() == [5, 2, 5]
    assert not result.tokens[1, 2:].any()


@pytest.mark.parametrize("steps", STEPS)
def test_a_stop_token_before_the_stop_string_wins(steps):
    script = [*encode("the hat"), EOS, *encode("shore")]
    _, result = stream([script], stop="shore", steps_per_look=steps)
    assert result.texts == [" the hat"]
    assert tiny_model.rows(result) == [[*encode("the hat"), EOS]]


@pytest.mark.parametrize("steps", STEPS)
def test_rows_that_end_at_different_times_all_complete(steps):
    scripts = [[*range(40, 40 + length - 1), EOS] for length in (2, 5, 9)]
    chunks, result = stream(scripts, steps_per_look=steps)
    check_stream(chunks, result)
    assert result.lengths.tolist() == [2, 5, 9]
    assert tiny_model.rows(result) == scripts
    assert result.tokens.shape == (3, 9)
    assert not result.tokens[0, 2:].any() and not result.tokens[1, 5:].any()
    # 40 is the byte 0x25, "%"; the end token is no text.
    assert result.texts == ["%", "%&'(", "%&'()*+,"]
    assert result.finish_reasons == ["stop"] * 3
    assert (result.stats["prompt_tokens"], result.stats["new_tokens"]) == (16, 16)


def test_samples_that_end_at_different_times_all_complete():
    # One prompt, three samples: the end token is likely enough that they end apart.
    lm = tiny_model.load_text()
    ends = tuple(range(100, 130))
    lm = dataclasses.replace(lm, end_token_ids=ends)
    sampling = config.SamplingConfig(temperature=2.0, seed=5)
    text_stream = lm.stream([[1, 40, 41]], num_samples=3, max_new_tokens=60, sampling=sampling, steps_per_look=1)
    chunks = list(text_stream)
    assert text_stream.result is not None
    check_stream(chunks, text_stream.result)
    assert len(set(text_stream.result.lengths.tolist())) == 3
    assert text_stream.result.finish_reasons == ["stop"] * 3
    for tokens in tiny_model.rows(text_stream.result):
        assert [token for token in tokens if token in ends] == tokens[-1:]
    # The three share one prompt, which is read and counted once.
    assert text_stream.result.stats["prompt_tokens"] == 3
    assert text_stream.result.stats["new_tokens"] == text_stream.result.lengths.sum()


SCRIPT = [40, 51, 62, 73, 84, 95, 106]


@pytest.mark.parametrize("place", range(len(SCRIPT)))
def test_each_token_can_be_the_stop_token(place):
    chunks, result = stream([SCRIPT], stop_token_ids=[SCRIPT[place]], max_new_tokens=len(SCRIPT), ignore_eos=True)
    check_stream(chunks, result)
    assert tiny_model.rows(result) == [SCRIPT[: place + 1]]
    # Ids 3 .. 258 are the bytes 0 .. 255.
    assert result.texts == ["".join(chr(token - 3) for token in SCRIPT[:place])]
    assert result.finish_reasons == ["stop"]


@pytest.mark.parametrize("end", [2, 62, 95])
def test_every_end_token_of_the_model_stops(end):
    lm = dataclasses.replace(tiny_model.load_text(), end_token_ids=(2, 62, 95))
    script = [40, 51, end, 73, 84]
    options = {"lm": lm, "max_new_tokens": len(script)}
    _, result = stream([script], **options)
    assert (tiny_model.rows(result), result.finish_reasons) == ([script[:3]], ["stop"])
    _, result = stream([script], ignore_eos=True, **options)
    assert (tiny_model.rows(result), result.finish_reasons) == ([script], ["length"])
    # The caller's own stop tokens are not the model's, and act on; an end token that is named too stops as well.
    for own in (73, end):
        _, result = stream([script], ignore_eos=True, stop_token_ids=[own], **options)
        assert (tiny_model.rows(result)[0][-1], result.finish_reasons) == (own, ["stop"])
    _, result = stream([script], stop_token_ids=[73], **options)
    assert tiny_model.rows(result) == [script[:3]]


@pytest.mark.parametrize("steps", [1, loop.ALL_TOKENS])
@pytest.mark.parametrize("num_new", [1, 2, 7, 64, 65])
def test_max_new_tokens_is_exact(steps, num_new):
    script = [40 + idx for idx in range(70)]
    chunks, result = stream([script], max_new_tokens=num_new, steps_per_look=steps)
    check_stream(chunks, result)
    assert tiny_model.rows(result) == [script[:num_new]]
    assert result.finish_reasons == ["length"]


def test_last_token_that_is_also_an_end_counts_as_stop():
    _, result = stream([[40, 51, EOS]], max_new_tokens=3)
    assert result.finish_reasons == ["stop"]
    assert result.lengths.tolist() == [3]


def test_capacity_that_just_suffices_and_one_slot_less(monkeypatch):
    lm = tiny_model.load("llama_gqa")
    prompt, golden = tiny_model.prompts("llama_gqa")[1], tiny_model.greedy("llama_gqa")[1]
    options = {"max_new_tokens": 24, "ignore_eos": True}
    assert len(prompt) == 19
    assert tiny_model.rows(lm.generate([prompt], capacity=43, **options)) == [golden]

    def refuse(*arguments, **options):
        raise AssertionError("nothing should be computed")

    monkeypatch.setattr(prefill, "prefill", refuse)
    with pytest.raises(ValueError, match=r"^capacity: expected at least 43 slots .* got 42; [^\n]+$"):
        lm.stream([prompt], capacity=42, **options)
    # The short row would fit: the longest one decides.
    with pytest.raises(ValueError, match="expected at least 43 slots"):
        lm.stream([prompt[:4], prompt], capacity=42, **options)


def test_cache_without_room_is_refused_before_anything_is_computed(monkeypatch):
    lm = tiny_model.load("llama_gqa")
    monkeypatch.setattr(prefill, "prefill", None)
    cache = lm.init_cache(batch_size=1, capacity=9)
    request = lm.stream([[5, 6, 7, 8]], max_new_tokens=6)._request
    with pytest.raises(ValueError, match=r"^capacity: expected room for 10 tokens in row 0 \(0 held, 10 more\), got 9"):
        generation.TextStream(lm.model, lm.params, None, request, cache)


def test_stream_is_read_once_and_gives_its_cache_at_the_end():
    lm = tiny_model.load_text()
    text_stream = lm.stream([[40, 51, 62]], max_new_tokens=6, steps_per_look=1)
    chunks = iter(text_stream)
    next(chunks)
    with pytest.raises(ValueError, match=r"^cache: expected an exhausted stream"):
        _ = text_stream.cache
    assert text_stream.result is None
    list(chunks)
    # Prompt and output, but for the latest token.
    assert text_stream.cache.length_B.tolist() == [3 + 6 - 1]
    with pytest.raises(ValueError, match=r"^stream: expected to be read once"):
        next(iter(text_stream))


def test_stop_strings_without_a_tokenizer_are_refused():
    with pytest.raises(ValueError, match=r"^stop: expected a model with a tokenizer, .*stop_token_ids$"):
        tiny_model.load("llama_gqa").stream([[5]], stop="x")
    result = tiny_model.load("llama_gqa").generate([[5, 6]], max_new_tokens=6)
    assert result.texts == [""]


def test_statistics():
    _, result = stream([[40, 51, 62]], max_new_tokens=6)
    stats = result.stats
    assert stats["new_tokens"] == 6 and stats["prompt_tokens"] == 3
    # K=2, H=12, 3 layers, float32: keys and values of 256 slots, the positions of the slots, and the length.
    assert stats["kv_cache_bytes"] == 2 * 3 * 256 * 2 * 12 * 4 + 256 * 4 + 4
    # 120,256 parameters, as the maker of the checkpoint counted them.
    assert stats["weight_bytes"] == 120_256 * 4
    assert stats["decode_tokens_per_second"] == pytest.approx(5 / stats["decode_seconds"])
    for name in ("first_token_seconds", "prefill_seconds", "decode_seconds", "compile_seconds"):
        assert stats[name] >= 0


@jax.jit
def read_for_a_while(matrix: jax.Array) -> jax.Array:
    """Returns 0, after some 10^10 products, which take the better part of a second."""
    product = jax.lax.fori_loop(0, 600, lambda _, product: product @ matrix / 256, matrix)
    return (product[0, 0] > 2).astype(jnp.int32)


def test_what_a_draft_reads_of_the_prompt_is_prefill(monkeypatch):
    begin = speculation.Speculation.begin

    def begin_slowly(self, *arguments, **options):
        # After all else, for a CPU's queue is short: a caller with some thirty operations waits of itself.
        drafting = begin(self, *arguments, **options)
        reading = drafting.memory["round"] + read_for_a_while(jnp.ones((256, 256)))
        return dataclasses.replace(drafting, memory={**drafting.memory, "round": reading})

    monkeypatch.setattr(speculation.Speculation, "begin", begin_slowly)
    lm, draft = tiny_model.load_text(), drafts_under_test.ScriptedDraft((64,))
    for _ in range(2):  # the first one compiles, which takes longer than the reading
        text_stream = lm.stream([[40, 51, 62]], max_new_tokens=6, steps_per_look=1, draft=draft)
        next(iter(text_stream))  # the first token: the clock of the prefill has been read
        assert text_stream._drafting is not None
        assert text_stream._drafting.memory["round"].is_ready()


def test_broken_weights_are_an_error_and_not_a_text():
    lm = tiny_model.with_nan(tiny_model.load_text(), ("head", "weight"))
    message = r"^logits of row 0: expected finite numbers, got NaN or infinity after 0 new tokens; [^\n]+$"
    with pytest.raises(FloatingPointError, match=message):
        lm.generate([[40, 51, 62]], max_new_tokens=6)
    with pytest.raises(FloatingPointError, match=message):
        next(iter(lm.stream([[40, 51, 62]], max_new_tokens=6)))
    assert all(bool(np.isfinite(leaf).all()) for leaf in jax.tree.leaves(tiny_model.load_text().params))


def test_tokens_before_the_first_broken_one_are_right():
    # The row of one token in the embedding is NaN: nothing shows until that token is fed.
    prompt, golden = tiny_model.prompts("llama_gqa")[0], tiny_model.greedy("llama_gqa")[0]
    place = next(idx for idx in range(2, 24) if golden[idx] not in [*prompt, *golden[:idx]])
    lm = tiny_model.with_nan(tiny_model.load("llama_gqa"), ("embedding", "weight"), golden[place])
    seen = []
    with pytest.raises(FloatingPointError, match=f"after {place + 1} new tokens"):
        for chunk in lm.stream([prompt], max_new_tokens=24, ignore_eos=True, steps_per_look=1):
            seen += chunk.token_ids
    assert seen == golden[: place + 1]
    with pytest.raises(FloatingPointError, match=f"after {place + 1} new tokens"):
        lm.generate([prompt], max_new_tokens=24, ignore_eos=True)
