"""The stream of text: its pieces add up, are never half a character, and hold no stop string."""

import itertools
from collections.abc import Sequence

import hypothesis
import pytest
from hypothesis import strategies as st

from jdecode.text import stream as stream_lib
from jdecode.text import tokenizer as tokenizer_lib
from tests.text import conftest

SETTINGS = hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
TINY = pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])


def _deltas(stream: stream_lib.DetokenizerStream, ids: Sequence[int], cuts: Sequence[int]) -> list[str]:
    edges = [0, *sorted({cut for cut in cuts if cut < len(ids)}), len(ids)]
    deltas = [stream.push(ids[start:end]) for start, end in itertools.pairwise(edges)]
    return [*deltas, stream.finish()]


def _bytes(text: str) -> list[int]:
    # In both tiny vocabularies byte b is id b + 3, so any cut of a text into bytes is a list of ids.
    return [byte + 3 for byte in text.encode("utf-8")]


def _plain(text: str, stops: Sequence[str]) -> str:
    """Cuts a text at the stop string that is complete first, and of those the longest. A plain model."""
    for end in range(1, len(text) + 1):
        done = [stop for stop in stops if text[:end].endswith(stop)]
        if done:
            return text[: end - max(map(len, done))]
    return text


@TINY
@hypothesis.given(data=st.data(), continues_text=st.booleans(), skip=st.booleans())
@SETTINGS
def test_deltas_add_up_to_the_whole(
    name: str, request: pytest.FixtureRequest, data: st.DataObject, continues_text: bool, skip: bool
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=20))
    cuts = data.draw(st.lists(st.integers(0, 20)))
    stream = stream_lib.DetokenizerStream(tokenizer, skip_special_tokens=skip, continues_text=continues_text)
    deltas = _deltas(stream, ids, cuts)
    whole = tokenizer.decode(ids, skip_special_tokens=skip, continues_text=continues_text)
    assert "".join(deltas) == whole == stream.text
    assert not stream.stopped and stream.stop_token_count is None


@TINY
@hypothesis.given(text=st.text(alphabet="a é日🎉👨\u200d👩한\ufffd", max_size=12), step=st.sampled_from([1, 2, 5]))
@SETTINGS
def test_no_delta_ends_inside_a_character(name: str, request: pytest.FixtureRequest, text: str, step: int) -> None:
    # ai-dynamo/dynamo#12630: syllables were lost when 1, 2 or 5 tokens arrived at a time.
    tokenizer = request.getfixturevalue(name)
    stream = stream_lib.DetokenizerStream(tokenizer, continues_text=True)
    ids = _bytes(text)
    deltas = [stream.push(ids[start : start + step]) for start in range(0, len(ids), step)]
    assert "".join([*deltas, stream.finish()]) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in delta for delta in deltas)
    for count in range(len(deltas)):
        assert text.startswith("".join(deltas[:count]))


@TINY
def test_a_character_is_shown_with_its_last_byte(name: str, request: pytest.FixtureRequest) -> None:
    stream = stream_lib.DetokenizerStream(request.getfixturevalue(name))
    assert [stream.push([i]) for i in _bytes("é🎉a")] == ["", "é", "", "", "", "🎉", "a"]
    assert stream.finish() == ""


@TINY
def test_an_unfinished_character_ends_as_a_replacement(name: str, request: pytest.FixtureRequest) -> None:
    stream = stream_lib.DetokenizerStream(request.getfixturevalue(name))
    assert stream.push(_bytes("a🎉")[:-1]) == "a"
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""
    assert stream.text == "a\ufffd"


def test_only_the_very_first_space_is_dropped(sentencepiece: tokenizer_lib.Tokenizer) -> None:
    # huggingface/tokenizers#1666: decoding token by token dropped every space.
    word = sentencepiece.token_id("▁is")
    assert word is not None
    stream = stream_lib.DetokenizerStream(sentencepiece)
    assert [stream.push([i]) for i in (1, word, word)] == ["", "is", " is"]
    stream = stream_lib.DetokenizerStream(sentencepiece, continues_text=True)
    assert [stream.push([i]) for i in (word, word)] == [" is", " is"]


@TINY
@hypothesis.given(
    text=st.text(alphabet="abé🎉", max_size=14),
    stops=st.lists(st.text(alphabet="abé🎉", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 56)),
)
@SETTINGS
def test_stop_strings_over_any_cut(
    name: str, request: pytest.FixtureRequest, text: str, stops: list[str], cuts: list[int]
) -> None:
    stream = stream_lib.DetokenizerStream(request.getfixturevalue(name), stop=stops)
    deltas = _deltas(stream, _bytes(text), cuts)
    expected = _plain(text, stops)
    assert "".join(deltas) == expected == stream.text
    assert stream.stopped == any(stop in text for stop in stops)
    if stream.stopped:
        # One id a byte: what was pushed is the shown text and one stop string.
        rest = {len((expected + stop).encode()) for stop in stops if text.startswith(expected + stop)}
        assert stream.stop_token_count in rest
    for count in range(len(deltas)):
        assert expected.startswith("".join(deltas[:count]))


