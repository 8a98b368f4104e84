"""Tokenizers from folders and from GGUF fields: ids, text, control tokens, and what is refused."""

import json
import pathlib
from typing import Any

import hypothesis
import pytest
import tokenizers
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from jdecode.text import tokenizer as tokenizer_lib
from tests.text import conftest

SETTINGS = hypothesis.settings(max_examples=150, deadline=None, derandomize=True)
TEXTS = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=24)


def test_byte_level_ids_by_hand(byte_level: tokenizer_lib.Tokenizer) -> None:
    # Byte b is id b + 3. Words are "the", " a": "t h" then "th e" joins three, "Ġ a" two. Merges are listed in
    # conftest: 259 op, 260 th, 261 the, 262 Ġthe, 263 in, 264 Ġa, 265 st, 266 stop.
    assert byte_level.encode("the a", add_special_tokens=False) == [261, 264]
    assert byte_level.encode("stop!") == [0, 266, ord("!") + 3]
    # é is the bytes C3 A9.
    assert byte_level.encode("é", add_special_tokens=False) == [0xC3 + 3, 0xA9 + 3]
    assert byte_level.decode([0, 261, 264, 0xC3 + 3, 0xA9 + 3]) == "the aé"


def test_attributes(byte_level: tokenizer_lib.Tokenizer) -> None:
    assert byte_level.vocab_size == 3 + 256 + 10 + 1
    assert byte_level.bos_token_id == 0
    assert byte_level.eos_token_ids == (2,)
    assert byte_level.adds_bos
    assert byte_level.chat_template == conftest.CHAT_TEMPLATE
    assert byte_level.token_string(262) == "Ġthe"
    assert byte_level.token_id("Ġthe") == 262
    assert [byte_level.is_special(i) for i in (1, 261)] == [True, False]
    assert not byte_level.is_special(269)  # <think>: added, but text


def test_first_difference() -> None:
    def with_tokens(*more: str) -> tokenizer_lib.Tokenizer:
        backend = conftest.byte_level_backend()  # ids 0 to 269
        backend.add_tokens(list(more))
        return tokenizer_lib.Tokenizer(backend)

    assert with_tokens().first_difference(with_tokens()) is None
    assert with_tokens("<a>", "<b>").first_difference(with_tokens("<a>", "<c>")) == 271
    assert with_tokens("<a>").first_difference(with_tokens()) == 270  # one has more
    assert with_tokens().first_difference(with_tokens("<a>")) == 270


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@hypothesis.given(text=TEXTS)
@SETTINGS
def test_decode_inverts_encode(name: str, request: pytest.FixtureRequest, text: str) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    # A literal ▁ is a space to a sentencepiece vocabulary, and cannot come back.
    expected = text.replace("▁", " ") if name == "sentencepiece" else text
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
@hypothesis.given(text=TEXTS)
@SETTINGS
def test_decode_agrees_with_the_library_on_well_formed_text(
    name: str, request: pytest.FixtureRequest, text: str
) -> None:
    tokenizer = request.getfixturevalue(name)
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == tokenizer._backend.decode(ids, skip_special_tokens=True)


@hypothesis.given(content=st.binary(max_size=12))
@SETTINGS
def test_any_bytes_decode_as_utf8_with_replacement(
    byte_level: tokenizer_lib.Tokenizer, sentencepiece: tokenizer_lib.Tokenizer, content: bytes
) -> None:
    expected = content.decode("utf-8", errors="replace")
    assert byte_level.decode([byte + 3 for byte in content]) == expected
    assert byte_level._backend.decode([byte + 3 for byte in content]) == expected
    assert sentencepiece.decode([byte + 3 for byte in content], continues_text=True) == expected


def test_a_stray_byte_spares_its_neighbours(sentencepiece: tokenizer_lib.Tokenizer) -> None:
    # E3 81 82 is あ; E3 alone is no character. The library turns all four bytes into U+FFFD.
    ids = [0xE3 + 3, 0x81 + 3, 0x82 + 3, 0xE3 + 3]
    assert sentencepiece.decode(ids) == "あ\ufffd"


def test_only_the_very_first_space_is_dropped(sentencepiece: tokenizer_lib.Tokenizer) -> None:
    # huggingface/tokenizers#1666: decoded token by token, all spaces vanished.
    space = sentencepiece.token_id("▁")
    word = sentencepiece.token_id("▁is")
    assert space is not None and word is not None
    assert sentencepiece.decode([word, word]) == "is is"
    assert sentencepiece.decode([space, word]) == " is"
    assert sentencepiece.decode([1, word]) == "is"
    assert sentencepiece.decode([word, word], continues_text=True) == " is is"


def test_no_clean_up_of_spaces(byte_level: tokenizer_lib.Tokenizer) -> None:
    text = "a , b . c 's ! do n't"
    assert byte_level.decode(byte_level.encode(text)) == text


