"""Where tokens stand in their text, with split characters, stray bytes, control tokens and spaces that are dropped."""

from jdecode.prompt_compression import token_text
from tests import tiny_model
from tests.prompt_compression import small_prompts


def test_tokens_that_share_a_character_have_the_whole_of_it():
    tokenizer = small_prompts.byte_tokenizer(["Ġ a"])
    placed = token_text.token_text(tokenizer.encode("x aé😀b"), tokenizer)
    assert placed.text == "x aé😀b"
    assert placed.spans == ((0, 1), (1, 3), (3, 4), (3, 4), (4, 5), (4, 5), (4, 5), (4, 5), (5, 6))
    assert placed.tokens_in(3, 4) == range(2, 4)
    assert placed.tokens_in(2, 5) == range(1, 8)
    assert len(placed.tokens_in(3, 3)) == 0


def test_stray_bytes_and_control_tokens():
    tokenizer = small_prompts.byte_tokenizer(adds_start=True)
    byte = {value: value + 3 for value in range(256)}
    ids = [small_prompts.START, byte[0xC3], byte[0x28], small_prompts.TURN, byte[0xF0], byte[0x9F]]
    placed = token_text.token_text(ids, tokenizer)
    assert placed.text == "\ufffd(<|turn|>\ufffd\ufffd"
    assert placed.spans == ((0, 0), (0, 1), (1, 2), (2, 10), (10, 11), (11, 12))
    assert (placed.fixed, placed.num_start) == ({0, 3}, 1)


def test_the_first_space_of_a_sentencepiece_text_is_nowhere():
    lm = tiny_model.load_text()
    assert lm.tokenizer is not None and lm.tokenizer.strips_first_space
    for text in ("the end", " a", "é."):
        placed = token_text.token_text(lm.encode(text), lm.tokenizer)
        assert placed.text == text and 0 in placed.fixed
        assert placed.spans[0] == (0, 0) and placed.spans[-1][1] == len(text)
