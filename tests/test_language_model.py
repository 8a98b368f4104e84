"""The front door: greedy goldens, what prompts may be, what is refused, scores, and the caller's own transform."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdecode
from jdecode import config, language_model, sampling
from jdecode.cache import layout_full, layout_ring
from jdecode.decode import loop, prefill
from tests import tiny_model

LLAMAS = ["llama_gqa", "llama_mha", "llama_bias_tied", "llama_sharded", "llama_bf16", "llama3_rope"]
WINDOWED = ["gemma3_text", "gemma3_scaled", "mistral_w16"]
GREEDY = {"max_new_tokens": tiny_model.NUM_GREEDY, "ignore_eos": True}


@pytest.mark.parametrize("name", [*LLAMAS, *WINDOWED])
def test_greedy_in_a_ragged_batch(name):
    # Lengths such as 4, 19 and 43: a short row's padding, or a shared position, would show.
    result = tiny_model.load(name).generate(tiny_model.prompts(name), **GREEDY)
    assert tiny_model.rows(result) == tiny_model.greedy(name)
    assert result.finish_reasons == ["length"] * 3
    assert result.prompt_tokens == tiny_model.prompts(name)


@pytest.mark.parametrize(("name", "row"), [("llama_gqa", 0), ("llama_gqa", 2), ("gemma3_text", 2), ("mistral_w16", 1)])
def test_greedy_alone(name, row):
    result = tiny_model.load(name).generate(tiny_model.prompts(name)[row], **GREEDY)
    assert tiny_model.rows(result) == [tiny_model.greedy(name)[row]]


@pytest.mark.parametrize("name", WINDOWED)
@pytest.mark.parametrize("cache", [config.CacheConfig(layout="full"), config.CacheConfig(slack=5)])
def test_greedy_does_not_depend_on_the_layout(name, cache):
    lm = tiny_model.load(name)
    stream = lm.stream(tiny_model.prompts(name), cache=cache, steps_per_look=loop.ALL_TOKENS, **GREEDY)
    list(stream)
    assert stream.result is not None
    assert tiny_model.rows(stream.result) == tiny_model.greedy(name)
    windows = [layer.window for layer in lm.config.layers]
    full = layout_full.FullLayout(capacity=256)
    expected = [
        full if window is None or cache.layout == "full" else layout_ring.RingLayout(window=window, slack=5)
        for window in windows
    ]
    assert [stream.cache.layouts[idx] for idx in stream.cache.layout_idx] == expected


@pytest.mark.parametrize("steps", [1, 3, 8])
def test_chunks_give_the_tokens_of_one_run(steps):
    stream = tiny_model.load("mistral_w16").stream(
        tiny_model.prompts("mistral_w16"), steps_per_look=steps, logprobs=1, **GREEDY
    )
    tokens = [[], [], []]
    for chunk in stream:
        assert 1 <= len(chunk.token_ids) <= steps
        tokens[chunk.row] += chunk.token_ids
    assert tokens == tiny_model.greedy("mistral_w16")
    assert stream.result is not None and tiny_model.rows(stream.result) == tokens


def padded(filler: int) -> tuple[np.ndarray, np.ndarray]:
    prompts = tiny_model.prompts("llama_gqa")
    lengths = np.array([len(prompt) for prompt in prompts])
    array = np.full((3, 50), filler, np.int64)
    for row, prompt in enumerate(prompts):
        array[row, : len(prompt)] = prompt
    return array, lengths


@pytest.mark.parametrize("filler", [0, -1, 10**6])
def test_padded_array_equals_ragged_lists(filler):
    array, lengths = padded(filler)
    result = tiny_model.load("llama_gqa").generate(array, lengths=lengths, **GREEDY)
    assert tiny_model.rows(result) == tiny_model.greedy("llama_gqa")


def test_prompts_in_every_form():
    lm, text = tiny_model.load_text(), "the hat"
    assert lm.tokenizer is not None
    ids = lm.tokenizer.encode(text)
    assert ids[0] == lm.tokenizer.bos_token_id == 1
    array = np.array([ids, ids], np.int32)
    forms = [
        (text, 1),
        ([text], 1),
        (ids, 1),
        (tuple(ids), 1),
        (np.array(ids), None),
        ([ids], 1),
        ([np.array(ids)], 1),
        ([jnp.array(ids)], 1),
        ([text, ids], 2),
        ([text, text], 2),
    ]
    for form, num_rows in forms:
        if num_rows is None:
            with pytest.raises(
                ValueError, match=r"expected an int array \(rows, tokens\), got int64 of shape \(\d+,\)"
            ):
                lm.generate(form)
            continue
        result = lm.generate(form, max_new_tokens=3)
        assert result.prompt_tokens == [ids] * num_rows
    for form in (array, jnp.asarray(array)):
        result = lm.generate(form, lengths=[len(ids)] * 2, max_new_tokens=3)  # pyright: ignore[reportArgumentType]
        assert result.prompt_tokens == [ids, ids]
    # The start token alone is a prompt where the tokenizer adds one.
    assert lm.generate("", max_new_tokens=3).prompt_tokens == [[1]]


@dataclasses.dataclass(frozen=True)
class Only:
    """A caller's own transform: allows tokens from ``first`` on."""

    first: int

    def init(self, params, batch, vocab):
        return ()

    def apply(self, logits_BV, state):
        TRACES.append(self)
        return jnp.where(jnp.arange(logits_BV.shape[1])[None] >= self.first, logits_BV, -jnp.inf)

    def accept(self, state, token_B, live_B):
        return state


