"""The strict loader: what a file says is what the config holds, and every mistake is one line with its place."""

import dataclasses
import pathlib

import pytest

from jdecode import config, config_file

SHIPPED = pathlib.Path(__file__).parent.parent / "configs"


def refusal(text: str) -> str:
    with pytest.raises(ValueError) as caught:
        config_file.loads(text, origin="f.yaml")
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_every_field_of_a_file_arrives():
    run = config_file.loads(
        """
        name: some
        description: words
        weights: org/model
        sampling: {temperature: 1, top_k: 7, top_p: 0.9, seed: 0, logit_bias: [[3, 2], [5, -1e1]],
                   allowed_token_ids: [3, 5]}
        cache: {layout: full, dtype: bfloat16, slack: 2}
        mesh: {data: 2, model: 4}
        max_new_tokens: 11
        prompt: hello
        """,
        origin="f.yaml",
    )
    assert run == config.RunConfig(
        name="some",
        description="words",
        weights="org/model",
        sampling=config.SamplingConfig(
            temperature=1.0, top_k=7, top_p=0.9, seed=0, logit_bias=((3, 2.0), (5, -10.0)), allowed_token_ids=(3, 5)
        ),
        cache=config.CacheConfig(layout="full", dtype="bfloat16", slack=2),
        mesh=config.MeshConfig(data=2, model=4),
        max_new_tokens=11,
        prompt="hello",
    )
    assert type(run.sampling.temperature) is float  # a whole number where a float belongs is the one conversion
    hash(run)  # configs are static arguments of jitted functions


def test_a_file_without_a_name_is_named_after_itself():
    assert config_file.loads("weights: x", origin="some/folder/this_one.yaml").name == "this_one"


ARCHITECTURE = """
weights: x
architecture:
  vocab_size: 11
  hidden_size: 6
  intermediate_size: 10
  num_heads: 2
  num_kv_heads: 1
  head_dim: 4
  layers: {}
"""


@pytest.mark.parametrize(
    ("layers", "windows"),
    [
        ("{count: 7, pattern: [{times: 2, window: 5}, {}]}", (5, 5, None, 5, 5, None, 5)),  # cut inside a period
        ("{count: 2, pattern: [{window: 3}, {window: 4}, {}]}", (3, 4)),  # cut inside the first
        ("[{window: 9}, {window: null}]", (9, None)),  # the long form
    ],
)
def test_short_form_of_layers(layers: str, windows: tuple[int | None, ...]):
    run = config_file.loads(ARCHITECTURE.format(layers), origin="f.yaml")
    assert run.architecture is not None
    assert tuple(layer.window for layer in run.architecture.layers) == windows


