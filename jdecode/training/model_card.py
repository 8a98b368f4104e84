"""The card beside a model's weights: what it learned from, how, how well, and where it ends."""

from collections.abc import Mapping
from typing import Any

NAME = "README.md"


def text(record: Mapping[str, Any]) -> str:
    """Writes the card.

    Args:
      record: complete, as ``export`` makes it.

    Returns:
      Markdown.
    """
    config, corpus, final = record["config"], record["corpus"], record["final"]
    model = config["architecture"]
    windows = [layer["window"] for layer in model["layers"]]
    num_rings = sum(window is not None for window in windows)
    rings = f"{num_rings} of them with a window of {_list(windows)} tokens" if num_rings else "none with a window"
    tokens = config["num_steps"] * config["batch_size"] * config["accumulation_steps"] * config["sequence_len"]
    teacher = record.get("teacher")
    lines = [
        f"# {config['name']}",
        "",
        config["description"],
        "",
        "| | |",
        "|---|---|",
        f"| Parameters | {final['num_parameters']:,}, stored in {final['weight_dtype']} |",
        f"| Shape | {len(windows)} layers ({rings}), width {model['hidden_size']}, {model['num_heads']} query heads "
        f"over {model['num_kv_heads']} key/value heads of width {model['head_dim']}, {model['vocab_size']:,} tokens |",
        f"| Data | {corpus['description']}: {corpus['train_files']} files, {corpus['train_bytes']:,} bytes, "
        f"{corpus['train_tokens']:,} tokens (`{'`, `'.join(config['corpus']['suffixes'])}`) |",
        f"| Held out | {corpus['held_out_files']} files, {corpus['held_out_bytes']:,} bytes, chosen by a hash of their "
        "names |",
        f"| Data digest | SHA-256 `{corpus['sha256']}` |",
        f"| Start | {record['start']['weights'] or 'fresh weights'} |",
        *([f"| Teacher | {_teacher(teacher, config)} |"] if teacher else []),
        f"| Training | {config['num_steps']:,} steps of {tokens // config['num_steps']:,} tokens ({tokens:,} in all), "
        f"sequences of {config['sequence_len']}, seed {config['seed']} |",
        f"| Command | `{record['command']}` |",
        f"| Last training loss | {record['history'][-1]['loss']:.3f} (mean of the last steps) |",
        f"| Held-out loss | {final['nats_a_token']:.3f} nats a token, perplexity {final['perplexity']:.2f}, "
        f"**{final['bits_per_byte']:.3f} bits a byte** |",
        "",
        "All losses are in `training.json`. The model was trained on texts of up to "
        f"{config['sequence_len']:,} tokens; what it writes beyond that is not to be trusted.",
    ]
    if config["limits"]:
        lines += ["", "## Limits", "", config["limits"].strip()]
    return "\n".join(lines) + "\n"


def _list(windows: list[int | None]) -> str:
    return ", ".join(str(window) for window in sorted({window for window in windows if window is not None}))


def _teacher(teacher: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    distill = config["distill"]
    share = teacher["sequences_a_step"] / (config["batch_size"] * config["accumulation_steps"])
    return (
        f"{teacher['name']}: divergence from its distributions at temperature {distill['temperature']:g}, weight "
        f"{distill['teacher_share']:g}; {teacher['generated_tokens']:,} tokens of its own text, {share:.0%} of each "
        "batch"
    )
