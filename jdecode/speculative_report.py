"""The outcome of ``speculative_bench`` for people: a table, and a picture."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

_COLUMNS = (
    *("γ", "tokens/s", "tokens a round", "α", "v", "rest"),
    *("measured", "predicted", "by place", "v = 1", "operations"),
)
_NOTE = (
    "measured: tokens/s over plain decoding's; predicted: (1 - α^(γ+1)) / ((1 - α)(γc + v)); by place: with a rate\n"
    "for each place, not one α; v = 1: as predicted, if a block cost a plain step (Leviathan et al. 2023)\n"
    "v, rest: plain steps of a round that are the target's block, and that are neither it nor the draft's steps;\n"
    "operations: arithmetic of the models a token, over plain decoding's"
)


def table(report: Mapping[str, Any]) -> str:
    """Lays a report out as text, without a line end after it."""
    plain, best = report["plain"], report["best"]
    step = f"plain decoding {plain['tokens_per_second']:.1f} tokens/s"
    if plain["bandwidth_share"] is not None:
        bandwidth = plain["bandwidth_bytes_per_second"] / 1e9
        step += f", {100 * plain['bandwidth_share']:.0f} % of the memory's {bandwidth:.1f} GB/s"
    one = "a look-up" if report["draft"] == "ngram" else "a draft step"
    sampling = report["sampling"]
    rows = [_row(block) for block in [*report["blocks"], report["adaptive"]]]
    rows[-1][0] = f"≤ {rows[-1][0]}"
    places = " ".join(_number(rate) for rate in report["blocks"][-1]["acceptance_by_place"])
    return "\n".join(
        [
            f"{report['target']} with the draft {report['draft']}, {report['verify']}, temperature "
            f"{sampling['temperature']:g}, seed {report['seed']}",
            f"{report['prompt_tokens']} tokens of prompt, {report['new_tokens']} new ones, "
            f"median of {report['rounds']} rounds",
            f"{step}; {one} costs c = {report['cost_ratio']:.3f} plain steps",
            "",
            *_lines([_COLUMNS, *rows]),
            "",
            f"accepted by place of γ = {report['blocks'][-1]['num_draft_tokens']}: {places}",
            f"best γ: {best['measured']} as measured, {best['predicted']} as predicted, {best['leviathan']} with v = 1 "
            "(0: plain decoding)",
            _NOTE,
        ]
    )


def _row(block: Mapping[str, Any]) -> list[str]:
    gains = block["speed_up"]
    return [
        str(block["num_draft_tokens"]),
        f"{block['tokens_per_second']:.1f}",
        f"{block['tokens_a_round']:.2f}",
        _number(block["acceptance_rate"]),
        _number(block.get("block_cost")),
        _number(block.get("other_cost")),
        *(_number(gains.get(name)) for name in ("measured", "predicted", "predicted_by_place", "leviathan")),
        _number(block.get("operations_factor")),
    ]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _lines(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) for row in rows]


def write_plot(path: pathlib.Path, report: Mapping[str, Any]) -> None:
    """Draws speed over γ, and acceptance over the places of the longest block, as PNG; a file there is replaced."""
    from matplotlib import figure, ticker

    picture = figure.Figure(figsize=(10, 4.5), layout="constrained")
    speed, places = picture.subplots(1, 2)
    blocks = report["blocks"]
    gammas = [block["num_draft_tokens"] for block in blocks]
    styles = {
        "measured": ("measured", "o-"),
        "predicted": ("predicted from α, c and v", "s--"),
        "predicted_by_place": ("predicted from rates by place, c and v", "^:"),
        "leviathan": ("predicted with v = 1", "x:"),
    }
    for name, (label, style) in styles.items():
        speed.plot(gammas, [block["speed_up"][name] for block in blocks], style, label=label)
    speed.axhline(1, color="black", lw=1, label="plain decoding")
    adaptive = report["adaptive"]
    speed.plot([gammas[-1]], [adaptive["speed_up"]["measured"]], "D", label="measured, adaptive")
    speed.set(xlabel="γ, proposals a round", ylabel="speed, plain decoding = 1", ylim=(0, None))
    rates = blocks[-1]["acceptance_by_place"]
    places.bar(range(1, len(rates) + 1), [rate or 0 for rate in rates])
    if blocks[-1]["acceptance_rate"] is not None:
        places.axhline(blocks[-1]["acceptance_rate"], color="black", lw=1, label="α, all places")
        places.legend()
    places.set(xlabel=f"place in the block, γ = {gammas[-1]}", ylabel="accepted of those tested", ylim=(0, 1))
    for axes in (speed, places):
        axes.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
        axes.grid(alpha=0.3)
    speed.legend()
    picture.suptitle(f"{report['target']} with the draft {report['draft']}", parse_math=False)  # a dollar sign is one
    picture.savefig(path, dpi=120, format="png")