def test_rope_of_a_layer():
    layers = "{count: 3, pattern: [{rope: {theta: 1e6, scaling: linear, factor: 8}}, {rope: null}]}"
    run = config_file.loads(ARCHITECTURE.format(layers), origin="f.yaml")
    assert run.architecture is not None
    rope = config.RopeConfig(theta=1_000_000.0, scaling="linear", factor=8.0)
    assert [layer.rope for layer in run.architecture.layers] == [rope, None, rope]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling: {temprature: 1}", "f.yaml: sampling.temprature: unknown key; did you mean temperature?"),
        ("wieghts: x", "f.yaml: wieghts: unknown key; did you mean weights?"),
        ("weights: x\nmesh: {zzz: 1}", "f.yaml: mesh.zzz: unknown key; known: data, model"),
        (
            ARCHITECTURE.format("{count: 2, pattern: [{windw: 3}]}"),
            "f.yaml: architecture.layers.pattern[0].windw: unknown key; did you mean window?",
        ),
        (
            ARCHITECTURE.format("{count: 2, patern: [{}]}"),
            "f.yaml: architecture.layers.patern: unknown key; did you mean pattern?",
        ),
    ],
)
def test_unknown_key_names_the_place_and_the_nearest(text: str, message: str):
    assert refusal(text) == message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("max_new_tokens: 3.0", "max_new_tokens: expected a whole number, got the number 3.0"),
        ("max_new_tokens: '3'", "max_new_tokens: expected a whole number, got the text '3'"),
        ("max_new_tokens: true", "max_new_tokens: expected a whole number, got true"),
        ("max_new_tokens: null", "max_new_tokens: expected a whole number, got null"),
        ("sampling: {seed: [1]}", "sampling.seed: expected a whole number or null, got a list"),
        ("sampling: {top_p: high}", "sampling.top_p: expected a number, got the text 'high'"),
        ("sampling: 3", "sampling: expected a mapping, got the whole number 3"),
        ("sampling: {logit_bias: {3: 1}}", "line 2: expected a word as key, got 3"),
        ("sampling: {logit_bias: [[3]]}", "sampling.logit_bias[0]: expected a list of 2, got one of 1"),
        ("sampling: {banned_token_ids: [4, a]}", "sampling.banned_token_ids[1]: expected a whole number"),
        ("prompt: 12", "prompt: expected a text or null, got the whole number 12"),
        ("architecture: {vocab_size: 3}", "architecture.hidden_size: missing; this key has no default"),
    ],
)
def test_wrong_type_names_what_was_expected_and_got(text: str, message: str):
    assert refusal(f"weights: x\n{text}").startswith(f"f.yaml: {message}")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sampling: {temperature: .nan}", "sampling: temperature: expected a finite number of at least 0, got nan"),
        ("sampling: {top_p: 1.5}", "sampling: top_p: expected a number from 0 to 1, got 1.5"),
        ("max_new_tokens: -1", "max_new_tokens: expected a count of at least 1, got -1"),
        ("cache: {page_len: 8}", "cache: cache page_len: expected none beside layout auto, got 8; use layout paged"),
        ("cache: {layout: paged, page_len: 0}", "cache: cache page_len: expected a count of at least 1 or none, got 0"),
        ("cache: {layout: rings}", "cache: cache layout: expected one of auto, full, paged, got 'rings'"),
        (
            "cache: {dtype: int4, group_len: 96}",
            "cache: cache group_len: expected one of 4, 8, 16, 32, 64, 128, 256, got 96",
        ),
        (
            "cache: {dtype: int8, group_len: 64}",
            "cache: cache group_len: acts on the dtypes int8_channel and int4, got 64 with int8; leave it out",
        ),
        (
            "cache: {layout: paged, dtype: int4, page_len: 64}",
            "cache: cache page_len: expected a multiple of group_len (128) beside int4, whose pages hold whole groups, "
            "got 64; give one, or leave it out",
        ),
        ("no_weights: none yet", "no_weights: expected none beside weights 'x', got 'none yet'"),
    ],
)
def test_value_that_the_config_refuses(text: str, message: str):
    assert refusal(f"weights: x\n{text}") == f"f.yaml: {message}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "weights: x\nprompt: a\nweights: y",
            "line 3: key 'weights' stands here for the second time (first in line 1)",
        ),
        ("weights: x\nprompt: [a", "line 2"),
        ("weights: &a x\nprompt: *a", "line 2: aliases are not supported"),
        ("weights: !!python/object/apply:os.getcwd []", "line 1: could not determine a constructor"),
        ("", "expected a mapping, got an empty file"),
        ("- weights", "expected a mapping, got a list"),
        ("weights: a\0b", "not YAML"),
        ("weights: " + "[" * 5000, "not readable as YAML"),
        ("name: x", "expected weights, an architecture or both, got neither"),
        ("weights: ''", "weights: expected a hub id, a path or null, got an empty text"),
    ],
)
def test_file_that_is_not_a_config(text: str, message: str):
    assert message in refusal(text)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ("{count: 0, pattern: [{}]}", "layers.count: expected a count from 1 to"),
        ("{count: 99999999999, pattern: [{}]}", "layers.count: expected a count from 1 to"),
        ("{pattern: [{}]}", "layers.count: expected a whole number, got null"),
        ("{count: 3, pattern: []}", "layers.pattern: expected a list of at least one layer"),
        ("{count: 3, pattern: [4]}", "layers.pattern[0]: expected a mapping, got the whole number 4"),
        ("{count: 3, pattern: [{times: 4}]}", "layers.pattern[0].times: expected a count from 1 to 3, got 4"),
        ("{count: 3, pattern: [{window: 0}]}", "window: expected a count of at least 1 or none, got 0"),
        ("[]", "expected at least one layer"),
    ],
)
def test_layers_that_are_refused(layers: str, message: str):
    assert message in refusal(ARCHITECTURE.format(layers))


