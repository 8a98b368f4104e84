"""The time to read prompts that begin alike, cold and with a prefix cache, in turn.

Usage::

    python benchmarks/prefix_cache.py FILE.gguf [--prompts 20] [--prefix-tokens 600] [--own-tokens 24]
                                                [--new-tokens 16] [--kv-dtype auto] [--text-file LICENSE]

Each prompt is read cold and then with the prefix cache, which the first of them fills; texts must be the same. Times
are ``prefill_seconds`` (to the first token, copies included), without compilation, which a first pass brings.
"""

import argparse
import pathlib
import statistics
import sys

import jdecode

QUESTIONS = ("What is the longest word in it?", "Say it in one sentence.", "Which line is the third?", "Who wrote it?")


def main() -> int:
    """Parses arguments, measures and prints; returns 1 where a text differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prefix-tokens", type=int, default=600)
    parser.add_argument("--own-tokens", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=16)
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--page-len", type=int, default=16)
    parser.add_argument("--text-file", default=str(pathlib.Path(__file__).parent.parent / "LICENSE"))
    arguments = parser.parse_args()
    lm = jdecode.load(arguments.weights)
    prefix = lm.encode(pathlib.Path(arguments.text_file).read_text(encoding="utf-8"))[: arguments.prefix_tokens]
    if len(prefix) < arguments.prefix_tokens:
        parser.error(f"--text-file: expected {arguments.prefix_tokens} tokens, got {len(prefix)}; give a longer one")
    own = [lm.encode(f"\n{number}. {QUESTIONS[number % 4]} " * 9) for number in range(arguments.prompts)]
    prompts = [[*prefix, *ids[: arguments.own_tokens]] for ids in own]
    cache = jdecode.CacheConfig(dtype=arguments.kv_dtype)
    num_pages = -(-2 * (len(prefix) + arguments.prompts * arguments.own_tokens) // arguments.page_len)

    def read(prompt, prefix_cache=None):
        return lm.generate(
            prompt, max_new_tokens=arguments.new_tokens, ignore_eos=True, cache=cache, prefix_cache=prefix_cache
        )

    geometry = {"num_pages": num_pages, "page_len": arguments.page_len, "cache": cache}
    for warm_up in (None, lm.init_prefix_cache(**geometry)):
        for prompt in prompts[:2]:
            read(prompt, warm_up)
    prefix_cache = lm.init_prefix_cache(**geometry)
    cold_seconds, warm_seconds, num_same = [], [], 0
    for prompt in prompts:
        cold, warm = read(prompt), read(prompt, prefix_cache)
        cold_seconds.append(cold.stats["prefill_seconds"])
        warm_seconds.append(warm.stats["prefill_seconds"])
        num_same += cold.tokens.tolist() == warm.tokens.tolist()
    found = prefix_cache.statistics
    cold, warm = statistics.median(cold_seconds), statistics.median(warm_seconds[1:])
    print(
        f"{len(prompts)} prompts of {len(prompts[0])} tokens, {len(prefix)} of them shared, cache {arguments.kv_dtype}"
    )
    print(f"cold            {cold:8.3f} s a prompt")
    print(f"the first       {warm_seconds[0]:8.3f} s, which are kept")
    print(f"after the first {warm:8.3f} s a prompt, {warm / cold:.3f} of cold")
    print(f"in all          {sum(warm_seconds[1:]) / sum(cold_seconds[1:]):8.3f} of cold, after the first")
    print(f"tokens reused   {found.tokens_reused} of {found.tokens_asked}; {found.num_bytes / 2**20:.0f} MiB of pages")
    print(f"same texts      {num_same} of {len(prompts)}")
    return 0 if num_same == len(prompts) else 1


if __name__ == "__main__":
    sys.exit(main())
