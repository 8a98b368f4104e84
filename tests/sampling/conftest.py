"""Builds the numbers of a batch with as few words as a test needs."""

from collections.abc import Callable, Sequence

import pytest

from jdecode import config, sampling


@pytest.fixture(scope="session")
def params_of() -> Callable[..., sampling.SamplingParams]:
    """A function from configs (dicts of fields) to ``SamplingParams``; one prompt and stop list serve all rows."""

    def build(
        *fields: dict, vocab: int, prompt: Sequence[int] = (1,), history_len: int = 37, stop_ids: Sequence[int] = ()
    ) -> sampling.SamplingParams:
        return sampling.params_from_configs(
            [config.SamplingConfig(**entry) for entry in fields],
            vocab_size=vocab,
            prompts=[prompt] * len(fields),
            history_len=history_len,
            stop_ids=[stop_ids] * len(fields),
        )

    return build
