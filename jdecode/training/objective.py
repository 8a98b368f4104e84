"""What training makes small. An objective is static and hashable; parameters and tokens are its arguments."""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import optax

from jdecode import config
from jdecode.models import transformer


class Objective(Protocol):
    """A loss to minimise. Implementations are frozen dataclasses, and so static arguments of ``jax.jit``."""

    def __call__(
        self, params: Any, teacher_params: Any, tokens_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the loss of a batch.

        Args:
          params: of the model that learns.
          teacher_params: of the model that it learns from; ``None`` where there is none.
          tokens_BT: int32, sequences: each token but the first is predicted from those before it.

        Returns:
          The loss (a float32 scalar, a mean over predicted tokens, in nats) and scalars worth recording.
        """
        ...


@dataclasses.dataclass(frozen=True)
class NextToken:
    """Cross-entropy of the next token."""

    model: transformer.Transformer

    def __call__(
        self, params: Any, teacher_params: Any, tokens_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the loss; see ``Objective``."""
        del teacher_params
        logits_BTV, _ = self.model.apply(params, tokens_BT[:, :-1])
        loss = cross_entropy(logits_BTV, tokens_BT[:, 1:])
        return loss, {"next_token": loss}


@dataclasses.dataclass(frozen=True)
class Distillation:
    """Divergence from a teacher's distributions (Hinton et al. 2015, §2), and cross-entropy of the next token.

    The loss is ``s t² KL(teacher || student) + (1 - s) CE``, both models' logits divided by the temperature t in the
    divergence; t² keeps the size of its gradient.

    Attributes:
      model, teacher: over one vocabulary.
      temperature: t.
      teacher_share: s.
    """

    model: transformer.Transformer
    teacher: transformer.Transformer
    temperature: float = 1.0
    teacher_share: float = 1.0

    def __post_init__(self) -> None:
        check_vocabularies(self.model.config, self.teacher.config)

    def __call__(
        self, params: Any, teacher_params: Any, tokens_BT: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Computes the loss; see ``Objective``."""
        student_BTV, _ = self.model.apply(params, tokens_BT[:, :-1])
        teacher_BTV, _ = self.teacher.apply(jax.lax.stop_gradient(teacher_params), tokens_BT[:, :-1])
        divergence = kl_divergence(teacher_BTV / self.temperature, student_BTV / self.temperature)
        next_token = cross_entropy(student_BTV, tokens_BT[:, 1:])
        share = self.teacher_share
        loss = share * self.temperature**2 * divergence + (1 - share) * next_token
        return loss, {"next_token": next_token, "divergence": divergence}


def check_vocabularies(student: config.ModelConfig, teacher: config.ModelConfig) -> None:
    """Refuses a teacher whose distributions are not over the student's tokens.

    Raises:
      ValueError: one line.
    """
    if student.vocab_size != teacher.vocab_size:
        raise ValueError(
            f"distillation: expected a teacher with the student's vocabulary of {student.vocab_size}, got one of "
            f"{teacher.vocab_size}; give the student the vocab_size of the teacher, whose tokenizer it takes"
        )


def cross_entropy(logits_BTV: jax.Array, targets_BT: jax.Array) -> jax.Array:
    """Returns the mean of -log p(target), in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(logits_BTV, targets_BT).mean()


def kl_divergence(logits_p_BTV: jax.Array, logits_q_BTV: jax.Array) -> jax.Array:
    """Returns the mean of KL(p || q), in nats, of distributions given by logits."""
    log_p_BTV, log_q_BTV = jax.nn.log_softmax(logits_p_BTV), jax.nn.log_softmax(logits_q_BTV)
    return jnp.sum(jnp.exp(log_p_BTV) * (log_p_BTV - log_q_BTV), axis=-1).mean()