TRACES: list[Only] = []


ONE = [[5, 6]]


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "prompts: expected at least one, got none"),
        (None, {}, "prompts: expected text, token ids or a list of either, got NoneType"),
        (b"ab", {}, "prompts: expected text, token ids or a list of either, got bytes"),
        (7, {}, "prompts: expected text, token ids or a list of either, got int"),
        ([[]], {}, "prompt of row 0: expected at least one token, got none"),
        ([[5], []], {}, "prompt of row 1: expected at least one token"),
        ([[5, 288]], {}, "prompt of row 0: expected token ids from 0 to 287, got 288"),
        ([5, 288], {}, "prompt of row 0: expected token ids from 0 to 287, got 288"),
        ([[5], [-1]], {}, "prompt of row 1: expected token ids from 0 to 287, got -1"),
        ([[5, 6.0]], {}, "prompt of row 0: expected token ids from 0 to 287, got 6.0"),
        ([[5, True]], {}, "prompt of row 0: expected token ids from 0 to 287, got True"),
        ([True, False], {}, "prompt of row 0: expected text or a list of token ids, got True"),
        ([1.5, 2.5], {}, "prompt of row 0: expected text or a list of token ids, got 1.5"),
        ([[5], None], {}, "prompt of row 1: expected text or a list of token ids, got None"),
        ([5, [6]], {}, "prompt of row 0: expected text or a list of token ids, got 5"),
        ([[[5, 6]]], {}, r"prompt of row 0: expected token ids from 0 to 287, got \[5, 6\]"),
        ("text", {}, "prompt: expected token ids, got text"),
        (np.ones((2, 3)), {"lengths": [1, 1]}, "prompts: expected an int array"),
        (np.ones((2, 3), bool), {"lengths": [1, 1]}, "prompts: expected an int array"),
        (np.ones((2, 3), int), {}, "lengths: expected the number of real ids"),
        (np.ones((2, 3), int), {"lengths": [1]}, r"lengths: expected 2 counts from 1 to 3, got \[1\]"),
        (np.ones((2, 3), int), {"lengths": [1, 4]}, r"lengths: expected 2 counts from 1 to 3, got \[1, 4\]"),
        (np.ones((2, 3), int), {"lengths": [0, 3]}, "lengths: expected 2 counts from 1 to 3"),
        (np.ones((2, 3), int), {"lengths": [-1, 3]}, "lengths: expected 2 counts from 1 to 3"),
        (np.ones((2, 3), int), {"lengths": [1.5, 2.5]}, "lengths: expected 2 counts from 1 to 3"),
        (np.ones((2, 3), int), {"lengths": 3}, "lengths: expected 2 counts from 1 to 3"),
        (np.full((1, 3), 288), {"lengths": [2]}, "prompt of row 0: expected token ids from 0 to 287"),
        (ONE, {"lengths": [2]}, "lengths: expected only beside an array"),
        (ONE, {"num_samples": 0}, "num_samples: expected a whole number from 1 to"),
        (ONE, {"num_samples": True}, "num_samples: expected a whole number from 1 to"),
        (ONE, {"max_new_tokens": 0}, "max_new_tokens: expected a whole number from 1 to"),
        (ONE, {"max_new_tokens": -3}, "max_new_tokens: expected a whole number from 1 to"),
        (ONE, {"max_new_tokens": 2.0}, "max_new_tokens: expected a whole number from 1 to"),
        (ONE, {"max_new_tokens": 2**31}, "max_new_tokens: expected a whole number from 1 to"),
        (ONE, {"steps_per_look": 0}, "steps_per_look: expected a whole number from 1 to"),
        (ONE, {"logprobs": -1}, "logprobs: expected a whole number from 0 to 288, got -1"),
        (ONE, {"logprobs": 289}, "logprobs: expected a whole number from 0 to 288, got 289"),
        (ONE, {"capacity": 0}, "capacity: expected a whole number from 1 to"),
        (ONE, {"capacity": 4, "max_new_tokens": 3}, "capacity: expected at least 5 slots .*, got 4"),
        (ONE, {"stop_token_ids": [288]}, "stop_token_ids: expected ids from 0 to 287, got 288"),
        (ONE, {"stop_token_ids": [-1]}, "stop_token_ids: expected ids from 0 to 287, got -1"),
        (ONE, {"stop_token_ids": [2.0]}, r"stop_token_ids: expected ids from 0 to 287, got 2\.0"),
        (ONE, {"sampling": []}, r"sampling: expected one config, or one for each prompt \(1\), got 0"),
        (ONE, {"sampling": [config.SamplingConfig()] * 2}, r"sampling: .* one for each prompt \(1\), got 2"),
        (ONE, {"sampling": {"temperature": 1.0}}, "sampling: expected a SamplingConfig, or a list of them"),
        (ONE, {"cache": "full"}, "cache: expected a CacheConfig, got str"),
        (ONE, {"stop_token_ids": 5}, "stop_token_ids: expected a list, got int"),
        (ONE, {"transforms": Only}, "transforms: expected a list"),
        (
            ONE,
            {"draft": "bigram"},
            "draft: expected None, 'ngram', 'layer_skip' or a loaded language model, got 'bigram'",
        ),
        (
            ONE,
            {"draft": "ngram", "num_draft_tokens": 0},
            "num_draft_tokens: expected a whole number from 1 to 64, got 0",
        ),
        (ONE, {"num_draft_tokens": 65}, "num_draft_tokens: expected a whole number from 1 to 64, got 65"),
        (ONE, {"verify": "coupled"}, "num_draft_tokens, verify, adaptive_draft: act on a draft, and there is none"),
        (ONE, {"adaptive_draft": False}, "num_draft_tokens, verify, adaptive_draft: act on a draft, and there is none"),
        (ONE, {"verify": "exact"}, "verify: expected one of rejection, coupled, got 'exact'"),
        (ONE, {"verify": ["coupled"]}, r"verify: expected one of rejection, coupled, got \['coupled'\]"),
        (ONE, {"draft": np.zeros(3)}, "draft: expected None, .* got array"),
        (ONE, {"draft": "ngram", "adaptive_draft": "no"}, "adaptive_draft: expected True or False, got 'no'"),
        (ONE, {"draft": "ngram", "cache": "full"}, "cache: expected a CacheConfig, got str"),
    ],
)
def test_refusals_are_one_line(monkeypatch, prompts, options, message):
    monkeypatch.setattr(prefill, "prefill", None)  # whatever is refused is refused before anything is computed
    with pytest.raises((ValueError, TypeError), match=f"^{message}") as caught:
        tiny_model.load("llama_gqa").generate(prompts, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("sampling_config", "message"),
    [
        (config.SamplingConfig(logit_bias=((288, 1.0),)), "logit_bias of row 0: expected ids from 0 to 287, got 288"),
        (
            config.SamplingConfig(banned_token_ids=(-1,)),
            "banned_token_ids of row 0: expected ids from 0 to 287, got -1",
        ),
        (config.SamplingConfig(allowed_token_ids=(5,), banned_token_ids=(5,)), "row 0"),
    ],
)
def test_impossible_sampling_is_refused_before_anything_is_computed(monkeypatch, sampling_config, message):
    monkeypatch.setattr(prefill, "prefill", None)
    with pytest.raises(ValueError, match=message) as caught:
        tiny_model.load("llama_gqa").generate(ONE, sampling=sampling_config)
    assert "\n" not in str(caught.value)


