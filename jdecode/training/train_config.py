"""What a training run is made of, as frozen configs. They hold no arrays and import no jax."""

import dataclasses
import math
from typing import Any

from jdecode import config

STANDARD_LIBRARY = "standard_library"
"""The corpus that every machine has: the source of the running Python's own standard library."""


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_count(name: str, value: Any, least: int) -> None:
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    _check(is_count, f"{name}: expected a count of at least {least}, got {value!r}")


def _check_share(name: str, value: float, *, low: float = 0.0, high: float = 1.0) -> None:
    _check(
        math.isfinite(value) and low <= value <= high,
        f"{name}: expected a number from {low:g} to {high:g}, got {value!r}",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusConfig:
    """Says which files a model learns from.

    Attributes:
      source: ``"standard_library"``, or the path of a folder of text files.
      suffixes: of the files to read.
      held_out_share: of the files, chosen by a hash of their names, which are never trained on.
    """

    source: str = STANDARD_LIBRARY
    suffixes: tuple[str, ...] = (".py",)
    held_out_share: float = 0.05

    def __post_init__(self) -> None:
        _check(bool(self.source), "corpus source: expected standard_library or a folder, got an empty text")
        _check(bool(self.suffixes), "corpus suffixes: expected at least one, got none")
        for suffix in self.suffixes:
            _check(suffix.startswith("."), f"corpus suffixes: expected suffixes such as .txt, got {suffix!r}")
        _check(
            0 < self.held_out_share < 1,
            f"held_out_share: expected a number over 0 and under 1, got {self.held_out_share!r}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter 2019) with clipping, a linear warm-up and a cosine decay.

    Attributes:
      learning_rate: the peak, reached at the end of the warm-up.
      final_share: of the peak, to which the cosine falls by the end.
      warmup_steps: from 0 to the peak.
      weight_decay: of matrices; norm scales and biases have none.
      beta1, beta2, epsilon: of Adam's moments.
      clip_norm: the greatest norm of a whole gradient; ``None`` does not clip.
    """

    learning_rate: float = 3e-3
    final_share: float = 0.05
    warmup_steps: int = 100
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        positive = math.isfinite(self.learning_rate) and self.learning_rate > 0
        _check(positive, f"learning_rate: expected a number over 0, got {self.learning_rate!r}")
        _check(self.epsilon > 0, f"epsilon: expected a number over 0, got {self.epsilon!r}")
        _check_count("warmup_steps", self.warmup_steps, 0)
        _check_share("final_share", self.final_share)
        _check_share("weight_decay", self.weight_decay, high=10.0)
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            _check(0 <= value < 1, f"{name}: expected a number from 0 to under 1, got {value!r}")
        _check(
            self.clip_norm is None or self.clip_norm > 0,
            f"clip_norm: expected a number over 0 or null, got {self.clip_norm!r}",
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """How a student learns from a teacher, when there is one (Hinton et al. 2015).

    Attributes:
      temperature: divides both models' logits before they are compared.
      teacher_share: weight of the divergence from the teacher; the rest weighs the next-token loss on the text.
      generated_tokens: how many tokens the teacher writes for the student to learn from, beside the corpus
        (Kim and Rush 2016: what a draft has to predict is the teacher's own text). 0 for none.
      generated_temperature: at which it draws them.
      generated_share: of the sequences of a batch, which come from the teacher's text; 0 without one.
    """

    temperature: float = 1.0
    teacher_share: float = 1.0
    generated_tokens: int = 0
    generated_temperature: float = 1.0
    generated_share: float = 0.5

    def __post_init__(self) -> None:
        finite = math.isfinite(self.temperature) and self.temperature > 0
        _check(finite, f"distill temperature: expected a number over 0, got {self.temperature!r}")
        drawn = math.isfinite(self.generated_temperature) and self.generated_temperature >= 0
        _check(drawn, f"generated_temperature: expected a number of at least 0, got {self.generated_temperature!r}")
        _check_share("teacher_share", self.teacher_share)
        _check_share("generated_share", self.generated_share)
        _check_count("generated_tokens", self.generated_tokens, 0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Describes a training run. The YAML files of ``configs/training/`` are these.

    Attributes:
      name: of the run; a file that gives none is named after itself.
      description: a sentence for people.
      limits: what the model cannot do, for its card.
      architecture: of the model. Its ``vocab_size`` is also that of a tokenizer that is trained.
      tokenizer: where to take the tokenizer from (a source that ``jdecode.load`` reads); ``None`` trains one.
      corpus, optimizer, distill: see their classes. ``distill`` only acts when a teacher is given.
      sequence_len: T, tokens a sequence.
      batch_size: B, sequences a micro-batch.
      accumulation_steps: micro-batches whose gradients are averaged for one step of the optimiser.
      num_steps: of the optimiser.
      seed: of the first weights and of the order of the data.
      evaluate_every: steps between two looks at the held-out files (a part of them; the end looks at all).
      checkpoint_every: steps between two checkpoints.
      weight_dtype: of the model that is written in the end.
    """

    name: str = ""
    description: str = ""
    limits: str = ""
    architecture: config.ModelConfig
    tokenizer: str | None = None
    corpus: CorpusConfig = CorpusConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    distill: DistillConfig = DistillConfig()
    sequence_len: int = 512
    batch_size: int = 8
    accumulation_steps: int = 1
    num_steps: int = 1000
    seed: int = 0
    evaluate_every: int = 200
    checkpoint_every: int = 200
    weight_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation_steps", "num_steps", "evaluate_every", "checkpoint_every"):
            _check_count(name, getattr(self, name), 1)
        _check_count("sequence_len", self.sequence_len, 2)
        _check_count("seed", self.seed, 0)
        dtypes = ("float32", "bfloat16", "float16")
        _check(
            self.weight_dtype in dtypes, f"weight_dtype: expected one of {', '.join(dtypes)}, got {self.weight_dtype!r}"
        )
        _check(
            self.optimizer.warmup_steps < self.num_steps,
            f"warmup_steps: expected fewer than num_steps {self.num_steps}, got {self.optimizer.warmup_steps}; give "
            "more steps or a shorter warm-up",
        )

    @property
    def sequences_a_step(self) -> int:
        """Sequences that one step of the optimiser reads."""
        return self.batch_size * self.accumulation_steps
