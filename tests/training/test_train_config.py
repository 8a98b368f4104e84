"""Training configs: the shipped ones, where they are looked up, and what they refuse."""

import dataclasses
import pathlib

import pytest

from jdecode import config_file
from jdecode.training import train_config
from tests.training import tiny_run


def load(name: str) -> train_config.TrainConfig:
    return config_file.load(name, train_config.TrainConfig, "training")


@pytest.mark.parametrize("name", config_file.available("training"))
def test_shipped_configs(name):
    config = load(name)
    assert config.name == pathlib.PurePath(name).stem
    assert config.description and config.corpus.source == train_config.STANDARD_LIBRARY
    assert config.sequence_len <= config.architecture.max_positions
    # What is trained is what the config of the same name runs.
    assert config_file.load(name).architecture == config.architecture
    hash(config)  # static arguments of jitted functions


def test_training_configs_lie_in_a_folder_of_their_own(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """``--config gqa_small`` trains by one file and generates by another of the same name."""
    text = (
        "description: {}\narchitecture: {{vocab_size: 290, hidden_size: 12, intermediate_size: 20, num_heads: 4, "
        "num_kv_heads: 2, head_dim: 6, layers: [{{}}]}}\n"
    )
    monkeypatch.chdir(tmp_path)
    for folder in ("configs/training", "configs"):
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        pathlib.Path(folder, "mine.yaml").write_text(text.format(folder))
    assert load("mine").description == load("mine.yaml").description == "configs/training"
    assert load("configs/mine.yaml").description == "configs"  # as given
    with pytest.raises(FileNotFoundError, match=r"in \./configs/training or in the package; did you mean mine\.yaml\?"):
        load("mime")


@pytest.mark.parametrize(
    ("cls", "changes", "message"),
    [
        (train_config.CorpusConfig, {"source": ""}, "corpus source: expected standard_library or a folder"),
        (train_config.CorpusConfig, {"suffixes": ()}, "corpus suffixes: expected at least one, got none"),
        (train_config.CorpusConfig, {"suffixes": (".py", "txt")}, "such as .txt, got 'txt'"),
        (train_config.CorpusConfig, {"held_out_share": 0.0}, "held_out_share: expected a number over 0 and under 1"),
        (train_config.CorpusConfig, {"held_out_share": 1.0}, "held_out_share: expected a number over 0 and under 1"),
        (
            train_config.OptimizerConfig,
            {"learning_rate": 0.0},
            "learning_rate: expected a finite number over",
        ),
        (
            train_config.OptimizerConfig,
            {"learning_rate": float("inf")},
            "learning_rate: expected a finite number over",
        ),
        (
            train_config.OptimizerConfig,
            {"learning_rate": float("nan")},
            "learning_rate: expected a finite number over",
        ),
        (train_config.OptimizerConfig, {"epsilon": 0.0}, "epsilon: expected a finite number over 0"),
        (train_config.OptimizerConfig, {"warmup_steps": -1}, "warmup_steps: expected a count of at least 0, got -1"),
        (train_config.OptimizerConfig, {"final_share": 1.5}, "final_share: expected a number from 0 to 1, got 1.5"),
        (train_config.OptimizerConfig, {"weight_decay": -0.1}, "weight_decay: expected a number from 0 to 10"),
        (train_config.OptimizerConfig, {"beta1": 1.0}, "beta1: expected a number from 0 to under 1, got 1.0"),
        (train_config.OptimizerConfig, {"beta2": -0.1}, "beta2: expected a number from 0 to under 1"),
        (
            train_config.OptimizerConfig,
            {"clip_norm": 0.0},
            "clip_norm: expected a finite number over 0 or null",
        ),
        (
            train_config.DistillConfig,
            {"temperature": 0.0},
            "distill temperature: expected a finite number over",
        ),
        (train_config.DistillConfig, {"teacher_share": 1.1}, "teacher_share: expected a number from 0 to 1, got 1.1"),
        (train_config.DistillConfig, {"generated_share": -1.0}, "generated_share: expected a number from 0 to 1"),
        (train_config.DistillConfig, {"generated_tokens": 1.5}, "generated_tokens: expected a count of at least 0"),
        (
            train_config.DistillConfig,
            {"generated_temperature": -1.0},
            "generated_temperature: expected a finite",
        ),
        (train_config.OptimizerConfig, {"epsilon": float("inf")}, "epsilon: expected a finite number over 0, got inf"),
        (train_config.OptimizerConfig, {"clip_norm": float("inf")}, "clip_norm: expected a finite number over 0"),
        (dataclasses.replace, {"seed": 2**31}, "seed: expected a count up to 2147483647, got 2147483648"),
        (dataclasses.replace, {"batch_size": 2**31}, "batch_size: expected up to 2147483647 tokens a step, got "),
        (dataclasses.replace, {"num_steps": 2**31}, "num_steps: expected up to 2147483647 sequences in all, got "),
        (dataclasses.replace, {"sequence_len": 2049}, "sequence_len: expected at most the architecture's max_pos"),
        (dataclasses.replace, {"batch_size": 0}, "batch_size: expected a count of at least 1, got 0"),
        (dataclasses.replace, {"num_steps": True}, "num_steps: expected a count of at least 1, got True"),
        (dataclasses.replace, {"sequence_len": 1}, "sequence_len: expected a count of at least 2, got 1"),
        (dataclasses.replace, {"seed": -1}, "seed: expected a count of at least 0, got -1"),
        (dataclasses.replace, {"weight_dtype": "int8"}, "weight_dtype: expected one of float32, bfloat16, float16"),
        (dataclasses.replace, {"num_steps": 2}, "warmup_steps: expected fewer than num_steps 2, got 2"),
    ],
)
def test_refused_values(cls, changes, message):
    with pytest.raises(ValueError) as refused:
        cls(tiny_run.CONFIG, **changes) if cls is dataclasses.replace else cls(**changes)
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_sequences_a_step():
    assert tiny_run.CONFIG.sequences_a_step == 2 * 3
