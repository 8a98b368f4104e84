"""Words that each pre-tokenizer cuts, worked out by hand from its expression."""

import pytest
from tokenizers import Tokenizer, models

from jdecode.text import pre_tokenization

TEXT = "It's 12345 x!!\n\n  DON'T\u00b2 héLLo"

WORDS = {
    # 's is lower case only; digits go with the space before them; a space before the last of several stays with it.
    "gpt-2": ["It", "'s", " 12345", " x", "!!", "\n\n ", " DON", "'", "T", "²", " héLLo"],
    # each digit alone, so that the space before the first is alone too; ² is a number to Unicode
    "smollm": ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "!!", "\n\n ", " DON", "'", "T", "²", " héLLo"],
    # 'T in upper case too; up to three digits; signs take line ends with them
    "llama-bpe": ["It", "'s", " ", "123", "45", " x", "!!\n\n", " ", " DON", "'T", "²", " héLLo"],
    "qwen2": ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "!!\n\n", " ", " DON", "'T", "²", " héLLo"],
    # a change from lower to upper case cuts; ' takes the letters behind it
    "tekken": ["It", "'s", " ", "1", "2", "3", "4", "5", " x", "!!\n\n", " ", " DON", "'T", "²", " hé", "LLo"],
    # suffixes stay with their word
    "gpt-4o": ["It's", " ", "123", "45", " x", "!!\n\n", " ", " DON'T", "²", " hé", "LLo"],
    # signs are cut off first, then numbers, then blocks of three digits from the left
    "default": ["It", "'", "s", " ", "123", "45", " x", "!!", "\n\n ", " DON", "'", "T", "²", " héLLo"],
}


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str) -> None:
    _, pre_tokenizer = pre_tokenization.find(name)
    words = [TEXT[start:end] for _, (start, end) in pre_tokenizer.pre_tokenize_str(TEXT)]
    assert words == WORDS[name]


def test_every_name_keeps_every_character() -> None:
    for name in pre_tokenization._KNOWN:
        _, pre_tokenizer = pre_tokenization.find(name)
        spans = [span for _, span in pre_tokenizer.pre_tokenize_str(TEXT)]
        assert "".join(TEXT[start:end] for start, end in spans) == TEXT, name


def test_whole_words_need_no_merges() -> None:
    vocabulary = {"a": 0, "b": 1, "ab": 2}
    for name, expected in (("llama-bpe", [2]), ("qwen2", [0, 1])):
        model = models.BPE(vocab=vocabulary, merges=[], ignore_merges=pre_tokenization.keeps_whole_words(name))
        backend = Tokenizer(model)
        backend.pre_tokenizer = pre_tokenization.find(name)[1]
        assert backend.encode("ab").ids == expected


def test_unicode_form_is_normalized_where_the_model_was_trained_so() -> None:
    normalizer, _ = pre_tokenization.find("qwen2")
    assert normalizer is not None and normalizer.normalize_str("e\u0301") == "é"
    assert pre_tokenization.find("llama-bpe")[0] is None
