"""Text without end by a window and sinks: memory and speed while it grows, and what is lost in quality.

Usage::

    python benchmarks/streaming.py FILE.gguf [--window 1020] [--sinks 4] [--new-tokens 10000] [--kv-dtype auto] [--json]
    python benchmarks/streaming.py FILE.gguf --text-file LICENSES [--tokens 10000] [--window 1020] [--sinks 4] [--json]

Without ``--text-file`` it writes ``--new-tokens`` tokens (temperature 0.8, seed 1, end tokens ignored) and prints, for
each thousand, the tokens a second, the processor's milliseconds a token (all threads; other load on the machine moves
them less than the clock's) and the resident memory of the process; at the end the bytes of the cache. With it, it
prints the perplexity of a text's tokens by where they stand: with every key, with a window alone, with sinks at the
distances that they have in the text, and with sinks at distances inside the cache.
"""

import argparse
import dataclasses
import itertools
import json
import pathlib
import time

import numpy as np

import jdecode
from jdecode import language_model

PROMPT = "Once upon a time"
LOOK = 1000
"""Tokens between two lines."""


def resident_bytes() -> int:
    """Returns the memory of this process that is in use (Linux)."""
    fields = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return 1024 * int(fields["VmRSS"].split()[0])


def write(lm: language_model.LanguageModel, num_tokens: int, kv_dtype: str):
    """Writes a text, and yields one line of figures each ``LOOK`` tokens."""
    stream = lm.stream(
        PROMPT,
        max_new_tokens=num_tokens,
        sampling=jdecode.SamplingConfig(temperature=0.8, top_p=0.95, seed=1),
        ignore_eos=True,
        cache=jdecode.CacheConfig(dtype=kv_dtype),
        steps_per_look=LOOK,
    )
    written, start, busy_start = 0, time.perf_counter(), time.process_time()
    for chunk in stream:
        seconds, busy_seconds = time.perf_counter() - start, time.process_time() - busy_start
        count = len(chunk.token_ids)
        if written:  # the first chunk is that of the prefill and of compiling
            yield {
                "tokens": written + count,
                "tokens_per_second": round(count / seconds, 1),
                "processor_ms_a_token": round(1000 * busy_seconds / count, 1),
                "resident_bytes": resident_bytes(),
                "tail": chunk.text[-60:],
            }
        written, start, busy_start = written + count, time.perf_counter(), time.process_time()
    assert stream.result is not None
    stats = stream.result.stats
    yield {"kv_cache_bytes": stats["kv_cache_bytes"], "tokens_per_second": round(stats["decode_tokens_per_second"], 1)}


def ways(lm: language_model.LanguageModel, window: int, num_sinks: int) -> dict[str, language_model.LanguageModel]:
    """Returns the model with every key, with a window, and with sinks of both kinds."""
    inside = lm.with_window(window, num_sinks)
    layers = tuple(
        dataclasses.replace(layer, sink_positions="text") if layer.turns_sinks else layer
        for layer in inside.config.layers
    )
    config = dataclasses.replace(inside.config, layers=layers)
    return {
        "every key": lm,
        f"window {window + num_sinks}": lm.with_window(window + num_sinks, 0),
        f"window {window}, {num_sinks} sinks as in the text": dataclasses.replace(
            inside, config=config, model=dataclasses.replace(inside.model, config=config)
        ),
        f"window {window}, {num_sinks} sinks inside the cache": inside,
    }


def judge(lm: language_model.LanguageModel, ids: list[int], edges: list[int]) -> dict[str, float]:
    """Returns the perplexity of the tokens between each two edges."""
    (logprobs,) = lm.score([ids])
    return {
        f"{low}..{high - 1}": round(float(np.exp(-logprobs[max(low - 1, 0) : high - 1].mean(dtype=np.float64))), 2)
        for low, high in itertools.pairwise(edges)
    }


def main() -> None:
    """Measures, and prints a line for each thousand tokens or each way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--window", type=int, default=1020)
    parser.add_argument("--sinks", type=int, default=4)
    parser.add_argument("--new-tokens", type=int, default=10_000)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--text-file", type=pathlib.Path, action="append")
    parser.add_argument("--tokens", type=int, default=10_000)
    parser.add_argument("--edges", default="1024,2048,4096,8192", help="where the tables' columns begin, beside 0")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    lm = jdecode.load(arguments.file, dtype="float32")
    if arguments.text_file is None:
        lines = write(lm.with_window(arguments.window, arguments.sinks), arguments.new_tokens, arguments.kv_dtype)
    else:
        text = "\n".join(path.read_text(encoding="utf-8") for path in arguments.text_file)
        ids = lm.encode(text)[: arguments.tokens]
        edges = [0, *(int(edge) for edge in arguments.edges.split(",") if int(edge) < len(ids)), len(ids)]
        lines = (
            {"way": name, **judge(own, ids, edges)} for name, own in ways(lm, arguments.window, arguments.sinks).items()
        )
    for line in lines:
        print(
            json.dumps(line) if arguments.json else "  ".join(f"{key} {value}" for key, value in line.items()),
            flush=True,
        )


if __name__ == "__main__":
    main()
