"""How often programs are compiled: once for a shape, whatever the values; after warm-up not at all."""

import collections

import jax
import numpy as np
import pytest

from jdecode import config
from jdecode.decode import loop
from tests import tiny_model

PROGRAMS = ("prefill_chunk", "begin", "decode_steps")


class CompileLog:
    """Counts, while open, what jax traces and compiles."""

    def __enter__(self):
        self.traced = collections.Counter()
        self.compiled = collections.Counter()
        jax.monitoring.register_event_duration_secs_listener(self._listen)
        return self

    def __exit__(self, *_):
        jax.monitoring.unregister_event_duration_listener(self._listen)

    def _listen(self, event, duration_secs, **kwargs):
        del duration_secs
        name = str(kwargs.get("fun_name"))
        if event == "/jax/core/compile/jaxpr_trace_duration":
            self.traced[name] += 1
        if event == "/jax/core/compile/backend_compile_duration":
            self.compiled[name] += 1

    def of_programs(self) -> dict[str, int]:
        return {name: self.traced[name] for name in PROGRAMS}


ALL_ON = config.SamplingConfig(
    temperature=0.9,
    top_k=30,
    top_p=0.9,
    min_p=0.01,
    typical_p=0.95,
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
    no_repeat_ngram_size=3,
    min_new_tokens=2,
    logit_bias=((9, 1.5), (11, -2.0)),
    banned_token_ids=(13, 17, 19),
    allowed_token_ids=(9, 11, 23, 29, 31, 37, 41),
    seed=5,
)


def variants():
    """Yields requests that share one shape: a prompt of 1 to 16 tokens, at most 64 new ones, at most 256 in all."""
    prompt = [5, 6, 7, 8]
    yield [prompt], {"max_new_tokens": 40}
    yield [prompt], {"max_new_tokens": 40, "sampling": ALL_ON}
    yield [prompt], {"max_new_tokens": 40, "sampling": config.SamplingConfig(temperature=1.3)}
    yield [prompt], {"max_new_tokens": 40, "sampling": config.SamplingConfig(temperature=0.1, seed=0)}
    yield [prompt], {"max_new_tokens": 40, "sampling": config.SamplingConfig(top_k=1, seed=2**62)}
    yield [prompt], {"max_new_tokens": 40, "stop_token_ids": [40]}
    yield [prompt], {"max_new_tokens": 40, "stop_token_ids": list(range(40, 47)), "ignore_eos": False}
    yield [prompt], {"max_new_tokens": 40, "ignore_eos": True}
    yield [prompt], {"max_new_tokens": 37}
    yield [[5]], {"max_new_tokens": 1}
    yield [[5] * 16], {"max_new_tokens": 64}
    yield [prompt], {"max_new_tokens": 40, "steps_per_look": 1}
    yield [prompt], {"max_new_tokens": 40, "steps_per_look": 7}
    yield [prompt], {"max_new_tokens": 40, "stop": "never mind"}
    yield [prompt], {"max_new_tokens": 40, "stop": ["a", "b", "c"]}
    yield [prompt], {"max_new_tokens": 31, "capacity": 256}
    yield "the hat", {"max_new_tokens": 40}


def run(prompts, options) -> None:
    stream = tiny_model.load_text().stream(prompts, **{"steps_per_look": loop.ALL_TOKENS, **options})
    for _ in stream:
        pass


def test_one_trace_for_a_shape_whatever_the_values():
    requests = list(variants())
    with CompileLog() as log:
        run(*requests[0])
    # Another test may have traced this shape before; never is one traced twice.
    assert all(count <= 1 for count in log.of_programs().values())
    for prompts, options in requests[1:]:
        with CompileLog() as log:
            run(prompts, options)
        assert log.of_programs() == dict.fromkeys(PROGRAMS, 0), (prompts, options)
        assert not log.compiled, (prompts, options)


def test_the_counter_counts():
    # A batch of seven rows is nobody else's shape, so each program is traced once, and once only.
    with CompileLog() as log:
        run([[5, 6, 7]] * 7, {"max_new_tokens": 20})
        run([[8, 9]] * 7, {"max_new_tokens": 30, "sampling": ALL_ON, "steps_per_look": 5})
    assert log.of_programs() == dict.fromkeys(PROGRAMS, 1)
    assert log.compiled["jit(decode_steps)"] == log.compiled["jit(begin)"] == 1


@pytest.mark.parametrize("options", [{"logprobs": 2}, {"transforms": [tiny_model.RepeatPrompt()]}])
def test_equal_options_that_are_static_share_a_trace(options):
    with CompileLog() as log:
        run([[5, 6, 7]] * 5, {"max_new_tokens": 20, **options})
        run([[5, 6, 7]] * 5, {"max_new_tokens": 20, **options})
    assert all(count <= 1 for count in log.of_programs().values())


def test_a_mixed_load_compiles_nothing_new_after_warm_up():
    lm, rng = tiny_model.load_text(), np.random.default_rng(8)

    def request(num_rows: int, prompt_len: int, num_new: int, logprobs: int | None, values: config.SamplingConfig):
        prompts = [rng.integers(3, 288, size=prompt_len).tolist() for _ in range(num_rows)]
        stop_ids = rng.integers(3, 288, size=rng.integers(0, 6)).tolist()
        run(
            prompts,
            {"max_new_tokens": num_new, "logprobs": logprobs, "sampling": values, "stop_token_ids": stop_ids},
        )

    # The shapes of this load: one row or three, with and without log-probabilities.
    shapes = [(num_rows, logprobs) for num_rows in (1, 3) for logprobs in (None, 2)]
    for num_rows, logprobs in shapes:
        request(num_rows, 4, 40, logprobs, ALL_ON)
    with CompileLog() as log:
        for idx in range(30):
            num_rows, logprobs = shapes[rng.integers(len(shapes))]
            values = config.SamplingConfig(
                temperature=float(rng.choice([0, 0.5, 1.5])),
                top_k=int(rng.integers(0, 300)),
                top_p=float(rng.uniform(0.1, 1)),
                repetition_penalty=float(rng.choice([1.0, 1.3])),
                logit_bias=((int(rng.integers(288)), 1.0),) * int(rng.integers(0, 5)),
                seed=None if idx % 3 else idx,
            )
            # Prompts of 1 to 16 tokens, 1 to 64 new ones: one bucket each.
            request(num_rows, int(rng.integers(1, 17)), int(rng.integers(1, 65)), logprobs, values)
    assert log.of_programs() == dict.fromkeys(PROGRAMS, 0)
    assert not log.compiled
    assert lm.end_token_ids == (2,)