def test_one_bos_on_raw_text_and_a_typed_one_is_kept(
    byte_level: tokenizer_lib.Tokenizer, sentencepiece: tokenizer_lib.Tokenizer
) -> None:
    assert byte_level.encode("") == [0]
    assert byte_level.encode("the") == [0, 261]
    assert byte_level.encode("<|start|>the") == [0, 0, 261]
    assert sentencepiece.encode("<s> is").count(1) == 2


def test_control_strings_as_text(byte_level: tokenizer_lib.Tokenizer, sentencepiece: tokenizer_lib.Tokenizer) -> None:
    text = "x<|stop|> y"
    assert byte_level.encode(text).count(2) == 1
    literal = byte_level.encode(text, parse_special=False)
    assert literal.count(2) == 0
    assert byte_level.decode(literal) == text
    assert byte_level.decode(literal, skip_special_tokens=False) == "<|start|>" + text
    literal = sentencepiece.encode("a</s>b", parse_special=False, add_special_tokens=False)
    assert not sentencepiece.special_ids & set(literal)
    assert sentencepiece.decode(literal) == "a</s>b"


def test_literal_pieces_join_as_the_whole(byte_level: tokenizer_lib.Tokenizer) -> None:
    assert byte_level.encode_literal("the a", starts_text=False) == [261, 264]
    assert byte_level.special_spans("a<|stop|>b<|turn|>") == [(1, 9, 2), (10, 18, 1)]


@pytest.mark.parametrize("call", ["decode", "token_string", "is_special"])
@pytest.mark.parametrize("token_id", [-1, 270, 10**12])
def test_ids_outside_the_vocabulary_are_refused(byte_level: tokenizer_lib.Tokenizer, call: str, token_id: int) -> None:
    with pytest.raises(ValueError, match=rf"expected 0 to 269 .*got {token_id}$"):
        getattr(byte_level, call)([token_id] if call == "decode" else token_id)


def test_text_that_is_none_is_refused(byte_level: tokenizer_lib.Tokenizer) -> None:
    with pytest.raises(TypeError, match="expected a string, got bytes"):
        byte_level.encode(b"the")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"lone surrogate U\+D800 at character 1"):
        byte_level.encode("a\ud800")


def test_limits_of_training_do_not_cut_text(tmp_path: pathlib.Path) -> None:
    backend = conftest.byte_level_backend()
    backend.enable_truncation(max_length=3)
    backend.enable_padding(length=7)
    tokenizer = tokenizer_lib.from_folder(conftest.write_folder(tmp_path, backend))
    assert tokenizer.encode("xyzxy") == [ord(char) + 3 for char in "xyzxy"]
    assert tokenizer.bos_token_id is None and not tokenizer.adds_bos


@pytest.mark.parametrize(
    ("switch", "expected"), [(None, [0, 261]), (True, [0, 261]), (False, [261])], ids=["unsaid", "on", "off"]
)
def test_configuration_overrides_the_post_processor(
    tmp_path: pathlib.Path, switch: bool | None, expected: list[int]
) -> None:
    backend = conftest.byte_level_backend()
    backend.post_processor = processors.TemplateProcessing(single="<|start|> $A", special_tokens=[("<|start|>", 0)])
    config = {"bos_token": "<|start|>"} if switch is None else {"bos_token": "<|start|>", "add_bos_token": switch}
    tokenizer = tokenizer_lib.from_folder(conftest.write_folder(tmp_path, backend, **config))
    assert tokenizer.encode("the") == expected
    assert tokenizer.adds_bos == (0 in expected)


def test_end_token_is_added_where_the_files_say_so(tmp_path: pathlib.Path) -> None:
    folder = conftest.write_folder(
        tmp_path, conftest.byte_level_backend(), eos_token="<|stop|>", add_eos_token=True, bos_token=None
    )
    assert tokenizer_lib.from_folder(folder).encode("the") == [261, 2]


