"""What a run leaves for people: a JSON record of its losses, and the same as a picture."""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

RECORD_NAME = "training.json"
PLOT_NAME = "losses.png"


def write_json(path: pathlib.Path, record: Mapping[str, Any]) -> None:
    """Writes a record; a file of that name is replaced in one go."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    part.replace(path)


def write_plot(path: pathlib.Path, record: Mapping[str, Any]) -> bool:
    """Draws the losses over the tokens read, as PNG.

    Args:
      path: of the picture.
      record: as ``fit`` returns it.

    Returns:
      Whether it was drawn: matplotlib is an extra (``pip install 'jdecode[plot]'``).
    """
    try:
        from matplotlib import figure
    except ModuleNotFoundError:
        return False
    picture = figure.Figure(figsize=(8, 4.5), layout="constrained")
    axes = picture.add_subplot()
    train, held_out = record["history"], record["held_out"]
    axes.plot([entry["tokens"] for entry in train], [entry["loss"] for entry in train], label="training loss", lw=1)
    axes.plot(
        [entry["tokens"] for entry in held_out],
        [entry["nats_a_token"] for entry in held_out],
        label="next token, held-out files",
        marker="o",
    )
    axes.set(xlabel="tokens read", ylabel="nats a token")
    axes.set_title(record["config"]["name"], parse_math=False)  # a dollar sign is one
    axes.grid(alpha=0.3)
    axes.legend()
    picture.savefig(path, dpi=120)
    return True
