"""Text that a teacher writes: prompts out of the corpus, ends, counts, and the same for the same seed."""

from collections.abc import Sequence

import numpy as np
import pytest

from jdecode.training import teacher_text

PROMPT_LEN = teacher_text.PROMPT_LEN
END, NEW = 0, 777
DOCUMENTS = [np.arange(1, 40), np.arange(40, 130)]
TOKENS = np.concatenate(DOCUMENTS)


class Teacher:
    """Writes a fixed row to each prompt, and notes what it was asked."""

    def __init__(self, row: list[int]) -> None:
        self.row = row
        self.calls: list[tuple[list[list[int]], int, Sequence[int]]] = []

    def __call__(self, prompts: list[list[int]], max_new_tokens: int, seeds: Sequence[int], /) -> list[list[int]]:
        self.calls.append((prompts, max_new_tokens, seeds))
        return [self.row for _ in prompts]


def write(teacher: Teacher, num_tokens: int = 1, seed: int = 5, text_len: int = PROMPT_LEN + 4, documents=DOCUMENTS):
    return teacher_text.write(teacher, documents, num_tokens=num_tokens, text_len=text_len, end_token_id=END, seed=seed)


def test_texts_are_prompts_of_the_corpus_and_what_was_written():
    teacher = Teacher([NEW, NEW + 1, NEW + 2])
    texts = write(teacher)
    ((prompts, max_new_tokens, _),) = teacher.calls
    assert max_new_tokens == 4
    assert len(prompts) == len(texts) == teacher_text.BATCH_SIZE
    for prompt, text in zip(prompts, texts, strict=True):
        start = prompt[0] - 1  # of these documents
        assert prompt == TOKENS[start : start + PROMPT_LEN].tolist()
        assert text.dtype == np.int32
        assert text.tolist() == [*prompt, NEW, NEW + 1, NEW + 2, END]
    assert len({prompt[0] for prompt in prompts}) > 15


def test_every_place_may_be_a_prompt():
    """Prompts cross the ends of documents, and both ends of the corpus are reached."""
    tokens = np.arange(1, PROMPT_LEN + 4)  # four places
    teacher = Teacher([NEW])
    write(teacher, documents=[tokens[:5], tokens[5:]])
    assert {prompt[0] for prompt in teacher.calls[0][0]} == {1, 2, 3, 4}


def test_a_text_that_ended_gets_no_second_end():
    for row in ([NEW, END], [NEW, NEW]):
        assert all(
            text.tolist()[PROMPT_LEN:] == [NEW, *row[1:], *([] if row[-1] == END else [END])]
            for text in write(Teacher(row))
        )


def test_enough_is_written_and_prompts_are_not_counted():
    # 32 texts of 3 new tokens are 96: 193 need three batches, 192 two.
    for num_tokens, batches in ((192, 2), (193, 3)):
        teacher = Teacher([NEW] * 3)
        assert len(write(teacher, num_tokens)) == batches * teacher_text.BATCH_SIZE
        assert len(teacher.calls) == batches
        # Neither prompts nor draws are those of another row or batch.
        assert len({seed for _, _, seeds in teacher.calls for seed in seeds}) == batches * teacher_text.BATCH_SIZE
        assert teacher.calls[0][0] != teacher.calls[1][0]


def test_the_seed_decides():
    first, again, other = (Teacher([NEW]) for _ in range(3))
    write(first, 40)
    write(again, 40)
    write(other, 40, seed=6)
    assert first.calls == again.calls
    assert first.calls[0][0] != other.calls[0][0]


def test_what_cannot_be_is_refused():
    with pytest.raises(
        ValueError, match=f"^sequence_len: expected over {PROMPT_LEN} tokens for a teacher's text, got 48$"
    ):
        write(Teacher([NEW]), text_len=PROMPT_LEN)
    with pytest.raises(
        ValueError, match=f"^corpus: expected at least {PROMPT_LEN} tokens to take prompts from, got 47$"
    ):
        write(Teacher([NEW]), documents=[np.arange(47)])
    with pytest.raises(
        ValueError, match=r"^teacher: expected new tokens, got none for any prompt; is it a trained model\?$"
    ):
        write(Teacher([]))


def test_saved_and_loaded(tmp_path):
    texts = [np.asarray(row, np.int32) for row in ([5, 6, END], [7, END], [8, 9, 10, END])]
    teacher_text.save(tmp_path / "t.npz", texts)
    assert [path.name for path in tmp_path.iterdir()] == ["t.npz"]
    assert [text.tolist() for text in teacher_text.load(tmp_path / "t.npz")] == [text.tolist() for text in texts]


@pytest.mark.parametrize("num_bytes", [0, 100, -1])
def test_a_damaged_file_is_one_line(tmp_path, num_bytes):
    path = tmp_path / "t.npz"
    teacher_text.save(path, [np.arange(40, dtype=np.int32)])
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(ValueError) as refused:
        teacher_text.load(path)
    message = str(refused.value)
    assert message.startswith(f"{path}: expected the teacher's text, got: ") and "\n" not in message
    assert message.endswith("; remove it, and the teacher writes it again")


@pytest.mark.parametrize("damage", [{10: 99}, {10: 8}, {8: 1}])
def test_a_damaged_table_is_one_line(tmp_path, damage):
    """By its bytes the text is compressed, by no known method or by one that it is not, or encrypted."""
    path = tmp_path / "t.npz"
    teacher_text.save(path, [np.arange(40, dtype=np.int32)])
    content = bytearray(path.read_bytes())
    for offset, value in damage.items():
        content[content.index(b"PK\x01\x02") + offset] = value
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"t\.npz: expected the teacher's text, got: .*; remove it, and the teacher "):
        teacher_text.load(path)


def test_another_kind_of_file_is_one_line(tmp_path):
    path = tmp_path / "t.npz"
    with path.open("wb") as file:
        np.save(file, np.arange(40))
    with pytest.raises(ValueError, match=r"t\.npz: expected the teacher's text, got: "):
        teacher_text.load(path)