def test_lookup_goes_from_the_path_given_to_the_folder_here_to_the_package(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    assert config_file.load("gqa_small.yaml").weights == "gqa_small"  # the package's own
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "gqa_small.yaml").write_text("weights: from_configs")
    assert config_file.load("gqa_small.yaml").weights == "from_configs"
    assert config_file.load("gqa_small").weights == "from_configs"  # the suffix may be left out
    (tmp_path / "gqa_small.yaml").write_text("weights: from_here")
    assert config_file.load("gqa_small.yaml").weights == "from_here"
    assert config_file.load(tmp_path / "configs" / "gqa_small.yaml").weights == "from_configs"


def test_missing_config_names_the_nearest():
    with pytest.raises(FileNotFoundError, match=r"did you mean smollm2_135m\.yaml"):
        config_file.find("smolm2_135m.yaml")
    with pytest.raises(FileNotFoundError, match=r"there are: .*gqa_small\.yaml"):
        config_file.find("zzz")
    with pytest.raises(FileNotFoundError):
        config_file.find("")


def test_file_that_is_not_text(tmp_path: pathlib.Path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"weights: \xff\xfe")
    with pytest.raises(ValueError, match=r"binary\.yaml: expected a readable text file in UTF-8"):
        config_file.load(path)


# The published sizes of the models, in millions of parameters; the small one by hand: embedding 4096 * 256; a layer
# 256 * (8 + 2 + 2 + 8) * 32 + 3 * 256 * 768 + 2 * 256; six layers and a norm of 256: 5,573,888.
SIZES = {
    "gqa_small": 5.574,
    "gqa_draft": 0.633,
    "smollm2_135m": 134.515,
    "gemma3_270m": 268.098,
    "llama3_8b": 8030.261,
    "llama3_70b": 70553.706,
}


def num_parameters(model: config.ModelConfig) -> int:
    width, head_dim = model.hidden_size, model.head_dim
    attention = width * head_dim * 2 * (model.num_heads + model.num_kv_heads) + 2 * head_dim * model.qk_norm
    layer = attention + 3 * width * model.intermediate_size + (4 if model.post_norms else 2) * width
    return model.vocab_size * width * (1 if model.tie_embeddings else 2) + layer * model.num_layers + width


@pytest.mark.parametrize("path", sorted(SHIPPED.glob("*.yaml")), ids=lambda path: path.stem)
def test_shipped_config_describes_its_model(path: pathlib.Path):
    run = config_file.load(path)
    assert run.name == path.stem and run.description and run.architecture is not None
    assert (run.weights is None) == (run.no_weights is not None)  # a refusal can say why
    assert num_parameters(run.architecture) / 1e6 == pytest.approx(SIZES[run.name], abs=5e-4)


def test_gemma_layers_alternate_five_local_to_one_global():
    model = config_file.load("gemma3_270m").architecture
    assert model is not None
    globals_at = [idx for idx, layer in enumerate(model.layers) if layer.window is None]
    assert globals_at == [5, 11, 17]
    assert {layer.window for layer in model.layers} == {512, None}
    assert {(layer.window, layer.rope.theta) for layer in model.layers if layer.rope} == {(512, 1e4), (None, 1e6)}


def test_run_config_can_be_changed_by_replace():
    run = config_file.load("smollm2_135m")
    assert dataclasses.replace(run, max_new_tokens=3).max_new_tokens == 3
    with pytest.raises(ValueError, match="max_new_tokens"):
        dataclasses.replace(run, max_new_tokens=0)


def test_half_a_letter_has_a_place():
    """It could be read, and not be written again."""
    with pytest.raises(ValueError, match=r"^f\.yaml: prompt: expected Unicode text, got a lone surrogate; remove it$"):
        config_file.loads('weights: x\nprompt: "\\ud800"', origin="f.yaml")


def test_a_number_over_every_float_has_a_place():
    text = f"weights: x\nsampling: {{temperature: 1{'0' * 400}}}"
    with pytest.raises(ValueError, match=r"^f\.yaml: sampling\.temperature: expected a number that a float"):
        config_file.loads(text, origin="f.yaml")
