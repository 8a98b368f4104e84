"""A training run put together: model, objective, data, and the facts that make it this run and no other."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jdecode import config as config_lib
from jdecode.models import transformer
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.training import corpus, held_out, objective, token_stream, train_config

# Words for people, and where the files lie: free to change in the middle of a run. Contents count by their digest.
_FREE = (
    *("config.name", "config.description", "config.limits"),
    *("config.corpus.source", "corpus.description", "teacher.name"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Teacher:
    """A model to learn from.

    Attributes:
      name: for the record.
      model, params: of the teacher.
      texts: ids that it wrote, each with its end token; empty for none.
    """

    name: str
    model: transformer.Transformer
    params: Any
    texts: Sequence[np.ndarray] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Task:
    """A run, ready to start: everything but the state.

    Attributes:
      config: of the run.
      tokenizer: of the model.
      objective: to minimise.
      teacher_params: ``None`` without a teacher.
      stream: of the corpus.
      teacher_stream: of the teacher's own text, ``None`` for none.
      judged: the held-out files.
      token_num_bytes: int (V,), how many bytes each token stands for.
      facts: about config, corpus and teacher, as JSON can say them: what must be equal when a run is resumed.
    """

    config: train_config.TrainConfig
    tokenizer: tokenizer_lib.Tokenizer
    objective: objective.NextToken | objective.Distillation
    teacher_params: Any
    stream: token_stream.TokenStream
    teacher_stream: token_stream.TokenStream | None
    judged: tuple[held_out.Piece, ...]
    token_num_bytes: np.ndarray
    facts: dict[str, Any]

    @property
    def model(self) -> transformer.Transformer:
        """The model that learns."""
        return self.objective.model


def make_task(
    config: train_config.TrainConfig,
    files: corpus.Corpus,
    tokenizer: tokenizer_lib.Tokenizer,
    teacher: Teacher | None = None,
    start: str | None = None,
) -> Task:
    """Puts a run together.

    Args:
      config: of the run.
      files: to learn from and to judge by.
      tokenizer: its vocabulary is at most the model's.
      teacher: to distil from; ``None`` learns from the files alone.
      start: names the weights that the run starts from, for the record; ``None`` for fresh ones.

    Raises:
      ValueError: tokenizer or teacher do not fit the model, or there is too little text.
    """
    vocab_size = config.architecture.vocab_size
    check_tokenizer(config, tokenizer)
    end_token_id = tokenizer.eos_token_ids[0]
    model = transformer.Transformer(config.architecture, backend="banded", dtype="float32")
    train, judged = (encode(tokenizer, side, end_token_id) for side in (files.train, files.held_out))
    stream = token_stream.TokenStream(train, config.sequence_len)
    token_num_bytes = np.zeros(vocab_size, np.int64)
    token_num_bytes[: tokenizer.vocab_size] = [len(tokenizer.token_bytes(idx)) for idx in range(tokenizer.vocab_size)]
    facts = {
        "config": dataclasses.asdict(config),
        "corpus": {
            "description": files.description,
            "sha256": files.digest,
            "train_files": len(files.train),
            "train_bytes": sum(document.num_bytes for document in files.train),
            "train_tokens": stream.num_tokens,
            "held_out_files": len(files.held_out),
            "held_out_bytes": sum(document.num_bytes for document in files.held_out),
            "held_out_tokens": sum(len(document) for document in judged),
        },
        "tokenizer": {"sha256": tokenizer.digest},
        "start": {"weights": start},
    }
    learned: objective.NextToken | objective.Distillation = objective.NextToken(model)
    teacher_stream = None
    if teacher is not None:
        distill = config.distill
        teacher_model = dataclasses.replace(teacher.model, backend="banded", dtype="float32")
        learned = objective.Distillation(model, teacher_model, distill.temperature, distill.teacher_share)
        if teacher.texts:
            teacher_stream = token_stream.TokenStream(teacher.texts, config.sequence_len)
        facts["teacher"] = {
            "name": teacher.name,
            "sha256": _digest(teacher.params, teacher.model.config),
            "text_sha256": _digest(list(teacher.texts)),
            "generated_tokens": sum(len(text) for text in teacher.texts),
            "sequences_a_step": num_written(config) if teacher.texts else 0,
        }
    return Task(
        config=config,
        tokenizer=tokenizer,
        objective=learned,
        teacher_params=None if teacher is None else teacher.params,
        stream=stream,
        teacher_stream=teacher_stream,
        judged=tuple(held_out.pieces(judged, config.sequence_len, end_token_id)),
        token_num_bytes=token_num_bytes,
        facts=jsonable(facts),
    )


def _digest(tree: Any, config: config_lib.ModelConfig | None = None) -> str:
    """Returns the SHA-256 of arrays and the model that they are of: a path names a teacher, but these are it."""
    digest = hashlib.sha256(repr(config).encode())
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        digest.update(jax.tree_util.keystr(path).encode())
        digest.update(np.asarray(leaf).tobytes())
    return digest.hexdigest()


def check_tokenizer(config: train_config.TrainConfig, tokenizer: tokenizer_lib.Tokenizer) -> None:
    """Refuses a tokenizer that the model of a run cannot use.

    Raises:
      ValueError: one line.
    """
    vocab_size = config.architecture.vocab_size
    if tokenizer.vocab_size > vocab_size:
        raise ValueError(
            f"tokenizer: expected at most {vocab_size} entries, the model's vocab_size, got {tokenizer.vocab_size}"
        )
    if not tokenizer.eos_token_ids:
        raise ValueError("tokenizer: expected one with an end token (it parts the documents), got one without")


def num_written(config: train_config.TrainConfig) -> int:
    """Returns how many sequences of a step are of the teacher's own text.

    Raises:
      ValueError: the share of the config is more than nothing, and less than half a sequence.
    """
    share, count = config.distill.generated_share, config.sequences_a_step
    written = round(share * count)
    if share and not written:
        raise ValueError(
            f"generated_share: expected at least one sequence a step, got {share:g} of {count}; raise it or the "
            "batch_size, or set it to 0"
        )
    return written


def encode(
    tokenizer: tokenizer_lib.Tokenizer, documents: Sequence[corpus.Document], end_token_id: int
) -> list[np.ndarray]:
    """Returns each document's ids and the end token. Text that looks like a control token is ordinary text."""
    ids = (tokenizer.encode(document.text, add_special_tokens=False, parse_special=False) for document in documents)
    return [np.asarray([*document, end_token_id], np.int32) for document in ids]


