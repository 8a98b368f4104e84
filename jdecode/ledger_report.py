"""The figures of ``ledger_figures`` for people: a table, and a picture."""

import pathlib
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jdecode.parallel import known_devices

WIDTH = 118
"""Characters of a line of words; a table's may be longer."""

_COLUMNS = ("cache", "layers", "slots", "a token", "a request", "allocated", "formula", "")
_GROWTH_COLUMNS = ("context", "cache", "twice the batch", "a step: operations", "read", "a prefill: operations", "read")
_FORMULA = "formula: keys and values 2·L·B·S·K·H·b, positions B·S·4, length B·4"


def table(report: Mapping[str, Any]) -> str:
    """Lays a report out as text, without a line end after it."""
    lines = [*_heading(report), "", *_cache(report), "", *_weights(report)]
    if report["mesh"] != {"data": 1, "model": 1}:
        lines += ["", *_devices(report)]
    lines += ["", *_growth(report)]
    for way in report["compare"] or ():
        lines += ["", *_way(way)]
    if report["notes"]:
        lines += ["", *(line for note in report["notes"] for line in _wrapped(note))]
    return "\n".join(lines)


def _heading(report: Mapping[str, Any]) -> list[str]:
    model = report["model"]
    shape = (
        f"{model['num_layers']} layers, {model['num_heads']} query heads, {model['num_kv_heads']} key/value heads of "
        f"width {model['head_dim']}"
    )
    batch = report["batch"]
    asked = f"{batch:,} request{'s'[: batch > 1]} of {report['context']:,} tokens, cache in {report['kv_dtype']}"
    if report["window"] is not None:
        sinks = f" and {report['sinks']} sinks" if report["sinks"] else ""
        asked += f"; what if layers without a window had one of {report['window']:,}{sinks}"
    return [f"{report['name']}: {shape}", asked]