def test_empty_text_without_a_start_token_is_refused():
    lm = tiny_model.load_text()

    class NoStartToken:
        def encode(self, text: str) -> list[int]:
            return [] if not text else [5]

    with pytest.raises(ValueError, match=r"^prompt: expected some text"):
        dataclasses.replace(lm, tokenizer=NoStartToken()).generate(["x", ""])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype: expected one of auto, float32, bfloat16, float16, got 'float64'"),
        ({"mesh": config.MeshConfig(data=3, model=3)}, "mesh: expected at most 8 devices .* = 9"),
        ({"backend": "cuda"}, ".*expected .* got 'cuda'"),
    ],
)
def test_load_refuses(options, message):
    source = tiny_model.GOLDEN / "tiny" / "llama_gqa"
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        jdecode.load(source, **options)
    assert "\n" not in str(caught.value)


def test_load_of_nothing_and_of_a_chosen_dtype(tmp_path: pathlib.Path):
    with pytest.raises((ValueError, FileNotFoundError), match="gguf") as caught:
        jdecode.load(tmp_path / "absent.gguf")
    assert "\n" not in str(caught.value)
    lm = jdecode.load(tiny_model.GOLDEN / "tiny" / "llama_gqa", dtype="bfloat16")
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype("bfloat16")}
    assert lm.weight_bytes == 120_256 * 2
    assert lm.init_cache(batch_size=2, capacity=9).stores[0].keys.block(0, 9).dtype == jnp.bfloat16
    # "auto" is float32 on a CPU.
    lm = jdecode.load(tiny_model.GOLDEN / "tiny" / "llama_gqa")
    assert {leaf.dtype for leaf in jax.tree.leaves(lm.params)} == {jnp.dtype("float32")}
    assert lm.end_token_ids == (2,)


