"""The card says what the record says."""

import copy
import dataclasses

from jdecode.training import model_card
from jdecode.training import task as task_lib
from tests.training import tiny_run

RECORD = {
    "config": task_lib.jsonable(
        dataclasses.asdict(
            dataclasses.replace(
                tiny_run.CONFIG, description="Some words.", limits="It knows\nlittle.\n", num_steps=1300
            )
        )
    ),
    "corpus": {
        "description": "some texts",
        "sha256": "abc123",
        "train_files": 9,
        "train_bytes": 12345,
        "train_tokens": 6789,
        "held_out_files": 4,
        "held_out_bytes": 2345,
        "held_out_tokens": 1234,
    },
    "start": {"weights": None},
    "history": [{"loss": 5.0}, {"loss": 1.23456}],
    "held_out": [],
    "command": "python -m jdecode.train --config tiny.yaml --output runs/tiny",
    "final": {
        "weight_dtype": "bfloat16",
        "num_parameters": 5432100,
        "num_tokens": 1234,
        "num_bytes": 2345,
        "nats_a_token": 2.34567,
        "perplexity": 10.4404,
        "bits_per_byte": 1.78053,
    },
}


def rows(text: str) -> dict[str, str]:
    cells = [line.strip("|").split("|") for line in text.splitlines() if line.startswith("| ")]
    return {name.strip(): value.strip() for name, value in cells if name.strip()}


def test_card():
    text = model_card.text(RECORD)
    assert text.startswith("# tiny\n\nSome words.\n")
    assert text.endswith("\n## Limits\n\nIt knows\nlittle.\n")
    found = rows(text)
    assert found["Parameters"] == "5,432,100, stored in bfloat16"
    assert found["Shape"].startswith(
        "2 layers (1 of them with a window of 4 tokens), width 12, 4 query heads over 2 key/"
    )
    assert "of width 6" in found["Shape"] and "290" in found["Shape"]
    assert found["Data"] == "some texts: 9 files, 12,345 bytes, 6,789 tokens (`.txt`)"
    assert found["Held out"].startswith("4 files, 2,345 bytes")
    assert found["Data digest"] == "SHA-256 `abc123`"
    assert found["Start"] == "fresh weights"
    # A step reads 2 * 3 sequences of 11 tokens: 66; 1,300 steps read 85,800.
    assert found["Training"] == "1,300 steps of 66 tokens (85,800 in all), sequences of 11, seed 5"
    assert found["Command"] == f"`{RECORD['command']}`"
    assert found["Last training loss"].startswith("1.235 ")
    assert found["Held-out loss"] == "2.346 nats a token, perplexity 10.44, **1.781 bits a byte**"
    assert "Teacher" not in found


def test_teacher_and_start():
    record = copy.deepcopy(RECORD)
    record["start"]["weights"] = "runs/before/model"
    record["config"]["distill"] |= {"temperature": 2.0, "teacher_share": 0.75, "generated_share": 0.4}
    record["teacher"] = {"name": "runs/small/model", "generated_tokens": 4321, "sequences_a_step": 3}
    found = rows(model_card.text(record))
    assert found["Start"] == "runs/before/model"
    assert found["Teacher"] == (
        "runs/small/model: divergence from its distributions at temperature 2, weight 0.75; 4,321 tokens of its own "
        "text, 50% of each batch"
    )
    record["teacher"] |= {"generated_tokens": 0, "sequences_a_step": 0}
    assert rows(model_card.text(record))["Teacher"].endswith("; 0 tokens of its own text, 0% of each batch")


def test_model_without_windows_or_limits():
    record = copy.deepcopy(RECORD)
    record["config"]["limits"] = ""
    for layer in record["config"]["architecture"]["layers"]:
        layer["window"] = None
    text = model_card.text(record)
    assert "## Limits" not in text
    assert rows(text)["Shape"].startswith("2 layers (none with a window), width 12")