def test_chat_template_sources(tmp_path: pathlib.Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    folder = conftest.write_folder(tmp_path, conftest.byte_level_backend(), chat_template=named)
    assert tokenizer_lib.from_folder(folder).chat_template == "D"
    (folder / "chat_template.jinja").write_text("J\n", encoding="utf-8")
    assert tokenizer_lib.from_folder(folder).chat_template == "J\n"


def test_the_mark_that_a_template_ends_turns_with_is_an_end_token(tmp_path: pathlib.Path) -> None:
    # vllm-project/vllm#4180: an instruct model whose files name only the base model's end token never stopped.
    backend = conftest.byte_level_backend()
    backend.add_special_tokens(["<|im_end|>", "<|eot_id|>"])
    folder = conftest.write_folder(tmp_path, backend, eos_token="<|stop|>", chat_template="x<|im_end|>")
    assert tokenizer_lib.from_folder(folder).eos_token_ids == (2, 270)


def test_an_added_token_stands_for_itself(tmp_path: pathlib.Path) -> None:
    # "é" is the alias of the byte E9 in a byte-level vocabulary, but an added token is no alias.
    backend = conftest.byte_level_backend()
    backend.add_tokens([tokenizers.AddedToken("éé", normalized=False)])
    tokenizer = tokenizer_lib.from_folder(conftest.write_folder(tmp_path, backend))
    assert tokenizer.encode("aéé") == [ord("a") + 3, 270]
    assert tokenizer.decode([ord("a") + 3, 270]) == "aéé"


@pytest.mark.parametrize("name", ["byte_level", "sentencepiece"])
def test_saved_and_read_again(name: str, request: pytest.FixtureRequest, tmp_path: pathlib.Path) -> None:
    tokenizer = request.getfixturevalue(name)
    tokenizer.save(tmp_path / "folder")
    again = tokenizer_lib.from_folder(tmp_path / "folder")
    for attribute in ("vocab_size", "bos_token_id", "eos_token_ids", "chat_template", "adds_bos", "special_ids"):
        assert getattr(again, attribute) == getattr(tokenizer, attribute), attribute
    for text in ("", " is the é\n日", "<|stop|></s>a"):
        ids = tokenizer.encode(text)
        assert again.encode(text) == ids
        assert again.encode(text, parse_special=False) == tokenizer.encode(text, parse_special=False)
        assert again.decode(ids) == tokenizer.decode(ids)


def test_special_tokens_map_is_read(tmp_path: pathlib.Path) -> None:
    folder = conftest.write_folder(tmp_path, conftest.byte_level_backend())
    (folder / "special_tokens_map.json").write_text(json.dumps({"bos_token": {"content": "<|turn|>"}}))
    assert tokenizer_lib.from_folder(folder).bos_token_id == 1


def _unsupported_decoder() -> tokenizers.Tokenizer:
    backend = conftest.byte_level_backend()
    backend.decoder = decoders.WordPiece()
    return backend


@pytest.mark.parametrize(
    ("backend", "config", "message"),
    [
        (conftest.byte_level_backend, {"bos_token": "<nowhere>"}, "'<nowhere>'"),
        (conftest.byte_level_backend, {"add_bos_token": True}, "add_bos_token is true, got none"),
        (conftest.byte_level_backend, {"chat_template": [{"name": "rag", "template": "R"}]}, "named default, got rag"),
        (conftest.byte_level_backend, {"chat_template": 7}, "chat_template as text, got int"),
        (_unsupported_decoder, {}, "got WordPiece"),
    ],
)
def test_folders_that_cannot_be_read(tmp_path: pathlib.Path, backend: Any, config: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        tokenizer_lib.from_folder(conftest.write_folder(tmp_path, backend(), **config))
    assert "\n" not in str(caught.value)


def test_missing_and_malformed_files(tmp_path: pathlib.Path) -> None:
    with pytest.raises(ValueError, match=r"expected the file tokenizer\.json, got none; copy it"):
        tokenizer_lib.from_folder(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ValueError, match=r"found tokenizer\.model, which is not read: convert it"):
        tokenizer_lib.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model":\n 3}')
    with pytest.raises(ValueError, match="expected a Hugging Face tokenizer") as caught:
        tokenizer_lib.from_folder(tmp_path)
    assert "\n" not in str(caught.value)
    conftest.byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object, got list"):
        tokenizer_lib.from_folder(tmp_path)


def test_a_space_before_the_first_piece_only(tmp_path: pathlib.Path) -> None:
    # Metaspace with the scheme "first": what is encoded in pieces must not get a space before each piece.
    vocabulary = {token: i for i, token in enumerate(["<s>", "▁", "a", "b", "▁a", "▁b"])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[("▁", "a"), ("▁", "b")]))
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.add_special_tokens(["<s>"])
    tokenizer = tokenizer_lib.from_folder(conftest.write_folder(tmp_path, backend))
    assert tokenizer.encode("a<s>b") == [4, 0, 3]
    assert tokenizer.encode_literal("b", starts_text=False) == [3]
    assert tokenizer.encode_literal("b", starts_text=True) == [5]
    with pytest.raises(ValueError, match="expected no reserved string"):
        tokenizer.encode_literal("b\ufdd1jdecode\ufdd1", starts_text=False)


@pytest.mark.real_model
@pytest.mark.parametrize("name", ["gemma3", "smollm2"])
def test_real_vocabularies_give_the_golden_ids_and_text(name: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(name)
    cases = conftest.golden(f"{name}.json")
    assert len(cases) >= 9
    for case in cases:
        if case["kind"] == "raw":
            assert tokenizer.encode(case["text"]) == case["input_ids"], case["name"]
        else:
            assert tokenizer.encode(case["rendered"], add_special_tokens=False) == case["input_ids"], case["name"]
        assert tokenizer.decode(case["greedy_ids"]) == case["greedy_text"], case["name"]


@pytest.mark.real_model
def test_real_attributes(gemma3: tokenizer_lib.Tokenizer, smollm2: tokenizer_lib.Tokenizer) -> None:
    assert (gemma3.vocab_size, gemma3.bos_token_id, gemma3.eos_token_ids, gemma3.adds_bos) == (262144, 2, (1,), True)
    assert (smollm2.vocab_size, smollm2.bos_token_id, smollm2.eos_token_ids, smollm2.adds_bos) == (
        49152,
        1,
        (2,),
        False,
    )