def _cache(report: Mapping[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [_COLUMNS]
    for line in report["lines"]:
        rows.append(
            (
                ", ".join(filter(None, (line["name"], line["layout"]))),
                _count(line["layers"] or None),
                _count(line["slots"] or None),
                _count(line["bytes_a_token"]),
                _count(line["bytes_a_request"]),
                _count(line["bytes"]),
                _count(line["formula_bytes"]),
                "" if line["formula"] is None else f"= {line['formula']}",
            )
        )
    cache = report["cache"]
    sums = (_count(cache["bytes_a_request"]), _count(cache["bytes"]), _count(cache["formula_bytes"]))
    rows.append(("all", "", "", "", *sums, ""))
    size = known_devices.size_text
    return [
        *_lines(rows, left=(0, 7)),
        f"keys and values {size(cache['kv_bytes'])}, by formula {size(cache['kv_formula_bytes'])}; with tables and "
        f"lengths {size(cache['bytes'])}, or {size(cache['bytes_a_request'])} a request",
        _FORMULA,
    ]


def _weights(report: Mapping[str, Any]) -> list[str]:
    weights, memory, size = report["weights"], report["memory"], known_devices.size_text
    lines = [f"weights in {report['weight_dtype']}: {weights['parameters']:,} parameters, {size(weights['bytes'])}"]
    if memory is not None:
        fits = "fits" if memory["fits"] else "does not fit"
        lines.append(
            f"{memory['name']}: {size(memory['bytes'])} a device, {size(memory['left_bytes'])} beside the weights: "
            f"{memory['requests']:,} requests of {report['context']:,} tokens; this batch {fits}"
        )
    return lines


def _devices(report: Mapping[str, Any]) -> list[str]:
    mesh = report["mesh"]
    rows: list[tuple[str, ...]] = [("a device", "split along", "bytes")]
    for line in report["lines"]:
        name = ", ".join(filter(None, (line["name"], line["layout"])))
        rows.append((name, " and ".join(line["split"]) or "nothing: whole", _count(line["device_bytes"])))
    rows.append(("all of the cache", "", _count(report["cache"]["device_bytes"])))
    rows.append(("weights", "", _count(report["weights"]["device_bytes"])))
    return [
        f"each of {mesh['data'] * mesh['model']} devices, data={mesh['data']} x model={mesh['model']}",
        *_lines(rows),
    ]


def _growth(report: Mapping[str, Any]) -> list[str]:
    rows: list[Sequence[str]] = [_GROWTH_COLUMNS]
    size = known_devices.size_text
    for entry in report["growth"]:
        step, whole = entry["decode_step"], entry["prefill"]
        rows.append(
            (
                f"{entry['context']:,}",
                size(entry["bytes"]),
                size(entry["bytes_of_twice_the_batch"]),
                _operations(step["operations"]),
                size(step["read_bytes"]),
                _operations(whole["operations"]),
                size(whole["read_bytes"]),
            )
        )
    first, last = report["growth"][-2:] if len(report["growth"]) > 1 else report["growth"] * 2
    ratios = (
        f"from {first['context']:,} to {last['context']:,} tokens: cache x {_ratio(first, last, 'bytes')}, a step "
        f"x {_ratio(first['decode_step'], last['decode_step'], 'operations')}, a prefill "
        f"x {_ratio(first['prefill'], last['prefill'], 'operations')}; twice the batch: cache x "
        f"{first['bytes_of_twice_the_batch'] / first['bytes']:.2f}"
    )
    operations = report["batch"] * report["weights"]["operations_a_token"]
    chunk = report["prefill_chunk"]
    return [
        f"growth, and attention's work on the batch; a prefill reads the cache once every {chunk} tokens",
        *_lines(rows),
        ratios,
        f"beside attention, a step multiplies with the weights: {_operations(operations)}",
    ]


def _way(way: Mapping[str, Any]) -> list[str]:
    variants = way["variants"]
    counts_work = variants[0]["operations"] is not None
    heading = ("operations",) if counts_work else ("formula", "allocated")
    rows: list[tuple[str, ...]] = [(f"{way['name']}:", *heading, "factor", "requests")]
    for variant in variants:
        name = f"  {variant['name']}{' (as planned)' if variant['is_planned'] else ''}"
        if counts_work:
            amounts = (_operations(variant["operations"]),)
        else:
            amounts = (_count(variant["formula_bytes"]), _count(variant["allocated_bytes"]))
        rows.append((name, *amounts, f"{variant['factor']:.2f}", _count(variant["requests"])))
    if all(variant["requests"] is None for variant in variants):
        rows = [row[:-1] for row in rows]
    words = {"shrinks": "shrinks", "formula": "formula", "costs": "costs", "suits": "fits"}
    return [*_lines(rows), *(line for key, label in words.items() for line in _wrapped(f"{label}: {way[key]}", "  "))]


def _wrapped(text: str, indent: str = "") -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent + "  ")


def _ratio(first: Mapping[str, Any], last: Mapping[str, Any], key: str) -> str:
    return f"{last[key] / first[key]:.2f}"


def _count(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,}" if isinstance(value, int) else f"{value:,.2f}"


def _operations(count: float) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {prefix}"
    return f"{count:,}"


def _lines(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Lays cells out in columns, those of ``left`` to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            text.ljust(width) if idx in left else text.rjust(width)
            for idx, (text, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def write_plot(path: pathlib.Path, report: Mapping[str, Any]) -> None:
    """Draws bytes and work over the context, and the ways to need less, as PNG; a file there is replaced."""
    from matplotlib import figure

    num_panels = 2 if report["compare"] is None else 3
    picture = figure.Figure(figsize=(5.5 * num_panels, 4.8), layout="constrained")
    panels = picture.subplots(1, num_panels)
    _draw_bytes(panels[0], report)
    _draw_work(panels[1], report)
    if report["compare"] is not None:
        _draw_ways(panels[2], report["compare"])
    name = f"{report['name']}, cache in {report['kv_dtype']}"
    picture.suptitle(name, parse_math=False)  # a dollar sign is one
    picture.savefig(path, dpi=120, format="png")


def _draw_bytes(axes: Any, report: Mapping[str, Any]) -> None:
    growth, batch, gibibyte = report["growth"], report["batch"], 2.0**30
    contexts = [entry["context"] for entry in growth]
    axes.plot(contexts, [entry["bytes"] / gibibyte for entry in growth], "o-", label=f"cache, batch {batch:,}")
    twice = [entry["bytes_of_twice_the_batch"] / gibibyte for entry in growth]
    axes.plot(contexts, twice, "s-", label=f"cache, batch {2 * batch:,}")
    axes.axhline(report["weights"]["bytes"] / gibibyte, ls="--", color="black", label="weights")
    memory = report["memory"]
    if memory is not None:
        devices = report["mesh"]["data"] * report["mesh"]["model"]
        label = f"memory, {memory['name']}" + (f" x {devices}" if devices > 1 else "")
        axes.axhline(devices * memory["bytes"] / gibibyte, ls=":", color="red", label=label)
    axes.set(xlabel="context S, tokens", ylabel="GiB")
    _log_axes(axes, contexts)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter("{x:g}")


def _draw_work(axes: Any, report: Mapping[str, Any]) -> None:
    contexts = [entry["context"] for entry in report["growth"]]
    for name, label, style in (("decode_step", "a decode step", "o-"), ("prefill", "a prefill of S tokens", "s-")):
        axes.plot(contexts, [entry[name]["operations"] for entry in report["growth"]], style, label=label)
    axes.set(xlabel="context S, tokens", ylabel=f"operations of attention, batch {report['batch']:,}")
    _log_axes(axes, contexts)


def _log_axes(axes: Any, contexts: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_ways(axes: Any, ways: Sequence[Mapping[str, Any]]) -> None:
    variants = [variant for way in ways for variant in way["variants"] if variant["allocated_bytes"] is not None]
    places = range(len(variants), 0, -1)
    colors = ["tab:orange" if variant["is_planned"] else "tab:blue" for variant in variants]
    axes.barh(places, [variant["allocated_bytes"] / 2.0**30 for variant in variants], color=colors)
    axes.set_yticks(places, [variant["name"] for variant in variants], fontsize=7, parse_math=False)
    axes.set(xlabel="GiB allocated (orange: as planned)")
    axes.grid(alpha=0.3, axis="x")
