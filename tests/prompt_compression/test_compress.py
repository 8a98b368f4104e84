"""``compress_prompt``: what goes is what is predictable, and what must stay stays."""

import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

import jdecode
from jdecode.prompt_compression import compress, token_text, units
from jdecode.text import token_bytes
from tests.prompt_compression import small_prompts
from tests.prompt_compression.small_prompts import EchoScorer, SilentScorer, TableScorer

IDS = small_prompts.language_model()


def plain_drop(ids: list[int], table: list[float], budget: int, protected: set[int]) -> list[int]:
    """A plain model: again and again drops the least surprising token that may go, of equal ones the last."""
    surprise = {idx: table[token_id] for idx, token_id in enumerate(ids)}
    others = [surprise[idx] for idx in range(1, len(ids))]
    surprise[0] = sum(others) / len(others) if others else 0.0
    kept = list(range(len(ids)))
    while len(kept) > budget:
        may_go = [idx for idx in kept if idx not in protected]
        kept.remove(min(may_go, key=lambda idx: (surprise[idx], -idx)))
    return kept


@hypothesis.given(st.data())
@hypothesis.settings(deadline=None, max_examples=150)
def test_exactly_the_most_predictable_unprotected_tokens_go(data: st.DataObject):
    ids = data.draw(st.lists(st.integers(0, 10), min_size=1, max_size=24))
    # quarters: sums are exact, so that the mean of the plain model is that of numpy
    table = data.draw(st.lists(st.integers(0, 12).map(lambda n: n / 4), min_size=11, max_size=11))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    budget = data.draw(st.integers(max(1, stop - start), len(ids) + 2))
    short = jdecode.compress_prompt(
        IDS, ids, budget=budget, protected=range(start, stop), unit="token", scorer=TableScorer(table)
    )
    expected = plain_drop(ids, table, budget, set(range(start, stop)))
    assert list(short.kept) == expected
    assert list(short.ids) == [ids[idx] for idx in expected]
    assert short.stats["kept_tokens"] == min(budget, len(ids)) == len(ids) - short.stats["dropped_tokens"]


@pytest.mark.parametrize("budget", [7, 8, 1000, 1.0, np.int32(7), np.float32(1)])
def test_a_prompt_within_its_budget_is_returned_unread(budget: Any):
    ids = [3, 1, 4, 1, 5, 9, 2]
    short = jdecode.compress_prompt(IDS, ids, budget=budget, scorer=SilentScorer())
    assert short.ids == short.prompt_ids == tuple(ids) and short.kept == tuple(range(7)) and short.text is None


def test_a_text_within_its_budget_is_returned_as_it_is():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer(adds_start=True))
    text = "é\r\n <|turn|>x "
    short = jdecode.compress_prompt(lm, text, budget=1.0, question="x?", protected="é", scorer=SilentScorer())
    assert short.text == text and list(short.ids) == lm.encode(text)


@pytest.mark.parametrize(
    ("share", "num_tokens", "expected"), [(0.29, 100, 29), (0.5, 7, 3), (0.1, 3, 1), (1e-9, 5, 1), (0.7, 10, 7)]
)
def test_a_share_is_rounded_down(share: float, num_tokens: int, expected: int):
    assert compress.budget_tokens(share, num_tokens) == expected


# Bytes of ASCII, of two and of four; digits with separators; blanks, line ends, sentence ends, list markers.
TEXTS = st.text(st.sampled_from("ab1 2.,-\n!é😀…*。"), min_size=1, max_size=40)