def test_capacity_has_few_sizes():
    # Four sizes between a power of two and the next, multiples of 256, by hand.
    sizes = {num: language_model.capacity_for(num) for num in (1, 256, 257, 1024, 1025, 1281, 2049, 2561, 5000)}
    assert sizes == {
        1: 256,
        256: 256,
        257: 512,
        1024: 1024,
        1025: 1280,
        1281: 1536,
        2049: 2560,
        2561: 3072,
        5000: 5120,
    }
    assert all(language_model.capacity_for(num) >= num for num in range(1, 5000, 7))


def plain_scores(name: str, row: int) -> np.ndarray:
    """Computes the log-probability of a golden prompt's tokens from the golden logits, in float64."""
    logits_TV = tiny_model.golden(name)[f"logits_full_{row}"].astype(np.float64)
    logprob_TV = logits_TV - np.log(np.exp(logits_TV).sum(axis=1, keepdims=True))
    ids = tiny_model.prompts(name)[row]
    return np.array([logprob_TV[idx, ids[idx + 1]] for idx in range(len(ids) - 1)])


@pytest.mark.parametrize("name", ["llama_gqa", "gemma3_text", "mistral_w16"])
def test_score_of_ragged_rows(name):
    lm = tiny_model.load(name)
    scores = lm.score(tiny_model.prompts(name))
    assert [score.dtype for score in scores] == [np.float32] * 3
    for row in range(3):
        np.testing.assert_allclose(scores[row], plain_scores(name, row), atol=2e-4, rtol=0)


@pytest.mark.parametrize("name", ["llama_gqa", "mistral_w16"])
def test_score_across_chunks(name, monkeypatch):
    # So little memory that a chunk has the least length, 16: rows of 19 to 61 tokens cross chunks at 16, 32 and 48.
    lm = tiny_model.load(name)
    monkeypatch.setattr(prefill, "SCORES_IN_MEMORY", 1)
    scores = lm.score(tiny_model.prompts(name))
    for row in range(3):
        np.testing.assert_allclose(scores[row], plain_scores(name, row), atol=2e-4, rtol=0)


def test_score_alone_and_of_one_token():
    lm = tiny_model.load("llama_gqa")
    (score,) = lm.score(tiny_model.prompts("llama_gqa")[1])
    np.testing.assert_allclose(score, plain_scores("llama_gqa", 1), atol=2e-4, rtol=0)
    assert [score.shape for score in lm.score([[7], [8, 9, 10]])] == [(0,), (2,)]
    array, lengths = padded(-1)
    for row, score in enumerate(lm.score(array, lengths=lengths)):
        np.testing.assert_allclose(score, plain_scores("llama_gqa", row), atol=2e-4, rtol=0)
    with pytest.raises(ValueError, match=r"^prompt of row 0: expected at least one token"):
        lm.score([[]])


