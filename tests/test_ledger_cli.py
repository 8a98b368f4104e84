"""``python -m jdecode.ledger``: figures that agree with a real cache, a table, a picture, refusals."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

import jdecode
from jdecode import ledger
from jdecode.parallel import known_devices

TINY_GGUF = str(pathlib.Path(__file__).parent / "golden" / "gguf" / "llama_gqa.f32.gguf")
TINY_CONFIG = """architecture: {{vocab_size: 9, hidden_size: 4, intermediate_size: 6, num_heads: 2, num_kv_heads: 1,
  head_dim: 2, layers: {{count: 3, pattern: [{{{layer}}}]}}}}
"""
LLAMA = ["--config", "llama3_8b.yaml", "--batch", "16", "--context", "4096", "--kv-dtype", "bfloat16"]


def run(capsys, *flags: str) -> dict:
    """Runs the command with ``--json``, and returns what it printed."""
    assert ledger.main([*flags, "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == "" and out.count("\n") == 1
    return json.loads(out, parse_constant=lambda name: pytest.fail(f"not JSON: {name}"))


def lines(capsys, *flags: str) -> list[str]:
    """Runs the command, and returns the lines of its table."""
    assert ledger.main(flags) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out.splitlines()


def refused(capsys, *flags: str) -> str:
    """Runs the command, and returns its one line on standard error."""
    try:
        status = ledger.main(flags)
    except SystemExit as ended:
        status = ended.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("jdecode.ledger: error: ") and err.count("\n") == 1
    return err.removeprefix("jdecode.ledger: error: ")


def test_llama3_8b(capsys):
    report = run(capsys, *LLAMA, "--weight-dtype", "bfloat16", "--memory", "h100-80gb")
    assert report["cache"]["kv_bytes"] == report["cache"]["kv_formula_bytes"] == 8 * 2**30
    assert report["cache"]["bytes"] == report["cache"]["formula_bytes"] == 8 * 2**30 + 4 * 16 * 4096 + 4 * 16
    assert [line["bytes"] for line in report["lines"]] == [8 * 2**30, 262_144, 64]
    # 2 · 32 layers · 8 heads · 128 · 2 bytes a token; 4,096 of them a request.
    assert (report["lines"][0]["bytes_a_token"], report["lines"][0]["bytes_a_request"]) == (131_072, 2**29)
    assert (report["lines"][0]["layers"], report["lines"][0]["slots"]) == (32, 4096)
    assert report["weights"]["parameters"] == 8_030_261_248
    # 80 GB without two bytes a parameter, in requests of 4,096 tokens with a position each, and a length.
    left = 80_000_000_000 - 2 * 8_030_261_248
    assert report["memory"]["left_bytes"] == left
    assert report["memory"]["requests"] == left // (2**29 + 4 * 4096 + 4) == 119
    assert report["memory"]["fits"] is True
    assert report["compare"] is None and report["notes"] == [
        "memory: logits, activations and the compiler's temporaries come on top of weights and cache"
    ]


def test_linear_in_batch_and_context_and_the_work_of_attention(capsys):
    half, whole, twice = run(capsys, *LLAMA)["growth"]
    assert [entry["context"] for entry in (half, whole, twice)] == [2048, 4096, 8192]
    for entry in (half, whole, twice):
        # A token of a request: 131,072 bytes and a position; a request: a length.
        assert entry["bytes"] == 16 * (131_076 * entry["context"] + 4)
        assert entry["bytes_of_twice_the_batch"] == 2 * entry["bytes"]
        # 32 layers, 16 rows, 32 heads of 128: four operations a number, query and key.
        of_a_pair = 32 * 16 * 4 * 32 * 128
        assert entry["decode_step"] == {
            "operations": of_a_pair * entry["context"],
            "read_bytes": 16 * 131_072 * entry["context"],
        }
        pairs = entry["context"] * (entry["context"] + 1) // 2
        assert entry["prefill"]["operations"] == of_a_pair * pairs
        chunks = entry["context"] // 512
        assert entry["prefill"]["read_bytes"] == 16 * 131_072 * 512 * chunks * (chunks + 1) // 2


def test_table(capsys):
    found = lines(capsys, *LLAMA, "--weight-dtype", "bfloat16")
    assert found[0] == "llama3_8b: 32 layers, 32 query heads, 8 key/value heads of width 128"
    assert found[1] == "16 requests of 4,096 tokens, cache in bfloat16"
    assert found[4].split() == [
        *("keys", "and", "values,", "full", "32", "4,096", "131,072", "536,870,912"),
        *("8,589,934,592", "8,589,934,592", "=", "2·32·16·4,096·8·128·2"),
    ]
    assert [line.split()[0] for line in found[5:8]] == ["positions,", "length", "all"]
    assert found[7].split()[1:] == ["536,887,300", "8,590,196,800", "8,590,196,800"]
    assert found[8].startswith("keys and values 8 GiB, by formula 8 GiB; ")
    assert "weights in bfloat16: 8,030,261,248 parameters, 14.96 GiB" in found
    readme = (pathlib.Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")
    assert "\n".join(found[3:9]) in readme
    ratios = next(line for line in found if line.startswith("from 4,096 to 8,192 tokens: "))
    assert ratios.split(": ", 1)[1] == "cache x 2.00, a step x 2.00, a prefill x 4.00; twice the batch: cache x 2.00"


@pytest.mark.parametrize(
    "flags",
    [
        [],
        ["--kv-dtype", "bfloat16"],
        ["--kv-dtype", "int8"],
        ["--kv-dtype", "fp8"],
        ["--kv-dtype", "int4"],
        ["--layout", "full"],
        ["--slack", "3"],
    ],
)
def test_is_what_a_loaded_model_allocates(flags, capsys):
    lm = jdecode.load("gqa_small")
    report = run(capsys, "--config", "gqa_small.yaml", "--batch", "3", "--context", "200", *flags)
    given = dict(zip((flag.removeprefix("--") for flag in flags[::2]), flags[1::2], strict=True))
    cache = jdecode.CacheConfig(
        dtype=given.get("kv-dtype", "auto"), layout=given.get("layout", "auto"), slack=int(given.get("slack", 0))
    )
    assert report["cache"]["bytes"] == lm.init_cache(batch_size=3, capacity=200, cache=cache).num_bytes
    assert report["weights"]["bytes"] == lm.weight_bytes
    assert report["weights"]["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(lm.params))


def test_weights_give_their_own_shapes(capsys):
    report = run(capsys, "--weights", TINY_GGUF, "--context", "9")
    lm = jdecode.load(TINY_GGUF)
    assert report["cache"]["bytes"] == lm.init_cache(batch_size=1, capacity=9).num_bytes
    assert report["name"] == TINY_GGUF and report["batch"] == 1
    assert run(capsys, "--weights", TINY_GGUF)["context"] == lm.config.max_positions


def test_rings_and_a_window_that_is_asked_for(capsys):
    gemma = ["--config", "gemma3_270m.yaml", "--context", "8192", "--weight-dtype", "bfloat16"]
    own = run(capsys, *gemma)
    # 15 local layers of 512 slots and 3 of all, a head of 256, in two bytes, for keys and for values.
    slot = 2 * 256 * 2
    assert own["cache"]["kv_bytes"] == slot * (15 * 512 + 3 * 8192)
    assert [(line["layout"], line["layers"], line["slots"]) for line in own["lines"][:2]] == [
        ("ring(window=512)", 15, 512),
        ("full", 3, 8192),
    ]
    asked = run(capsys, *gemma, "--window", "1000", "--sinks", "5", "--slack", "2")
    assert asked["cache"]["kv_bytes"] == slot * (15 * 514 + 3 * 1007)
    assert (asked["window"], asked["sinks"]) == (1000, 5)
    assert not [note for note in asked["notes"] if note.startswith("--window")]
    wide = run(capsys, *gemma, "--window", "9000")
    assert wide["cache"]["kv_bytes"] == own["cache"]["kv_bytes"]
    assert [note for note in wide["notes"] if note.startswith("--window 9000: ")]
    assert (
        "what if layers without a window had one of 1,000 and 5 sinks"
        in lines(capsys, *gemma, "--window", "1000", "--sinks", "5")[1]
    )


def test_mesh_that_divides_and_one_that_does_not(capsys):
    flags = [*LLAMA, "--weight-dtype", "bfloat16", "--mesh"]
    whole = run(capsys, *flags, "data=2,model=8")
    # 8 rows and one head a device; tables are split along data alone.
    assert whole["lines"][0]["device_bytes"] == 2**33 // 16
    assert whole["cache"]["device_bytes"] == 2**33 // 16 + 4 * 8 * 4096 + 4 * 8
    assert whole["lines"][0]["split"] == ["data", "model"] and whole["lines"][1]["split"] == ["data"]
    assert not [note for note in whole["notes"] if note.startswith("mesh")]
    odd = run(capsys, *flags, "data=3,model=16")
    assert odd["cache"]["device_bytes"] == odd["cache"]["bytes"]
    assert odd["notes"][:2] == [
        "mesh: data=3 does not divide 16 rows, so every device along it holds all rows",
        "mesh: model=16 does not divide 8 key/value heads, so keys and values stay whole along it",
    ]
    found = lines(capsys, *flags, "data=2,model=8")
    table = found[found.index("each of 16 devices, data=2 x model=8") :]
    assert table[2].split("  ")[-1] == "536,870,912" and "data and model" in table[2]
    assert [line for line in lines(capsys, *flags, "data=1,model=16") if "nothing: whole" in line]


def test_memory_of_a_tpu_counts_its_padding(capsys):
    flags = ["--config", "smollm2_135m.yaml", "--batch", "4", "--context", "8192"]
    report = run(capsys, *flags, "--memory", "v5e")
    assert report["kv_dtype"] == report["weight_dtype"] == "bfloat16"  # what a TPU is given
    # Rows of 192 numbers take 256: a third more.
    assert report["cache"]["tpu_device_bytes"] == 4 * 2 * 30 * 8192 * 256 * 2 + 4 * 4 * 8192 + 512
    left = 2**34 - report["weights"]["bytes"]
    assert report["memory"]["requests"] == 67
    assert 67 * 2 * 30 * 8192 * 256 * 2 <= left < 69 * 2 * 30 * 8192 * 256 * 2
    assert any("pad this cache by 240.00 MiB a device (33.3 %)" in note for note in report["notes"])
    on_cpu = run(capsys, *flags, "--memory", "colab-cpu")
    assert on_cpu["kv_dtype"] == on_cpu["weight_dtype"] == "float32"


def test_notes(capsys):
    report = run(capsys, *LLAMA[:4], "--context", "9000")
    assert any("9,000 tokens are more than the 8,192 that the model was trained for" in n for n in report["notes"])
    assert any(note.startswith("slots: ") and "reserves 10,240 for 9,000" in note for note in report["notes"])
    small = run(capsys, "--config", "gqa_small.yaml", "--context", "1")
    assert [entry["context"] for entry in small["growth"]] == [1, 2]
    assert lines(capsys, "--config", "gqa_small.yaml", "--context", "1")[1].startswith("1 request of 1 tokens")


def test_eviction(capsys):
    flags = [*LLAMA, "--kv-dtype", "bfloat16", "--eviction", "snapkv", "--cache-budget", "1000", "--new-tokens", "96"]
    report = run(capsys, *flags)
    assert (report["eviction"], report["budget"], report["new_tokens"]) == ("snapkv", 1000, 96)
    # 16 requests of 1,000 + 96 slots, and of 4,000 for a prompt; a table a layer of 32, and one for all.
    cache = 16 * (131_072 * 1096 + 32 * 4 * 1096 + 4)
    prompt = 16 * (131_072 * 4000 + 4 * 4000 + 4)
    assert (report["cache"]["bytes"], report["cache"]["prompt_bytes"]) == (cache, prompt)
    assert [line["layout"] for line in report["lines"]][:2] == ["kept(num_kept=1000, num_new=96)"] * 2
    (note,) = [note for note in report["notes"] if note.startswith("eviction:")]
    assert "a prompt of 4,000 tokens" in note and "7.81 GiB" in note and "9.96 GiB" in note
    # A run has room for 4,096 tokens of a prompt and for 128 new ones.
    assert note.endswith("takes 8.00 GiB and then 2.21 GiB")
    # A step reads all slots of a layer; a prefill all that a plain one does.
    step, prefill = report["growth"][1]["decode_step"], report["growth"][1]["prefill"]
    assert step["operations"] == 16 * 4 * 32 * 128 * 32 * 1096
    assert prefill == run(capsys, *LLAMA, "--kv-dtype", "bfloat16")["growth"][1]["prefill"]
    small = run(capsys, *LLAMA, "--eviction", "h2o", "--cache-budget", "4096")
    assert [note for note in small["notes"] if "so every token is kept" in note]


def test_new_tokens_leave_room_for_a_prompt(capsys):
    evicting = [*LLAMA[:2], "--eviction", "snapkv", "--cache-budget", "10"]
    # Unless said, those of the config (64), but for one token of the prompt; none where nothing is evicted.
    for context, usual in (("100", 64), ("65", 64), ("64", 63), ("2", 1)):
        assert run(capsys, *evicting, "--context", context)["new_tokens"] == usual
    assert run(capsys, *LLAMA)["new_tokens"] is None
    most = run(capsys, *evicting, "--context", "100", "--new-tokens", "99")
    assert most["new_tokens"] == 99
    for given in ("100", "101"):
        assert refused(capsys, *evicting, "--context", "100", "--new-tokens", given) == (
            "--new-tokens: expected fewer than the context of 100 tokens, which has the prompt too, got "
            f"{given}; give fewer, or a longer --context\n"
        )
    # The context may be the model's own.
    assert "the context of 8192 tokens" in refused(capsys, *evicting, "--new-tokens", "8192")


def test_compare_and_plot(tmp_path: pathlib.Path, capsys):
    plot = tmp_path / "memory.png"
    plot.write_bytes(b"an older picture")
    flags = [*LLAMA, "--weight-dtype", "bfloat16", "--memory", "80GB", "--compare"]
    report = run(capsys, *flags, "--plot", str(plot))
    assert plot.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    heads, dtypes, windows, pages, prefixes, evictions, prompts, lent, attention = report["compare"]
    assert [variant["factor"] for variant in heads["variants"]] == [0.25, 1, 2, 4, 8]
    assert [variant["allocated_bytes"] / 2**30 for variant in heads["variants"]] == [32, 8, 4, 2, 1]
    planned = [variant for way in report["compare"] for variant in way["variants"] if variant["is_planned"]]
    assert [variant["requests"] for variant in planned] == [119] * 4 + [None] + [119] * 3 + [None]
    # 1,024 of 4,096 tokens and 512 new ones, or 1,024 with 4 bytes a slot beside 131,072 a token.
    sizes = [16 * 131_072 * 1536, 16 * (131_072 + 32 * 4) * 1024]
    assert [variant["formula_bytes"] for variant in evictions["variants"][1:]] == sizes
    assert {variant["name"]: variant["factor"] for variant in dtypes["variants"]}["float32"] == 0.5
    # A quarter of the context and four sinks, unless said.
    assert windows["variants"][-1]["formula_bytes"] == 16 * 131_072 * (1024 + 4)
    # Four samples of each of 16 prompts: 64 rows of 64 pages, of which the 32 of a prompt are held once.
    assert [variant["factor"] for variant in pages["variants"]] == [1, 1, 0.25, 64 / (32 + 4 * 32)]
    # 2,048 of 4,096 tokens read: half of the products with the weights, three quarters of attention's pairs.
    weights, pairs = report["weights"]["operations_a_token"], (4096 * 4097 // 2, 2048 * 2049 // 2)
    works = [16 * (4096 * weights + 32 * 4 * 32 * 128 * pairs[0])]
    works.append(16 * (2048 * weights + 32 * 4 * 32 * 128 * (pairs[0] - pairs[1])))
    assert [variant["operations"] for variant in prefixes["variants"]] == works
    assert prefixes["variants"][1]["factor"] == works[0] / works[1]
    assert prefixes["variants"][0]["allocated_bytes"] is None
    assert [variant["factor"] for variant in prompts["variants"]] == [1, 2, 4]
    assert [variant["factor"] for variant in lent["variants"]] == [1, 2]
    assert attention["variants"][0]["formula_bytes"] == 4 * 16 * 32 * 512 * 4096
    found = lines(capsys, *flags, "--sinks", "9")
    (heading,) = [line for line in found if line.startswith("a prefix cache:")]
    assert heading.split()[-2:] == ["operations", "factor"]
    assert max(map(len, found)) <= 130
    for way in report["compare"]:
        assert [line for line in found if line.startswith(f"{way['name']}:")]
    assert [line for line in found if "had a window of 1,024 and 9 sinks" in line]
    # One head of 8 less takes 32 layers · 7 heads · 128 · 4,096 · 2 parameters, of keys and of values, away.
    assert [line.split()[-4:] for line in found if line.startswith("  1 head, multi-query")] == [
        ["1,073,741,824", "1,073,741,824", "8.00", str((80 * 10**9 - 2 * 7_795_380_224) // (2**26 + 4 * 4097))]
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "no model: expected --config or --weights, got neither"),
        (["--config", "lama3_8b"], "config 'lama3_8b': no such file"),
        (["--config", ""], "argument --config: expected some text"),
        ([*LLAMA, "--batch", "0"], "argument --batch: expected a whole number from 1"),
        ([*LLAMA, "--context", "-4"], "argument --context: expected a whole number from 1"),
        ([*LLAMA, "--kv-dtype", "float12"], "argument --kv-dtype: expected one of auto, float32"),
        ([*LLAMA, "--mesh", "data=0"], "argument --mesh: expected axes such as data=1,model=8"),
        ([*LLAMA, "--memory", "h200"], "argument --memory: expected a size such as 16GiB or the name of a device"),
        ([*LLAMA, "--memory", "14GiB", "--weight-dtype", "bfloat16"], "--memory 14GiB: expected at least 14.96 GiB"),
        ([*LLAMA, "--sinks", "4"], "--sinks: expected --window or --compare beside it"),
        ([*LLAMA, "--window", "9", "--layout", "full"], "--window: expected --layout auto"),
        ([*LLAMA, "--eviction", "h2o"], "--eviction: expected --cache-budget beside it"),
        (
            [*LLAMA, "--eviction", "h2o", "--cache-budget", "9", "--window", "8"],
            "--eviction h2o: expected layers without",
        ),
        ([*LLAMA, "--new-tokens", "9"], "--new-tokens: acts on --eviction, and there is none"),
        ([*LLAMA, "--slack", "4"], "--slack: expected layers with windows, in rings, got none"),
        ([*LLAMA, "--window", "0"], "argument --window: expected a whole number from 1"),
        ([*LLAMA, "--plot", "memory.svg"], "--plot memory.svg: expected a name that ends in .png"),
        ([*LLAMA, "--plot", "absent/memory.png"], "--plot absent/memory.png: expected a folder absent"),
        ([*LLAMA, "--weights", TINY_GGUF], f"--weights {TINY_GGUF}: config llama3_8b expected "),
        (["--weights", "absent.gguf"], "absent.gguf: expected a folder, a .gguf file"),
        ([*LLAMA, "--unknown"], "unrecognized arguments: --unknown"),
    ],
)
def test_mistake_is_one_line(flags: list[str], message: str, capsys):
    assert refused(capsys, *flags).startswith(message)


def test_unknown_device_lists_the_known_ones(capsys):
    message = refused(capsys, *LLAMA, "--memory", "a100")
    assert all(device.name in message for device in known_devices.DEVICES)


def test_window_where_every_layer_has_one(tmp_path: pathlib.Path, capsys):
    config = tmp_path / "local.yaml"
    text = TINY_CONFIG.format(layer="window: 4")
    config.write_text(text)
    assert "expected a model with layers that have no window" in refused(
        capsys, "--config", str(config), "--window", "9"
    )
    config.write_text(text + "cache: {layout: full}")
    assert run(capsys, "--config", str(config))["layout"] == "full"


def test_pages(tmp_path: pathlib.Path, capsys):
    own = run(capsys, *LLAMA, "--layout", "paged", "--page-len", "16", "--context", "4090")
    assert (own["layout"], own["lines"][0]["layout"], own["lines"][0]["slots"]) == ("paged", "paged(page_len=16)", 4096)
    config = tmp_path / "paged.yaml"
    config.write_text(TINY_CONFIG.format(layer="") + "cache: {layout: paged, page_len: 8}")
    assert run(capsys, "--config", str(config))["lines"][0]["layout"] == "paged(page_len=8)"
    assert run(capsys, "--config", str(config), "--layout", "full")["lines"][0]["layout"] == "full"
    assert "page_len: expected none beside layout auto" in refused(capsys, *LLAMA, "--page-len", "16")
    assert "expected a mesh with data=1" in refused(capsys, *LLAMA, "--layout", "paged", "--mesh", "data=2")


def test_layout_of_the_config_is_no_ring(tmp_path: pathlib.Path, capsys):
    config = tmp_path / "full.yaml"
    config.write_text(TINY_CONFIG.format(layer="") + "cache: {layout: full, dtype: float16}\nmesh: {data: 2}")
    flags = ["--config", str(config), "--window", "9"]
    assert "--window: expected the layout auto, got full of the config; add --layout auto" in refused(capsys, *flags)
    report = run(capsys, *flags, "--layout", "auto", "--batch", "2")
    assert (report["kv_dtype"], report["mesh"]) == ("float16", {"data": 2, "model": 1})


def test_config_of_weights_alone(tmp_path: pathlib.Path, capsys):
    config = tmp_path / "mine.yaml"
    config.write_text(f"weights: {TINY_GGUF}")
    message = refused(capsys, "--config", str(config))
    assert message.startswith("config mine: expected an architecture, got weights alone; add --weights ")
    assert run(capsys, "--config", str(config), "--weights", TINY_GGUF)["name"] == "mine"


def test_plot_without_matplotlib_names_the_extra(tmp_path, capsys, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    message = refused(capsys, *LLAMA, "--plot", str(tmp_path / "memory.png"))
    assert "matplotlib" in message and "jdecode[plot]" in message
    assert not list(tmp_path.iterdir())


def test_help_and_usage_errors_need_no_jax():
    program = "import sys, jdecode.ledger as door; door.build_parser().format_help(); assert 'jax' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_plan_takes_hold_of_no_device():
    program = (
        "from jdecode import ledger\n"
        "flags = '--config llama3_8b --memory h100-80gb --mesh data=2,model=8 --batch 4'.split()\n"
        "assert ledger.main(flags) == 0\n"
    )
    environment = {**os.environ, "JAX_PLATFORMS": "absent"}  # no device could be found
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