@hypothesis.given(TEXTS, st.data())
@hypothesis.settings(deadline=None, max_examples=200)
def test_protected_text_numbers_and_characters_stay_whole(text: str, data: st.DataObject):
    tokenizer = small_prompts.byte_tokenizer(["Ġ a", "b b", "1 2"], adds_start=True)
    lm = small_prompts.language_model(tokenizer)
    table = data.draw(st.lists(st.floats(0, 9), min_size=tokenizer.vocab_size, max_size=tokenizer.vocab_size))
    start = data.draw(st.integers(0, len(text)))
    end = data.draw(st.integers(start, len(text)))
    options: dict[str, Any] = {
        "budget": data.draw(st.floats(0.05, 1.0)),
        "protected": [(start, end)],
        "unit": data.draw(st.sampled_from(units.UNITS)),
        "keep_structure": data.draw(st.booleans()),
        "scorer": TableScorer(table),
    }
    try:
        short = jdecode.compress_prompt(lm, text, **options)
    except ValueError as error:
        (least,) = re.findall(r"expected at least (\d+)", str(error))  # and that is enough
        options["budget"] = int(least)
        short = jdecode.compress_prompt(lm, text, **options)
        assert len(short.ids) == int(least)
    assert short.text is not None
    assert short.ids[0] == small_prompts.START and len(short.ids) <= short.stats["budget_tokens"]
    assert list(short.kept) == sorted(set(short.kept))
    assert "\ufffd" not in short.text
    # One token a byte but for the merged ones: the characters of each token, by plain decoding of the bytes before it.
    before = [b"".join(map(tokenizer.token_bytes, short.prompt_ids[:idx])) for idx in range(len(short.prompt_ids) + 1)]
    is_kept_char: dict[int, set[bool]] = {}
    for idx in range(1, len(short.prompt_ids)):
        first = len(before[idx].decode(errors="ignore"))
        last = len(before[idx + 1].decode(errors="replace"))
        for char in range(first, last):
            is_kept_char.setdefault(char, set()).add(idx in short.kept)
    assert all(len(found) == 1 for found in is_kept_char.values())  # no character in part
    assert all(is_kept_char[char] == {True} for char in range(start, end))
    for number in re.finditer(r"[0-9]+(?:[.,-][0-9]+)*", text):
        assert len(set.union(*(is_kept_char[char] for char in range(*number.span())))) == 1
    options["budget"] = short.stats["budget_tokens"]
    again = jdecode.compress_prompt(lm, text, **options)
    assert (again.ids, again.text, again.kept) == (short.ids, short.text, short.kept)


def test_what_stays_keeps_its_words_sentence_end_line_break_and_list_marker():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    text = "Things to buy.\n- Twelve eggs! Cheap.\n- Salt.\n\n12.50 euros"
    table = dict.fromkeys(range(259), 1.0)
    for char, nats in (("w", 100.0), ("5", 50.0), ("S", 20.0)):
        table[ord(char) + 3] = nats

    def left(budget: int, **options: Any) -> str | None:
        options.setdefault("unit", "word")
        return jdecode.compress_prompt(lm, text, budget=budget, scorer=TableScorer(table), **options).text

    # "- Twelve!\n" is marker 1, word 7 with its blank, sentence end 1, line break 1: ten tokens
    assert left(10) == "- Twelve!\n"
    # "12.50" is five tokens and one unit: four are no room for it, nor for any other with its line and sentence
    assert left(14) == "- Twelve!\n"
    assert left(15) == "- Twelve!\n12.50"
    assert left(12, keep_structure=False) == " Twelve12.50"
    # then " Salt" with its marker, end and both line breaks: 1 + 5 + 1 + 2
    assert left(24) == "- Twelve!\n- Salt.\n\n12.50"
    assert left(18, unit="sentence") == "- Twelve eggs!\n"


def test_a_mark_that_shares_a_character_is_no_structure():
    alias = {byte: char for char, byte in token_bytes.byte_aliases().items()}
    tokenizer = small_prompts.byte_tokenizer([f"{alias[0x80]} ."])  # the last byte of the face, and the sentence's end
    lm = small_prompts.language_model(tokenizer)
    assert len(lm.encode("a\U0001f600. b")) == 7
    table = dict.fromkeys(range(260), 1.0) | {ord("a") + 3: 9.0}
    short = jdecode.compress_prompt(lm, "b a\U0001f600. b", budget=3, unit="word", scorer=TableScorer(table))
    assert short.text == "b a"


def test_a_number_keeps_its_sign():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    table = dict.fromkeys(range(259), 1.0) | {ord("5") + 3: 50.0, ord("3") + 3: 20.0}
    for unit in ("token", "word"):
        short = jdecode.compress_prompt(lm, "from -5% up to $3.25 a-b", budget=10, unit=unit, scorer=TableScorer(table))
        # (1 + 1 + 50 + 1) / 4 for " -5%", and (1 + 1 + 20 + 1 + 1 + 50) / 6 for " $3.25"
        assert short.text == " -5% $3.25"


