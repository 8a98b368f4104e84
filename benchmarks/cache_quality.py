"""What a cache codec costs in quality: the next-token distributions against those of a float32 cache.

Usage::

    python benchmarks/cache_quality.py FILE.gguf --text-file LICENSE [--dtypes bfloat16,int8,int4] [--pieces 4]
                                       [--piece-tokens 512] [--json]

The text is cut into pieces of ``--piece-tokens`` tokens, each with its start token, and every piece goes through the
model once with a float32 cache and once with each codec; weights and products are float32. ``kl`` is the mean over all
positions of KL(float32 || codec) in nats; ``agreement`` the share of positions with the same most likely token;
``bytes`` is what a token takes in the cache, scales counted, and ``ratio`` that over bfloat16's. Codecs by groups have
their latest tokens beside that, however long the text is: ``exact`` is how many slots those take, in the dtype of the
products, and so many of a piece's tokens are not quantised yet when they are seen.
"""

import argparse
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

import jdecode
from jdecode import language_model


def log_probabilities(
    lm: language_model.LanguageModel, pieces_BT: np.ndarray, dtype: str
) -> tuple[np.ndarray, int, int]:
    """Returns float32 (B, T, V), the bytes of keys and values that one token takes, and the slots of exact ones."""
    num_tokens = pieces_BT.shape[1]

    @jax.jit
    def apply(params, tokens_BT):
        cache = lm.init_cache(batch_size=1, capacity=num_tokens, cache=jdecode.CacheConfig(layout="full", dtype=dtype))
        return jax.nn.log_softmax(lm.model.apply(params, tokens_BT, cache)[0], axis=-1)

    rows = [np.asarray(apply(lm.params, jnp.asarray(piece[None]))[0]) for piece in pieces_BT]
    cache = lm.init_cache(batch_size=1, capacity=num_tokens, cache=jdecode.CacheConfig(layout="full", dtype=dtype))
    num_bytes = sum(leaf.nbytes for store in cache.stores for leaf in jax.tree.leaves((store.keys, store.values)))
    recent = cache.stores[0].recent
    num_slots = cache.layouts[cache.layout_idx[0]].capacity
    return np.stack(rows), num_bytes // num_slots, 0 if recent is None else recent.keys.num_slots


def main() -> None:
    """Measures, and prints one line a codec."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file")
    parser.add_argument("--text-file", type=pathlib.Path, required=True)
    parser.add_argument("--dtypes", default="bfloat16,int8,fp8")
    parser.add_argument("--pieces", type=int, default=4)
    parser.add_argument("--piece-tokens", type=int, default=512)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()

    lm = jdecode.load(arguments.file, dtype="float32")
    ids = lm.encode(arguments.text_file.read_text(encoding="utf-8"))
    start, ids = ids[:1], ids[1:]
    each = arguments.piece_tokens - 1
    pieces = [start + ids[idx * each : (idx + 1) * each] for idx in range(arguments.pieces)]
    if len(pieces[-1]) < arguments.piece_tokens:
        parser.error(f"--text-file: expected {arguments.pieces * each} tokens, got {len(ids)}; ask for fewer --pieces")
    pieces_BT = np.asarray(pieces, np.int32)
    exact, exact_bytes, _ = log_probabilities(lm, pieces_BT, "float32")
    wide_bytes = exact_bytes // 2
    for dtype in arguments.dtypes.split(","):
        got, num_bytes, num_exact = log_probabilities(lm, pieces_BT, dtype)
        line = {
            "dtype": dtype,
            "kl": float(np.mean(np.sum(np.exp(exact) * (exact - got), axis=-1, dtype=np.float64))),
            "agreement": float(np.mean(exact.argmax(-1) == got.argmax(-1))),
            "bytes": num_bytes,
            "ratio": round(num_bytes / wide_bytes, 4),
            "exact": num_exact,
        }
        print(
            json.dumps(line)
            if arguments.json
            else "{dtype:12} KL {kl:.2e}  agreement {agreement:.3f}  "
            "{bytes} bytes a token, {ratio:.3f} of bfloat16; {exact} slots of exact tokens".format(**line),
            flush=True,
        )


if __name__ == "__main__":
    main()