def test_own_transform_acts_and_equal_ones_share_a_trace():
    lm, prompt = tiny_model.load("llama_gqa"), tiny_model.prompts("llama_gqa")[0]
    golden = tiny_model.greedy("llama_gqa")[0]
    first = max(golden) - 3
    assert min(golden) < first
    TRACES.clear()
    (tokens,) = tiny_model.rows(lm.generate([prompt], transforms=[Only(first)], **GREEDY))
    assert min(tokens) >= first
    # The first token by hand: the best of those that are allowed.
    logits_V = tiny_model.golden("llama_gqa")["logits_full_0"][-1]
    assert tokens[0] == first + int(logits_V[first:].argmax())
    # Once in the first draw, once in the loop, and not again for an equal instance.
    num_traces = len(TRACES)
    assert num_traces == 2
    assert tiny_model.rows(lm.generate([prompt], transforms=[Only(first)], **GREEDY)) == [tokens]
    assert len(TRACES) == num_traces
    assert tiny_model.rows(lm.generate([prompt], **GREEDY)) == [golden]


def test_own_transform_comes_before_the_temperature():
    # It sees the logits of the model: a bias added after division by 0.001 would be nothing beside them.
    lm, prompt = tiny_model.load("llama_gqa"), tiny_model.prompts("llama_gqa")[0]
    cold = config.SamplingConfig(temperature=1e-3, seed=1)
    (tokens,) = tiny_model.rows(lm.generate([prompt], transforms=[Only(280)], sampling=cold, **GREEDY))
    assert min(tokens) >= 280


@pytest.mark.parametrize(
    ("transform", "message"), [(Only, "got the class Only"), (5, "object of class int"), ("top_k", "of class str")]
)
def test_what_is_no_transform_is_refused(transform, message):
    with pytest.raises(TypeError, match=message):
        tiny_model.load("llama_gqa").generate(ONE, transforms=[transform])


FIELDS = {
    "top_k": {"temperature": 1.0, "top_k": 1},
    "top_p": {"temperature": 1.0, "top_p": 0.0},
    "min_p": {"temperature": 1.0, "min_p": 1.0},
    "typical_p": {"temperature": 1.0, "typical_p": 0.01},
    "temperature": {"temperature": 3.0},
    "repetition_penalty": {"repetition_penalty": 30.0},
    "presence_penalty": {"presence_penalty": 30.0},
    "frequency_penalty": {"frequency_penalty": 30.0},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 1},
    "logit_bias": {"logit_bias": ((77, 100.0),)},
    "allowed_token_ids": {"allowed_token_ids": (77, 78)},
    "banned_token_ids": {"banned_token_ids": (160,)},
    "min_new_tokens": {"min_new_tokens": 9},
}


@pytest.mark.parametrize("field", FIELDS)
def test_every_sampling_field_acts_through_generate_and_on_its_row_alone(field):
    # Three rows in one batch: the plain one, the one with the field, and the plain one again.
    lm = dataclasses.replace(tiny_model.load_text(), end_token_ids=(50,))
    changed = config.SamplingConfig(seed=4, **FIELDS[field])
    plain = config.SamplingConfig(seed=4, temperature=1.0 if field in ("top_k", "top_p", "min_p", "typical_p") else 0.0)
    prompt = [1, 259, 260, 261]
    result = lm.generate([prompt] * 3, sampling=[plain, changed, plain], max_new_tokens=20)
    first, own, last = tiny_model.rows(result)
    assert first == last
    assert own != first
    if field == "min_new_tokens":
        assert first.index(50) < 9 and 50 not in own[:9]
    if field == "logit_bias":
        assert own == [77] * 20
    if field == "allowed_token_ids":
        assert set(own) <= {77, 78}
    if field == "banned_token_ids":
        assert 160 in first and 160 not in own
    if field in ("no_repeat_ngram_size", "repetition_penalty"):
        # The prompt counts as well.
        assert len({*own, *prompt}) == len(own) + len(prompt)
    if field in ("presence_penalty", "frequency_penalty"):
        assert len(set(own)) == len(own)


def test_protocol_of_own_transform():
    assert isinstance(Only(3), sampling.Transform)