def test_a_question_keeps_the_sentence_that_it_foretells():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    text = "abcab. defde. ghigh. jkljk."
    # With EchoScorer each letter is new once a sentence, but behind the question "h" and "i" are not.
    short = jdecode.compress_prompt(lm, text, budget=7, question="hi", scorer=EchoScorer())
    assert short.text == " ghigh."
    # Without it the mean surprise of the sentences: (5 + 5 + 5 + 5 + 1 + 1) / 6 for the second, whose blank is the
    # first of the text, and 3 for the others.
    assert jdecode.compress_prompt(lm, text, budget=7, scorer=EchoScorer()).text == " defde."


def test_scores_are_means_of_surprise_and_quadratic_means_of_gains():
    tokenizer = small_prompts.byte_tokenizer()
    ids = tokenizer.encode("ab ghigh")
    division = units.divide(token_text.token_text(ids, tokenizer), "word", keep_structure=True)
    # "b", the blank, "g", "h" and "i" are new, 5 nats; the second "g" and "h" are 1; "a" has the mean 27 / 7
    plain = compress.unit_scores(division, EchoScorer(), ids)
    assert plain == pytest.approx([(27 / 7 + 5) / 2, 22 / 6])
    # behind "hi" the first "h" and the "i" gain 4 nats, of six tokens
    gained = compress.unit_scores(division, EchoScorer(), ids, question_ids=tokenizer.encode("hi"))
    assert gained == pytest.approx([0, (2 * 4**2 / 6) ** 0.5])


def test_every_window_begins_as_the_models_texts_do():
    tokenizer = small_prompts.byte_tokenizer(adds_start=True)
    scorer = TableScorer(dict.fromkeys(range(259), 1.0), window_len=8)
    lm = small_prompts.language_model(tokenizer)
    jdecode.compress_prompt(lm, "abcdefghijklmnopq", budget=3, unit="token", scorer=scorer)
    assert [tokenizer.decode(window, skip_special_tokens=False) for window in scorer.asked] == [
        "<|start|>abcdefg",  # seven tokens of the text, then five new ones a window
        "<|start|>fghijkl",
        "<|start|>klmnopq",
    ]


def test_chat_frames_stay():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer(adds_start=True))
    text = "<|turn|>user\nlong words about little<|stop|>\n<|turn|>assistant\n"
    ids = lm.encode(text)
    frame = "<|turn|>user\n<|stop|>\n<|turn|>assistant\n"
    frame_len = len(lm.encode(frame))
    table = dict.fromkeys(range(259), 1.0) | {ord("w") + 3: 9.0}
    short = jdecode.compress_prompt(lm, ids, budget=frame_len, unit="word", scorer=TableScorer(table))
    assert (short.text, list(short.ids)) == (frame, lm.encode(frame))
    short = jdecode.compress_prompt(lm, ids, budget=frame_len + 6, unit="word", scorer=TableScorer(table))
    assert short.text == "<|turn|>user\n words<|stop|>\n<|turn|>assistant\n"


def test_a_budget_that_no_unit_fits_is_refused_and_none_is_cut():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer(adds_start=True))
    scorer = TableScorer(dict.fromkeys(range(259), 1.0))
    text = "Long words. Ants."  # the shortest: start, " Ants" and its end
    assert jdecode.compress_prompt(lm, text, budget=7, scorer=scorer).text == " Ants."
    with pytest.raises(ValueError, match="budget: expected at least 7 tokens, which the shortest sentence takes"):
        jdecode.compress_prompt(lm, text, budget=6, scorer=scorer)
    # what is protected is enough, and a mark at the end of its sentence is no part of its unit
    assert jdecode.compress_prompt(lm, text, budget=2, scorer=scorer, protected=range(17, 18)).text == "."


def test_strings_protect_each_occurrence_and_lists_take_all_kinds():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    text = "one two one six ten"
    options: dict[str, Any] = {"unit": "word", "scorer": TableScorer(dict.fromkeys(range(259), 1.0))}
    assert jdecode.compress_prompt(lm, text, budget=7, protected="one", **options).text == "one one"
    kinds = ["one", (13, 14), range(17, 18)]  # "i" of six, "e" of ten: each the whole word with its blank
    assert jdecode.compress_prompt(lm, text, budget=15, protected=kinds, **options).text == "one one six ten"


def test_what_is_protected_keeps_its_line_and_sentence():
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    options: dict[str, Any] = {"protected": [(2, 3)], "scorer": TableScorer(dict.fromkeys(range(259), 1.0))}
    text = "- a b.\nc d"  # "a" brings its blank, the marker, the sentence's end and the line's break
    assert jdecode.compress_prompt(lm, text, budget=5, unit="word", **options).text == "- a.\n"
    with pytest.raises(ValueError, match="budget: expected at least 5 tokens, which must stay, got 4"):
        jdecode.compress_prompt(lm, text, budget=4, unit="word", **options)


