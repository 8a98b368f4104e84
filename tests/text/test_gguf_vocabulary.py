"""GGUF vocabularies, against a plain model of sentencepiece's merging and against goldens."""

import heapq
import random
import time
from collections.abc import Mapping, Sequence
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st

from jdecode.text import gguf_vocabulary
from jdecode.text import tokenizer as tokenizer_lib
from tests.text import conftest

PREFIX = "tokenizer.ggml."


class SentencepieceModel:
    """A plain model of how sentencepiece encodes: no merges, only scores (Kudo and Richardson 2018, BPE variant).

    User-defined tokens are cut out first, the longest at each place. The rest is joined pair by pair: the pair whose
    joined token has the highest score, the leftmost of equals. What is no token in the end becomes bytes.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        tokens = fields[PREFIX + "tokens"]
        types = fields[PREFIX + "token_type"]
        self.adds_space = fields.get(PREFIX + "add_space_prefix", True)
        self.ids = {token: i for i, token in enumerate(tokens)}
        self.scores = {
            token: score
            for token, score, kind in zip(tokens, fields[PREFIX + "scores"], types, strict=True)
            if kind in (1, 4)
        }
        self.cut = {token.replace(" ", "▁"): i for i, token in enumerate(tokens) if types[i] == 4}
        self.longest = max(map(len, self.cut), default=0)

    def encode(self, text: str) -> list[int]:
        text = ("▁" if self.adds_space and text else "") + text.replace(" ", "▁")
        ids: list[int] = []
        start = place = 0
        while place < len(text):
            lengths = range(min(self.longest, len(text) - place), 0, -1)
            length = next((n for n in lengths if text[place : place + n] in self.cut), 0)
            if length:
                ids += [*self._merge(text[start:place]), self.cut[text[place : place + length]]]
                start = place = place + length
            else:
                place += 1
        return ids + self._merge(text[start:])

    def _merge(self, text: str) -> list[int]:
        symbols: list[str] = list(text)
        following = [*range(1, len(symbols)), -1]
        before = list(range(-1, len(symbols) - 1))
        queue: list[tuple[float, int, str, int]] = []

        def offer(left: int, right: int) -> None:
            if left >= 0 and right >= 0 and symbols[left] + symbols[right] in self.scores:
                joined = symbols[left] + symbols[right]
                heapq.heappush(queue, (-self.scores[joined], left, joined, right))

        for left in range(len(symbols) - 1):
            offer(left, left + 1)
        while queue:
            _, left, joined, right = heapq.heappop(queue)
            if not symbols[left] or not symbols[right] or symbols[left] + symbols[right] != joined:
                continue
            symbols[left], symbols[right] = joined, ""
            following[left] = following[right]
            if following[right] >= 0:
                before[following[right]] = left
            offer(before[left], left)
            offer(left, following[left])
        ids: list[int] = []
        for symbol in filter(None, symbols):
            known = symbol in self.scores
            ids += [self.ids[symbol]] if known else [self.ids[f"<0x{byte:02X}>"] for byte in symbol.encode("utf-8")]
        return ids


POOLS = (
    "abcdefghij the of and in her",
    "  \t\n\r ▁",
    "0123456789",
    "日本語のテキスト中文한국어",
    "🎉👨\u200d👩\u200d👧é̂ßüñ",
    "<>/|_'\"$^~`+=!!!...---",
    "\u0000\u0007\ue000\U0010ffff\u00a0\u3000",
    "=a",
)


def _texts(count: int, seed: int) -> list[str]:
    rng = random.Random(seed)
    corpus = "".join(
        case.get("text") or "" for name in ("gemma3", "smollm2") for case in conftest.golden(f"{name}.json")
    )
    texts = []
    for _ in range(count):
        if rng.random() < 0.3:
            start = rng.randrange(len(corpus))
            texts.append(corpus[start : start + rng.randrange(80)])
        else:
            pools = rng.sample(POOLS, rng.choice([1, 2, len(POOLS)]))
            texts.append("".join(rng.choice(rng.choice(pools)) for _ in range(rng.randrange(40))))
    return texts


def test_tiny_sentencepiece_equals_llama_cpp(sentencepiece: tokenizer_lib.Tokenizer) -> None:
    cases = conftest.golden("llama_gqa_encodings.json")
    assert len(cases) == 7
    for case in cases:
        assert sentencepiece.encode(case["text"]) == case["ids_with_bos"]


def test_tiny_sentencepiece_equals_the_model(
    sentencepiece: tokenizer_lib.Tokenizer, sentencepiece_fields: dict[str, Any]
) -> None:
    model = SentencepieceModel(sentencepiece_fields)
    for text in _texts(3000, seed=3):
        assert sentencepiece.encode(text, add_special_tokens=False, parse_special=False) == model.encode(text), text


@pytest.mark.real_model
def test_gemma3_equals_the_model(gemma3: tokenizer_lib.Tokenizer, gemma3_fields: dict[str, Any]) -> None:
    model = SentencepieceModel(gemma3_fields)
    for text in [*_texts(4000, seed=4), "=" * 301, "ab" * 77, " " * 99, "\n" * 65]:
        assert gemma3.encode(text, add_special_tokens=False, parse_special=False) == model.encode(text), text


@pytest.mark.real_model
def test_gemma3_is_built_quickly(gemma3_fields: dict[str, Any]) -> None:
    start = time.process_time()
    tokenizer_lib.from_gguf_fields(gemma3_fields)
    assert time.process_time() - start < 15  # about 3 s on two cores


def _sentencepiece_fields(pieces: Sequence[tuple[str, float, int]], **more: Any) -> dict[str, Any]:
    rows = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    rows += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    rows += pieces
    fields: dict[str, Any] = {
        PREFIX + "model": "llama",
        PREFIX + "tokens": [row[0] for row in rows],
        PREFIX + "scores": [row[1] for row in rows],
        PREFIX + "token_type": [row[2] for row in rows],
        PREFIX + "bos_token_id": 1,
        PREFIX + "eos_token_id": 2,
    }
    return {**fields, **{PREFIX + name: value for name, value in more.items()}}


# Scores in no order of length or id, every split available, letters that overlap.
OVERLAPPING = [
    *((letter, -50.0 - i, 1) for i, letter in enumerate("▁abc")),
    *(("ab", -3.0, 1), ("bc", -2.0, 1), ("abc", -9.0, 1), ("cab", -1.0, 1), ("aa", -7.0, 1), ("aab", -5.0, 1)),
    *(("▁a", -4.0, 1), ("▁▁", -8.0, 1), ("bca", -6.0, 1), ("ca", -10.0, 1), ("abca", -2.5, 1)),
]


@hypothesis.given(text=st.text(alphabet="abc de", max_size=20), adds_space=st.booleans())
@hypothesis.settings(max_examples=400, deadline=None, derandomize=True)
def test_scores_decide_and_not_length_or_order(text: str, adds_space: bool) -> None:
    fields = _sentencepiece_fields(OVERLAPPING, add_space_prefix=adds_space)
    tokenizer = tokenizer_lib.from_gguf_fields(fields)
    assert tokenizer.encode(text, add_special_tokens=False) == SentencepieceModel(fields).encode(text)


def test_highest_score_first_by_hand() -> None:
    # "abc": bc (-2) beats ab (-3), so "a" + "bc"; then abc (-9) joins both. "ab" + "c" would need ab first.
    fields = _sentencepiece_fields([piece for piece in OVERLAPPING if piece[0] != "abc"], add_space_prefix=False)
    tokenizer = tokenizer_lib.from_gguf_fields(fields)
    ids = tokenizer.encode("abc", add_special_tokens=False)
    assert [tokenizer.token_string(i) for i in ids] == ["a", "bc"]


def test_user_defined_tokens_come_first_and_the_longest_wins() -> None:
    # Ids 259 to 265, behind three control tokens and 256 bytes. "b<" would win if "<i>" were not cut out before.
    pieces = [("b<", -1.0, 1), ("<i>", -1000.0, 4), ("  ", -1000.0, 4), ("<i>b", -1000.0, 4)]
    pieces += [("b", -50.0, 1), ("▁a", -4.0, 1), ("<", -60.0, 1), ("a", -61.0, 1), ("▁", -62.0, 1)]
    tokenizer = tokenizer_lib.from_gguf_fields(_sentencepiece_fields(pieces, add_space_prefix=False))
    ids = tokenizer.encode("b<i>bb<i>   a", add_special_tokens=False)
    assert ids == [263, 262, 263, 260, 261, 264]
    assert tokenizer.decode(ids) == "b<i>bb<i>   a"


def test_no_text_joins_into_a_control_byte_or_unused_token() -> None:
    # "<s>" could be joined from "<s" and ">", and "<0x41>" from "<0x4" and "1>", were they merged like others.
    pieces = [(piece, -9.0 - i, 1) for i, piece in enumerate(["<", "s", ">", "<s", "0", "x", "4", "1", "<0", "x4"])]
    pieces += [("<0x4", -30.0, 1), ("1>", -31.0, 1), ("<x", -1.0, 5)]
    tokenizer = tokenizer_lib.from_gguf_fields(_sentencepiece_fields(pieces, add_space_prefix=False))
    ids = tokenizer.encode("<s><0x41><x", add_special_tokens=False, parse_special=False)
    assert [tokenizer.token_string(i) for i in ids] == ["<s", ">", "<0x4", "1>", "<", "x"]
    assert tokenizer.encode("<s>", add_special_tokens=False) == [1]


def test_without_byte_tokens_the_unknown_token_stands_in() -> None:
    fields: dict[str, Any] = {
        PREFIX + "model": "llama",
        PREFIX + "tokens": ["</s>", "a", "<unk>", "▁"],
        PREFIX + "scores": [0.0, -1.0, 0.0, -2.0],
        PREFIX + "token_type": [3, 1, 2, 1],
        PREFIX + "unknown_token_id": 2,
    }
    assert tokenizer_lib.from_gguf_fields(fields).encode("aéa") == [3, 1, 2, 1]


def _byte_level_fields(**more: Any) -> dict[str, Any]:
    backend = conftest.byte_level_backend()
    tokens = [backend.id_to_token(i) or "" for i in range(269)]
    merges = ["o p", "t h", "th e", "Ġ the", "i n", "Ġ a", "s t", "st op", "< |", "| >"]
    fields: dict[str, Any] = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "merges": merges,
        "token_type": [3] * 3 + [1] * 266,
        "bos_token_id": 0,
        "eos_token_id": 2,
    }
    return {PREFIX + name: value for name, value in {**fields, **more}.items() if value is not None}


def test_byte_level_ids_by_hand() -> None:
    # As in test_tokenizer: byte b is id b + 3, and 261 the, 262 Ġthe, 264 Ġa. smollm cuts digits one by one.
    tokenizer = tokenizer_lib.from_gguf_fields(_byte_level_fields())
    assert tokenizer.encode("the the a12") == [261, 262, 264, ord("1") + 3, ord("2") + 3]
    assert tokenizer.encode("<|stop|>") == [2]
    assert 2 not in tokenizer.encode("<|stop|>", parse_special=False)
    assert not tokenizer.adds_bos


@pytest.mark.parametrize(
    ("more", "adds_bos"),
    [({}, False), ({"pre": "llama-bpe"}, True), ({"pre": "llama-bpe", "add_bos_token": False}, False)],
)
def test_bos_where_the_file_does_not_say(more: dict[str, Any], adds_bos: bool) -> None:
    assert tokenizer_lib.from_gguf_fields(_byte_level_fields(**more)).adds_bos == adds_bos


def test_end_tokens_are_united() -> None:
    # vllm-project/vllm#4180: one source of end tokens replaced the others.
    fields = _byte_level_fields(eot_token_id=1, eom_token_id=2)
    assert tokenizer_lib.from_gguf_fields(fields).eos_token_ids == (2, 1)


def test_turn_marks_are_control_tokens_whatever_the_file_says() -> None:
    fields = _byte_level_fields()
    fields[PREFIX + "tokens"] += ["<|im_end|>", "<b>"]
    fields[PREFIX + "token_type"] += [4, 4]
    tokenizer = tokenizer_lib.from_gguf_fields(fields)
    assert tokenizer.is_special(269) and not tokenizer.is_special(270)
    assert 269 not in tokenizer.encode("a<|im_end|>", parse_special=False)
    assert tokenizer.encode("a<b>", parse_special=False) == [ord("a") + 3, 270]


BAD = [
    ({"model": "bert"}, "model: expected gpt2 or llama, got 'bert'"),
    ({"model": None}, "model: expected str, got nothing"),
    ({"model": 3}, "model: expected str, got int"),
    ({"pre": "smolm"}, "pre: expected one of default, .*; the nearest is smollm"),
    ({"tokens": None}, "tokens: expected a list of str, got nothing"),
    ({"tokens": []}, "tokens: expected at least one"),
    ({"tokens": "abc"}, "tokens: expected a list of str, got str"),
    ({"tokens": ["a", 3]}, "tokens: expected a list of str, got one with 3"),
    ({"tokens": ["a", "b", "a"], "token_type": [1] * 3}, "expected distinct tokens, got 'a' twice"),
    ({"merges": None}, "merges: expected a list of str, got nothing"),
    ({"merges": ["t h", "q z"]}, "expected two tokens that make a third, got 'q z'"),
    ({"merges": ["th"]}, "expected two tokens that make a third, got 'th'"),
    ({"token_type": [1, 2]}, "token_type: expected 269, one for each token, got 2"),
    ({"bos_token_id": 269}, "bos_token_id: expected an id from 0 to 268, got 269"),
    ({"eos_token_id": -1}, "eos_token_id: expected an id from 0 to 268, got -1"),
    ({"bos_token_id": None, "add_bos_token": True}, "bos_token_id: expected an id, as add_bos_token is true"),
    ({"add_bos_token": 1}, "add_bos_token: expected bool, got int"),
    ({"add_space_prefix": True}, "add_space_prefix: expected false"),
    ({"add_sep_token": True}, "add_sep_token: expected false"),
    ({"model": "llama"}, "scores: expected a list of float, got nothing"),
    ({"model": "llama", "scores": [0.0]}, "scores: expected 269, one for each token, got 1"),
    ({"model": "llama", "scores": [0.0] * 269}, "expected the 256 byte tokens or an unknown token"),
    ({"model": "llama", "scores": [float("nan")] * 269, "unknown_token_id": 0}, "got NaN"),
]


@pytest.mark.parametrize(("more", "message"), BAD, ids=[str(i) for i in range(len(BAD))])
def test_malformed_fields_are_refused_in_one_line(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer_lib.from_gguf_fields(_byte_level_fields(**more))
    assert "\n" not in str(caught.value)
    assert isinstance(gguf_vocabulary.build(_byte_level_fields()).bos_token_id, int)  # the fields alone are right