def test_every_split_of_text_stop_and_tail(byte_level: tokenizer_lib.Tokenizer) -> None:
    # mzau/mlx-knife#68: a stop string over two tokens was missed, and text after it in its last token leaked.
    text = "in the STOP op"
    for size in range(3):
        for cuts in itertools.combinations(range(1, len(text)), size):
            edges = [0, *cuts, len(text)]
            pieces = [text[start:end] for start, end in itertools.pairwise(edges)]
            matcher = stream_lib.StopMatcher(["STOP"])
            assert "".join([*map(matcher.push, pieces), matcher.finish()]) == "in the "
            ids = [byte_level.encode(piece, add_special_tokens=False) for piece in pieces]
            stream = stream_lib.DetokenizerStream(byte_level, stop=["STOP"])
            assert "".join([*map(stream.push, ids), stream.finish()]) == "in the "
            assert stream.stopped


def test_nothing_of_a_stop_string_is_shown(byte_level: tokenizer_lib.Tokenizer) -> None:
    # vllm-project/vllm#3574: pieces DEF, G, HI, J with the stop string DEFGHIJ; its start was streamed.
    stream = stream_lib.DetokenizerStream(byte_level, stop=["DEFGHIJ"])
    assert [stream.push(_bytes(piece)) for piece in ("DEF", "G", "HI", "J")] == ["", "", "", ""]
    assert stream.finish() == "" and stream.stopped and stream.stop_token_count == 7


def test_a_false_start_is_shown_at_once(byte_level: tokenizer_lib.Tokenizer) -> None:
    stream = stream_lib.DetokenizerStream(byte_level, stop=["aab"])
    assert [stream.push(_bytes(char)) for char in "aaaxa"] == ["", "", "a", "aax", ""]
    assert stream.finish() == "a"
    assert not stream.stopped


def test_earliest_end_wins_then_the_longest() -> None:
    for stops, text, expected in (
        (["bcd", "c"], "abcd", "ab"),  # c is complete before bcd
        (["c", "bc"], "abcd", "a"),  # both end at c: the longer
        (["x", "abcd"], "abcdx", ""),
        (["aab"], "aaab", "a"),
        (["abab", "bb"], "aababb", "a"),
    ):
        assert stream_lib.StopMatcher(stops).push(text) == expected == _plain(text, stops)


def test_ids_after_the_stop_are_not_counted(byte_level: tokenizer_lib.Tokenizer) -> None:
    stream = stream_lib.DetokenizerStream(byte_level, stop=["op"])
    # 259 is "op": the stop string completes with the third id, in the middle of a block.
    assert stream.push([261, 4, 259, 261, 261]) == "the\x01"
    assert stream.stop_token_count == 3
    assert stream.push([261]) == "" and stream.finish() == ""
    assert stream.stop_token_count == 3


def test_a_stop_string_inside_one_token(byte_level: tokenizer_lib.Tokenizer) -> None:
    stream = stream_lib.DetokenizerStream(byte_level, stop=["h"])
    assert stream.push([262]) == " t"  # "Ġthe"
    assert stream.stop_token_count == 1


def test_control_tokens_do_not_break_a_stop_string(byte_level: tokenizer_lib.Tokenizer) -> None:
    stream = stream_lib.DetokenizerStream(byte_level, stop=["ab"])
    assert stream.push([ord("x") + 3, ord("a") + 3, 1, ord("b") + 3]) == "x"
    assert stream.stop_token_count == 4


def test_a_control_string_can_stop_where_it_is_shown(byte_level: tokenizer_lib.Tokenizer) -> None:
    stream = stream_lib.DetokenizerStream(byte_level, stop=["<|stop|>"], skip_special_tokens=False)
    assert stream.push([261, 2]) == "the"
    assert stream.stopped


def test_bad_arguments(byte_level: tokenizer_lib.Tokenizer) -> None:
    with pytest.raises(ValueError, match="at least one character, got an empty one"):
        stream_lib.DetokenizerStream(byte_level, stop=["a", ""])
    with pytest.raises(TypeError, match="a list of strings, got one string"):
        stream_lib.DetokenizerStream(byte_level, stop="ab")
    with pytest.raises(TypeError, match="expected strings, got int"):
        stream_lib.DetokenizerStream(byte_level, stop=[3])  # pyright: ignore[reportArgumentType]
    stream = stream_lib.DetokenizerStream(byte_level)
    with pytest.raises(ValueError, match=r"vocabulary of 270\), got 270"):
        stream.push([261, 270])
    assert stream.push([261]) == "the"  # the refused push left nothing behind
    stream.finish()
    with pytest.raises(ValueError, match="after finish"):
        stream.push([261])


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
def test_real_vocabularies_stream_their_goldens(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    for case in conftest.golden(f"{name}.json"):
        for step in (1, 2, 5):
            ids = case["greedy_ids"]
            stream = stream_lib.DetokenizerStream(tokenizer)
            deltas = [stream.push(ids[start : start + step]) for start in range(0, len(ids), step)]
            assert "".join([*deltas, stream.finish()]) == case["greedy_text"]
            assert not any("\ufffd" in delta for delta in deltas)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
@hypothesis.given(data=st.data())
@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
def test_real_vocabularies_stream_any_ids(name: str, request: pytest.FixtureRequest, data: st.DataObject) -> None:
    tokenizer = request.getfixturevalue(name)
    # Half of the ids from where the byte tokens of Gemma 3 and of SmolLM2 lie.
    ids = data.draw(st.lists(st.integers(0, 500) | st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    stream = stream_lib.DetokenizerStream(tokenizer)
    assert "".join(_deltas(stream, ids, data.draw(st.lists(st.integers(0, 24))))) == tokenizer.decode(ids)