def test_one_token_and_one_token_left():
    assert jdecode.compress_prompt(IDS, [7], budget=1, scorer=SilentScorer()).ids == (7,)
    assert jdecode.compress_prompt(IDS, [7], budget=0.01, scorer=SilentScorer()).ids == (7,)
    table = [float(token_id) for token_id in range(small_prompts.V)]
    assert jdecode.compress_prompt(IDS, [5, 3, 9, 4], budget=1, scorer=TableScorer(table)).kept == (2,)
    whole = jdecode.compress_prompt(IDS, [5, 3, 9, 4], budget=2, protected=range(1, 3), scorer=TableScorer(table))
    assert whole.kept == (1, 2)


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([1, 2], {"budget": 0}, "budget: expected a whole number of tokens from 1, or a share .* got 0"),
        ([1, 2], {"budget": 0.0}, "budget: expected .* got 0.0"),
        ([1, 2], {"budget": 1.5}, "budget: expected .* got 1.5"),
        ([1, 2], {"budget": float("nan")}, "budget: expected .* got nan"),
        ([1, 2], {"budget": True}, "budget: expected .* got True"),
        ([], {"budget": 1}, "prompt: expected at least one token id"),
        ("", {"budget": 1}, "prompt: expected some text, got an empty one"),
        ([1, 11], {"budget": 1}, "expected token ids from 0 to 10, got 11"),
        ([1.0, 2], {"budget": 1}, "prompt: expected token ids from 0 to 10, got 1.0"),
        (None, {"budget": 1}, "prompt: expected text or a list of token ids, got NoneType"),
        ([1, 2], {"budget": 1, "unit": "line"}, "unit: expected one of token, word, sentence, got 'line'"),
        ([1, 2], {"budget": 1, "unit": "word"}, "unit: expected token for a model without a tokenizer, got 'word'"),
        ([1, 2], {"budget": 1, "protected": range(0, 3)}, r"expected token indices from 0 to 1, got range\(0, 3\)"),
        ([1, 2], {"budget": 1, "protected": range(0, 2)}, "budget: expected at least 2 tokens, which must stay, got 1"),
        ([1, 2], {"budget": 2, "protected": "a"}, r"expected ranges of token indices \(no tokenizer, no text\)"),
        ([1, 2], {"budget": 2, "protected": 3}, "protected: expected a list"),
        ([1, 2], {"budget": 1, "question": []}, "question: expected at least one token id"),
        ([1, 2], {"budget": 1, "scorer": "x"}, "scorer: expected a TokenScorer or None, got 'x'"),
        ([1, 2], {"budget": 2, "scorer": TableScorer}, "scorer: expected a TokenScorer or None, got <class"),
        ([1, 2], {"budget": 2, "keep_structure": "no"}, "keep_structure: expected True or False, got 'no'"),
    ],
)
def test_refused_in_one_line(prompt: Any, options: dict[str, Any], message: str):
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        jdecode.compress_prompt(IDS, prompt, **{"scorer": TableScorer([1.0] * 11), **options})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("protected", "message"),
    [
        ([(0, 4)], "expected a span within 0 to 3 characters"),
        ([(2, 1)], "expected a span within"),
        ("x", "expected a string that the prompt holds, got 'x'"),
        ([""], "expected strings with characters"),
        ([(0, 1, 2)], "expected a string, a range or a span"),
    ],
)
def test_protection_of_what_is_not_there_is_refused(protected: Any, message: str):
    lm = small_prompts.language_model(small_prompts.byte_tokenizer())
    with pytest.raises((ValueError, TypeError), match=message):
        jdecode.compress_prompt(lm, "abc", budget=1, protected=protected, scorer=SilentScorer())


def test_numbers_that_are_none_are_reported():
    with pytest.raises(FloatingPointError, match="scorer: expected numbers, got NaN"):
        jdecode.compress_prompt(IDS, [1, 2, 3], budget=2, scorer=TableScorer([float("nan")] * 11))
    # what a model holds for impossible is the most surprising of all, not an error
    table = [1.0] * 11
    table[3] = float("inf")
    assert jdecode.compress_prompt(IDS, [1, 2, 3, 4], budget=1, scorer=TableScorer(table)).ids == (3,)
