"""Prefill and decode speed of a model on this machine, alone or side by side with another engine.

Usage::

    python benchmarks/speed.py FILE.gguf [--prompt-tokens 128] [--new-tokens 128] [--rounds 3] [--batch 1]
                               [--dtype float32] [--beside 'COMMAND']

``--beside`` is a shell command of another engine that prints JSON lines with ``prefill_tokens_per_second`` and
``decode_tokens_per_second``. Both run as processes of their own, in turn, round after round, since machines drift;
what is printed last is the median of each and the ratio. The share of the memory bandwidth is the bytes of weights
and cache that a decode step must read, times steps a second, over the bandwidth of a large float32 sum measured in the
same process.
"""

import argparse
import json
import statistics
import subprocess
import sys

RATES = ("prefill_tokens_per_second", "decode_tokens_per_second")


def run_once(arguments: argparse.Namespace) -> None:
    """Measures in this process, and prints one JSON line a run."""
    import numpy as np

    import jdecode
    from jdecode import step_cost

    lm = jdecode.load(arguments.file, dtype=arguments.dtype)
    random = np.random.default_rng(0)
    prompts = random.integers(10, min(20_000, lm.config.vocab_size), (arguments.batch, arguments.prompt_tokens))
    lengths = [arguments.prompt_tokens] * arguments.batch

    def generate():
        return lm.generate(prompts, lengths=lengths, max_new_tokens=arguments.new_tokens + 1, ignore_eos=True)

    generate()
    bandwidth = step_cost.memory_bandwidth()
    for run in range(arguments.runs):
        stats = generate().stats
        steps = stats["decode_tokens_per_second"] / arguments.batch
        held = stats["kv_cache_bytes"] * (arguments.prompt_tokens + arguments.new_tokens / 2)
        held /= jdecode.language_model.capacity_for(arguments.prompt_tokens + arguments.new_tokens + 1)
        line = {
            "engine": "jdecode",
            "file": arguments.file,
            "dtype": arguments.dtype,
            "batch": arguments.batch,
            "run": run,
            "prefill_tokens_per_second": round(arguments.batch * arguments.prompt_tokens / stats["prefill_seconds"], 1),
            "decode_tokens_per_second": round(stats["decode_tokens_per_second"], 1),
            "bandwidth_share": round((stats["weight_bytes"] + held) * steps / bandwidth, 2),
            "bandwidth_gb_per_second": round(bandwidth / 1e9, 1),
        }
        print(json.dumps(line), flush=True)


def lines_of(command: str | list[str]) -> list[dict]:
    """Runs a command and returns the JSON lines that it prints."""
    done = subprocess.run(command, shell=isinstance(command, str), stdout=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    for line in lines:
        print(json.dumps(line), flush=True)
    return lines


def median(lines: list[dict], rate: str) -> float:
    """Returns the median of a rate over lines."""
    return statistics.median(line[rate] for line in lines)


def main() -> None:
    """Parses arguments and runs the rounds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", help="what jdecode.load takes")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--runs", type=int, default=3, help="in each round")
    parser.add_argument("--beside", metavar="COMMAND", help="another engine")
    parser.add_argument("--here", action="store_true", help="one round in this process")
    arguments = parser.parse_args()
    if arguments.here:
        run_once(arguments)
        return
    ours, theirs = [], []
    for _ in range(arguments.rounds):
        ours += lines_of([sys.executable, __file__, "--here", *sys.argv[1:]])
        if arguments.beside:
            theirs += lines_of(arguments.beside)
    for rate in RATES:
        summary = f"{rate}: jdecode {median(ours, rate):.1f}"
        if theirs:
            summary += f", beside {median(theirs, rate):.1f}, ratio {median(ours, rate) / median(theirs, rate):.2f}"
        print(summary)


if __name__ == "__main__":
    main()
