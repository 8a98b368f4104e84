import jax.numpy as jnp
import numpy as np
import pytest

from jdecode import config, sampling

VOCAB = 11


def _build(fields: dict, **changes) -> sampling.SamplingParams:
    arguments = {"vocab_size": VOCAB, "prompts": [[1, 2]], "history_len": 19, "stop_ids": [[2]], **changes}
    return sampling.params_from_configs([config.SamplingConfig(**fields)], **arguments)


def test_the_order_is_fixed():
    extra = sampling.NoRepeatNgram()
    names = [type(transform).__name__ for transform in sampling.standard_chain((extra,)).transforms]
    assert names == [
        "LogitBias", "PermittedTokens", "TokenPenalties", "NoRepeatNgram", "MinNewTokens", "NoRepeatNgram",
        "Temperature", "TopK", "TopP", "MinP", "TypicalP",
    ]  # fmt: skip


def test_params_have_exact_dtypes_and_padded_widths():
    params = sampling.params_from_configs(
        [
            config.SamplingConfig(temperature=0.5, top_k=4, logit_bias=((3, 1.5), (7, -2.0))),
            config.SamplingConfig(temperature=1.0, top_p=0.25, banned_token_ids=tuple(range(9))),
            config.SamplingConfig(temperature=2.0, allowed_token_ids=(6, 7)),
        ],
        vocab_size=VOCAB,
        prompts=[[5], list(range(10)), []],
        history_len=13,
        stop_ids=[[2], [], [3, 4]],
    )
    pad = sampling.PADDING_ID
    assert params.temperature_B.dtype == params.top_p_B.dtype == params.bias_values_BX.dtype == jnp.float32
    assert params.top_k_B.dtype == params.prompt_ids_BT.dtype == params.stop_ids_BX.dtype == jnp.int32
    assert params.temperature_B.tolist() == [0.5, 1.0, 2.0]
    assert params.top_k_B.tolist() == [4, 0, 0]
    assert params.top_p_B.tolist() == [1.0, 0.25, 1.0]
    assert params.bias_ids_BX.tolist() == [[3, 7, *[pad] * 6], [pad] * 8, [pad] * 8]
    assert params.bias_values_BX.tolist() == [[1.5, -2.0, *[0.0] * 6], [0.0] * 8, [0.0] * 8]
    assert params.banned_ids_BX.tolist() == [[pad] * 16, [*range(9), *[pad] * 7], [pad] * 16]
    assert params.allowed_ids_BX.tolist() == [[pad] * 8, [pad] * 8, [6, 7, *[pad] * 6]]
    assert params.stop_ids_BX.tolist() == [[2, *[pad] * 7], [pad] * 8, [3, 4, *[pad] * 6]]
    assert params.prompt_ids_BT.shape == (3, 16)
    assert params.prompt_len_B.tolist() == [1, 10, 0]
    assert params.history_len == 13


@pytest.mark.parametrize("top_k", [0, -1, VOCAB, VOCAB + 5, 2**40])
def test_top_k_outside_the_vocabulary_is_off(top_k: int):
    assert _build({"temperature": 1.0, "top_k": top_k}).top_k_B.tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1e-40])
def test_filters_of_greedy_rows_are_off(temperature: float):
    params = _build({"temperature": temperature, "top_k": 3, "top_p": 0.5, "min_p": 0.5, "typical_p": 0.5})
    got = [params.top_k_B, params.top_p_B, params.min_p_B, params.typical_p_B]
    assert [float(values[0]) for values in got] == [0, 1, 0, 1]


def test_counts_past_the_history_do_not_overflow():
    params = _build({"no_repeat_ngram_size": 2**40, "min_new_tokens": 2**40})
    assert params.no_repeat_ngram_size_B.tolist() == [20]
    assert params.min_new_tokens_B.tolist() == [20]


def test_numpy_ids_are_ids():
    params = _build({}, prompts=[np.asarray([3, 4], np.int64)], stop_ids=[np.asarray([9])])
    assert params.prompt_ids_BT[0, :2].tolist() == [3, 4]
    assert params.stop_ids_BX[0, 0] == 9


@pytest.mark.parametrize(
    ("fields", "changes", "message"),
    [
        ({"logit_bias": ((VOCAB, 1.0),)}, {}, "logit_bias of row 0: expected ids from 0 to 10, got 11"),
        ({"banned_token_ids": (-1,)}, {}, "banned_token_ids of row 0: expected ids from 0 to 10, got -1"),
        ({"allowed_token_ids": (99,)}, {}, "allowed_token_ids of row 0: expected ids from 0 to 10, got 99"),
        ({}, {"prompts": [[3, 11]]}, "prompts of row 0: expected ids from 0 to 10, got 11"),
        ({}, {"stop_ids": [[11]]}, "stop_ids of row 0: expected ids from 0 to 10, got 11"),
        ({}, {"prompts": [[1], [2]]}, "prompts: expected one list for each of 1 configs, got 2"),
        ({}, {"stop_ids": []}, "stop_ids: expected one list for each of 1 configs, got 0"),
        ({}, {"history_len": 0, "prompts": [[]]}, "history_len: expected a count of at least 1, got 0"),
        ({}, {"prompts": [[1] * 20]}, "prompt of row 0: expected at most 19 tokens, got 20"),
        ({"banned_token_ids": tuple(range(VOCAB))}, {}, "banned_token_ids of row 0: expected to leave a token"),
        ({"allowed_token_ids": (3, 4), "banned_token_ids": (4, 3)}, {}, "got all of 2 banned"),
        ({"allowed_token_ids": (2,), "min_new_tokens": 1}, {}, "min_new_tokens of row 0: expected a token"),
        ({"temperature": 1e39}, {}, "temperature: expected a number that float32 can hold, got 1e\\+39"),
        ({"repetition_penalty": 1e-40}, {}, "repetition_penalty: expected a number that float32 can hold"),
        ({"presence_penalty": -1e39}, {}, "presence_penalty: expected"),
        ({"logit_bias": ((3, 1e39),)}, {}, "logit_bias: expected a number that float32 can hold"),
    ],
)
def test_refusals_are_one_clear_line(fields: dict, changes: dict, message: str):
    with pytest.raises(ValueError, match=message) as caught:
        _build(fields, **changes)
    assert "\n" not in str(caught.value)


def test_numbers_that_are_not_whole_are_refused():
    with pytest.raises(ValueError, match=r"top_k: expected a whole number \(0 keeps all\), got 3\.0"):
        _build({"temperature": 1.0, "top_k": 3.0})


def test_ids_that_are_no_whole_numbers_are_refused():
    with pytest.raises(TypeError, match="prompts of row 0: expected token ids, whole numbers"):
        _build({}, prompts=[[1.5]])
