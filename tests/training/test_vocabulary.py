"""A vocabulary of one's own: deterministic, and able to write whatever text there is."""

import os
import subprocess
import sys

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies

from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus, vocabulary
from jdecode.training import task as task_lib
from tests.training import tiny_run


def test_end_of_text_and_every_byte():
    tokenizer = vocabulary.train_tokenizer(["no merges at all"], vocabulary.LEAST_SIZE)
    assert vocabulary.LEAST_SIZE == tokenizer.vocab_size == 257
    assert tokenizer.token_id(vocabulary.END_OF_TEXT) == 0
    assert tokenizer.eos_token_ids == (0,) and tokenizer.is_special(0)
    assert tokenizer.bos_token_id is None
    # Each of the other tokens is another byte, so all 256 are there.
    assert sorted(tokenizer.token_bytes(idx) for idx in range(1, 257)) == [bytes([byte]) for byte in range(256)]


@hypothesis.settings(deadline=None, max_examples=150)
@hypothesis.given(text=strategies.text())
@hypothesis.example(text=" \r\n\t  né 日本 \U0001f600 \x00 ")
@hypothesis.example(text="<|endoftext|>")
@hypothesis.example(text="fox<|endoftext|> <|endoftext")
def test_any_text_comes_back(text):
    tokenizer = tiny_run.tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert all(0 < idx < tokenizer.vocab_size for idx in ids)  # no text holds the end of the text
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert b"".join(tokenizer.token_bytes(idx) for idx in ids) == text.encode()


def test_merges_shorten_the_text_that_they_were_learned_from():
    # Pairs by hand, each run of the text with the space before it: "ab" is in all six, then " ab" in the five with one.
    tokenizer = vocabulary.train_tokenizer(["ab ab ab ab ab ab"], vocabulary.LEAST_SIZE + 2)
    assert [tokenizer.token_bytes(idx) for idx in (257, 258)] == [b"ab", b" ab"]
    assert tokenizer.encode("ab ab", add_special_tokens=False) == [257, 258]
    # Each occurs alone then, and nothing is left to merge: fewer entries than asked for.
    assert vocabulary.train_tokenizer(["ab ab ab ab ab ab"], 300).vocab_size == vocabulary.LEAST_SIZE + 2


def test_two_processes_learn_the_same(tmp_path):
    script = "import sys; from tests.training import tiny_run; tiny_run.tokenizer().save(sys.argv[1])"
    for seed, threads in (("1", "1"), ("77", "3")):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "RAYON_NUM_THREADS": threads, "PYTHONPATH": os.getcwd()}
        subprocess.run([sys.executable, "-c", script, str(tmp_path / seed)], env=environment, check=True)
    tiny_run.tokenizer().save(tmp_path / "here")
    first, second, here = (tmp_path / name / "tokenizer.json" for name in ("1", "77", "here"))
    assert first.read_bytes() == second.read_bytes() == here.read_bytes()


def test_saved_and_read_again(tmp_path):
    tokenizer = tiny_run.tokenizer()
    tokenizer.save(tmp_path)
    again = tokenizer_lib.from_folder(tmp_path)
    text = tiny_run.text(77, 30)
    assert again.encode(text) == tokenizer.encode(text)
    assert (again.vocab_size, again.eos_token_ids) == (tokenizer.vocab_size, (0,))


def test_a_prompt_starts_a_line(tmp_path):
    """Before a prompt stands the byte 10; a text to learn from is left as it is."""
    tokenizer = tiny_run.tokenizer()
    tokenizer.save(tmp_path)
    for own in (tokenizer, tokenizer_lib.from_folder(tmp_path)):
        first, *rest = own.encode("fox")
        assert own.token_bytes(first) == b"\n" and not own.is_special(first)
        assert rest == own.encode("fox", add_special_tokens=False)


def test_a_document_s_text_is_no_control_token():
    """The end token stands after each document, and a document that spells it has no second one."""
    tokenizer = tiny_run.tokenizer()
    documents = [corpus.Document("a", f"fox{vocabulary.END_OF_TEXT}dog"), corpus.Document("b", "tree")]
    spelled, plain = task_lib.encode(tokenizer, documents, 0)
    assert spelled.dtype == plain.dtype == np.int32
    assert spelled.tolist().count(0) == 1 and spelled[-1] == 0
    assert tokenizer.decode(spelled[:-1].tolist()) == "fox<|endoftext|>dog"
    assert plain.tolist() == [*tokenizer.encode("tree", add_special_tokens=False), 0]


def test_too_few_entries_are_refused():
    with pytest.raises(ValueError, match=r"^vocab_size: expected at least 257 \(every byte and an end\), got 256$"):
        vocabulary.train_tokenizer(["text"], 256)
