"""What a training run is made of, as frozen configs. They hold no arrays and import no jax."""

import dataclasses
import math

from jdecode import config

STANDARD_LIBRARY = "standard_library"
"""The corpus that every machine has: the source of the running Python's own standard library."""


COUNT_LIMIT = 2**31 - 1
"""Counts are held in 32 bits."""


def _check_share(name: str, value: float) -> None:
    config.check_number(name, value, 0, 1, "a number from 0 to 1")


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
        config.check(bool(self.source), "corpus source: expected standard_library or a folder, got an empty text")
        config.check(bool(self.suffixes), "corpus suffixes: expected at least one, got none")
        for suffix in self.suffixes:
            config.check(suffix.startswith("."), f"corpus suffixes: expected suffixes such as .txt, got {suffix!r}")
        config.check(
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
        over_0 = "a finite number over 0"
        for name in ("learning_rate", "epsilon"):
            config.check_number(name, getattr(self, name), 0, math.inf, over_0, exclusive=True)
        if self.clip_norm is not None:
            config.check_number("clip_norm", self.clip_norm, 0, math.inf, f"{over_0} or null", exclusive=True)
        config.check_count("warmup_steps", self.warmup_steps, 0)
        _check_share("final_share", self.final_share)
        config.check_number("weight_decay", self.weight_decay, 0, 10, "a number from 0 to 10")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            config.check(0 <= value < 1, f"{name}: expected a number from 0 to under 1, got {value!r}")


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
        over_0, at_least_0 = "a finite number over 0", "a finite number of at least 0"
        config.check_number("distill temperature", self.temperature, 0, math.inf, over_0, exclusive=True)
        config.check_number("generated_temperature", self.generated_temperature, 0, math.inf, at_least_0)
        _check_share("teacher_share", self.teacher_share)
        _check_share("generated_share", self.generated_share)
        config.check_count("generated_tokens", self.generated_tokens, 0)


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
            config.check_count(name, getattr(self, name), 1)
        config.check_count("sequence_len", self.sequence_len, 2)
        config.check_count("seed", self.seed, 0)
        config.check(self.seed <= COUNT_LIMIT, f"seed: expected a count up to {COUNT_LIMIT}, got {self.seed}")
        tokens = self.sequences_a_step * (self.sequence_len + 1)
        config.check(
            tokens <= COUNT_LIMIT,
            f"batch_size: expected up to {COUNT_LIMIT} tokens a step, got {tokens}; lower it, accumulation_steps or "
            "sequence_len",
        )
        sequences = self.num_steps * self.sequences_a_step
        config.check(
            sequences <= COUNT_LIMIT,
            f"num_steps: expected up to {COUNT_LIMIT} sequences in all, got {sequences}; lower it or the batch_size",
        )
        config.check(
            self.sequence_len <= self.architecture.max_positions,
            f"sequence_len: expected at most the architecture's max_positions {self.architecture.max_positions}, got "
            f"{self.sequence_len}; raise max_positions, or shorten the sequences",
        )
        dtypes = ("float32", "bfloat16", "float16")
        config.check(
            self.weight_dtype in dtypes, f"weight_dtype: expected one of {', '.join(dtypes)}, got {self.weight_dtype!r}"
        )
        config.check(
            self.optimizer.warmup_steps < self.num_steps,
            f"warmup_steps: expected fewer than num_steps {self.num_steps}, got {self.optimizer.warmup_steps}; give "
            "more steps or a shorter warm-up",
        )

    @property
    def sequences_a_step(self) -> int:
        """Sequences that one step of the optimiser reads."""
        return self.batch_size * self.accumulation_steps