def batch(task: Task, key: jax.Array, num_sequences: int) -> np.ndarray:
    """Returns the micro-batches of the step that starts at sequence ``num_sequences``: int32 (A, B, T + 1)."""
    config = task.config
    count = config.sequences_a_step
    step = num_sequences // count
    written = 0 if task.teacher_stream is None else num_written(config)
    rows = []
    if written < count:
        rows.append(task.stream.sequences(key, step * (count - written), count - written))
    if task.teacher_stream is not None and written:
        rows.append(task.teacher_stream.sequences(key, step * written, written))
    return np.concatenate(rows).reshape(config.accumulation_steps, config.batch_size, config.sequence_len + 1)


def difference(facts: Any, others: Any, place: str = "") -> str | None:
    """Says where the facts of two runs differ, ``None`` where they do not: a place such as ``config.optimizer.beta2``.

    Args:
      facts, others: as ``Task.facts`` holds them, or what of a record has the same names.
      place: of both, in the whole.
    """
    if place in _FREE or facts == others:
        return None
    if isinstance(facts, dict) and isinstance(others, dict):
        for name in sorted({*facts, *others}):
            inner = difference(facts.get(name), others.get(name), f"{place}.{name}" if place else name)
            if inner is not None:
                return inner
        return None
    return place


def jsonable(value: Any) -> Any:
    """Returns a value as JSON would give it back: tuples as lists."""
    if isinstance(value, dict):
        return {key: jsonable(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry) for entry in value]
    return value
