"""From prompts of token ids to text: one run of the decode loop, with what the host must see on the way.

The device loop runs to the end, or in chunks when somebody reads along or a stop string has to be looked for. Between
chunks the host reads the new tokens, turns them into text, and ends the rows whose stop string came.
"""

import dataclasses
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdecode import compile_clock, sampling, shapes
from jdecode import request as request_lib
from jdecode.cache import cache_rows, compress, kv_cache
from jdecode.decode import loop, prefill, prompt_reader, state, stopping
from jdecode.decode import step as step_lib
from jdecode.models import transformer
from jdecode.speculative import speculation as speculation_lib
from jdecode.speculative import speculative_round, statistics
from jdecode.text import stream as stream_lib
from jdecode.text import tokenizer as tokenizer_lib

LEAST_OUTPUT_LEN = 64
"""The shortest output buffer; longer ones are powers of two, so that few programs serve every length."""

LEAST_HISTORY_LEN = 256
"""The shortest history that penalties keep, in tokens."""

STREAM_STEPS = 8
"""Tokens a row between two looks of a reader."""

STOP_STRING_STEPS = 32
"""Tokens a row between two looks for stop strings when nobody reads along."""


_SECONDS = ("first_token_seconds", "prefill_seconds", "decode_seconds", "compile_seconds")


def output_len_for(max_new_tokens: int) -> int:
    """Returns how many tokens the output buffer of a row holds."""
    return max(LEAST_OUTPUT_LEN, shapes.power_of_two_at_least(max_new_tokens))


def max_len_for(cache: kv_cache.KVCache | None, num_tokens: int) -> int:
    """Returns for how many tokens of a row, prompt and output, a draft and the history of penalties have room.

    Args:
      cache: its arrays may be shapes; ``None`` for one that is compressed after the prompts.
      num_tokens: of the longest row.
    """
    # Where the cache bounds the text, its bound is the history's: one size less that could compile anew.
    bound = None if cache is None else cache.max_len
    return bound or max(LEAST_HISTORY_LEN, shapes.power_of_two_at_least(num_tokens))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chunk:
    """What one row has added to its text since the chunk before.

    Attributes:
      row: of the batch.
      text: may be empty while characters or a possible stop string are held back.
      token_ids: the new tokens.
      finish_reason: ``"stop"`` or ``"length"`` with the row's last chunk, else ``None``.
    """

    row: int
    text: str
    token_ids: list[int]
    finish_reason: str | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateResult:
    """The outcome of a generation of B rows.

    Attributes:
      texts: without prompt, stop token and stop string.
      tokens: int32 (B, M), the new tokens, a stop token included; 0 after each row's end.
      lengths: int32 (B,), how many of them are real.
      finish_reasons: ``"stop"`` or ``"length"``, one a row.
      prompt_tokens: the ids that each row started from.
      seeds: of each row.
      logprobs: float32 (B, M), nats, of the new tokens under the model's own distribution; ``None`` where not asked.
      top_logprobs: for each row and token the (id, log-probability) pairs of the most likely tokens, best first;
        ``None`` where not asked.
      stats: seconds, rates and bytes, see ``TextStream``.
    """

    texts: list[str]
    tokens: np.ndarray
    lengths: np.ndarray
    finish_reasons: list[str]
    prompt_tokens: list[list[int]]
    seeds: list[int]
    logprobs: np.ndarray | None
    top_logprobs: list[list[list[tuple[int, float]]]] | None
    stats: Mapping[str, Any]


class TextStream:
    """Runs one request, and yields chunks of text as they come. Iterate it once; then ``result`` is there.

    Args:
      model, params: see ``models.transformer``.
      tokenizer: ``None`` for a model without one: texts are then empty.
      request: what to do.
      cache: with one row a prompt; donated. Rows continue where it ends.
      history: ids that each row of the cache holds already (penalties count them as prompt).
      speculation: a draft and how it is used; ``None`` for plain decoding. The cache must be able to take back as many
        tokens as it proposes.
      how: the reader compresses the cache after the prompts (``cache.compress``); ``None`` where it does not.
      weight_bytes: for the statistics.
      reader: brings the prompts into the cache; its counts stand in ``result.stats``, too.

    Attributes:
      result: ``None`` until the stream is exhausted.
      cache: after exhaustion the cache with every row's text but its latest token.

    ``result.stats`` holds ``first_token_seconds`` (from the call to the first token, compilation included),
    ``prefill_seconds`` (to the first token, the draft's reading of the prompts included) and ``decode_seconds`` (after
    it), both without compilation and without the time that the reader took between chunks,
    ``decode_tokens_per_second`` (all rows), ``compile_seconds``, ``prompt_tokens`` and ``new_tokens`` (counts, all
    rows), ``kv_cache_bytes``, ``weight_bytes`` and ``tokens_evicted`` (from each layer of a compressed cache that has
    no window, all rows; 0 in other caches); with a compressed cache also ``prompt_cache_bytes`` (of the one before it,
    which stands beside it for a moment); with speculation also those of ``speculative.statistics.summary``
    (counted by the device loop, before the host cuts at a stop string: ``accepted`` may hold tokens that
    ``new_tokens`` does not), ``draft_cache_bytes`` and ``draft_weight_bytes``.
    """

    def __init__(
        self,
        model: transformer.Transformer,
        params: Any,
        tokenizer: tokenizer_lib.Tokenizer | None,
        request: request_lib.Request,
        cache: kv_cache.KVCache,
        *,
        history: Sequence[Sequence[int]] | None = None,
        speculation: speculation_lib.Speculation | None = None,
        how: compress.Compression | None = None,
        weight_bytes: int = 0,
        reader: prompt_reader.PromptReader = prompt_reader.PlainReader(),
    ) -> None:
        self._model, self._params, self._tokenizer = model, params, tokenizer
        self._request, self._speculation, self._how = request, speculation, how
        self._chain = sampling.standard_chain(request.transforms)
        self._weight_bytes, self._prompt_reader = weight_bytes, reader
        self._reading_stats: Mapping[str, int] = {}
        self._prompt_cache: kv_cache.KVCache | None = cache
        self._readers = [self._reader(request.continues_text[row // request.num_samples]) for row in range(self._rows)]
        self._seen = [0] * self._rows
        self._finish_reasons: list[str | None] = [None] * self._rows
        self._state: state.DecodeState | None = None
        self._drafting: speculative_round.Drafting | None = None  # beside the state, where there is a draft
        self.result: GenerateResult | None = None
        # All that can be refused is refused here, before anything is computed.
        if how is None:
            prefill.check_room(cache, [len(prompt) + request.max_new_tokens for prompt in request.prompts])
        else:
            self._check_compression(how, cache)
        if speculation is not None and cache.max_rollback < speculation.num_draft_tokens:
            raise ValueError(
                f"cache: expected one that can take back {speculation.num_draft_tokens} draft tokens, got one that "
                f"takes back {cache.max_rollback}; give its rings more slack"
            )
        held = history or [()] * len(request.prompts)
        self._whole_prompts = [[*before, *prompt] for before, prompt in zip(held, request.prompts, strict=True)]
        longest = max(len(ids) for ids in self._whole_prompts) + request.max_new_tokens
        self._max_len = max_len_for(cache if how is None else None, longest)
        self._prompt_cache_bytes = cache.num_bytes
        self._sampling_params = self._make_sampling_params()

    def _check_compression(self, how: compress.Compression, cache: kv_cache.KVCache) -> None:
        request = self._request
        prefill.check_room(cache, [len(prompt) for prompt in request.prompts])
        if how.num_new is not None and request.max_new_tokens > how.num_new:
            raise ValueError(
                f"max_new_tokens: expected at most the {how.num_new} slots for new tokens of the compressed cache, got "
                f"{request.max_new_tokens}; give it more slots"
            )
        if how.is_lasting and self._speculation is not None:
            raise ValueError(
                "cache: expected one that takes back draft tokens, got one that evicts; leave the draft out"
            )

    @property
    def _rows(self) -> int:
        return self._request.num_rows

    @property
    def cache(self) -> kv_cache.KVCache:
        """The cache after the run."""
        if self.result is None or self._state is None:
            raise ValueError("cache: expected an exhausted stream, got one that is still running; read it to its end")
        return self._state.cache

    def _reader(self, continues_text: bool) -> stream_lib.DetokenizerStream | None:
        if self._tokenizer is None:
            if self._request.stop:
                raise ValueError("stop: expected a model with a tokenizer, got one without; use stop_token_ids")
            return None
        return stream_lib.DetokenizerStream(self._tokenizer, self._request.stop, continues_text=continues_text)

    def _make_sampling_params(self) -> sampling.SamplingParams:
        return sampling.params_from_configs(
            self._request.sampling_configs,
            vocab_size=self._model.config.vocab_size,
            prompts=[ids for ids in self._whole_prompts for _ in range(self._request.num_samples)],
            history_len=self._max_len,
            stop_ids=[self._request.stop_ids] * self._rows,
        )

    def __iter__(self) -> Iterator[Chunk]:
        if self._prompt_cache is None:
            raise ValueError("stream: expected to be read once, got a second reading; make a new stream")
        stats: dict[str, float] = {name: 0.0 for name in _SECONDS}
        chunks = self._timed(self._begin, stats, "prefill_seconds")
        stats["first_token_seconds"] = stats["prefill_seconds"] + stats["compile_seconds"]
        yield from chunks
        while None in self._finish_reasons:
            yield from self._timed(self._continue, stats, "decode_seconds")
        self.result = self._make_result(stats)

    def _timed(self, work, stats: dict[str, float], name: str) -> list[Chunk]:
        start = time.perf_counter()
        with compile_clock.CompileClock() as clock:
            chunks = work()
            compiling = clock.seconds
        stats["compile_seconds"] += compiling
        stats[name] += time.perf_counter() - start - compiling
        return chunks

    def _begin(self) -> list[Chunk]:
        request, cache = self._request, self._prompt_cache
        assert cache is not None
        self._prompt_cache = None  # donated from here on
        key_B = sampling.request_keys(request.seeds, [row % request.num_samples for row in range(self._rows)])
        reading = self._prompt_reader.read(self._model, self._params, request.prompts, cache)
        cache, logits_BV, self._reading_stats = reading.cache, reading.logits_BV, reading.stats
        if request.num_samples > 1:
            cache = cache_rows.repeat_rows(cache, request.num_samples)
            logits_BV = jnp.repeat(logits_BV, request.num_samples, axis=0)
        first = loop.begin(
            self._chain,
            self._sampling_params,
            cache,
            logits_BV,
            key_B=key_B,
            stop_ids_BX=stopping.padded([request.stop_ids] * self._rows),
            max_new_B=jnp.full(self._rows, request.max_new_tokens, jnp.int32),
            output_len=output_len_for(request.max_new_tokens),
            num_top_logprobs=request.num_top_logprobs,
        )
        if self._speculation is not None:
            # Waited for, as ``_look`` waits for the first tokens: what is still running would count as decoding.
            self._drafting = jax.block_until_ready(self._begin_drafting(self._speculation, first))
        self._state = first
        return self._look()

    def _begin_drafting(
        self, speculation: speculation_lib.Speculation, decode: state.DecodeState
    ) -> speculative_round.Drafting:
        num_samples, max_len = self._request.num_samples, self._max_len
        return speculation.begin(self._params, decode, self._whole_prompts, num_samples=num_samples, max_len=max_len)

    def _continue(self) -> list[Chunk]:
        assert self._state is not None
        look = self._request.steps_per_look
        if self._speculation is None or self._drafting is None:
            plain = step_lib.PlainStep(self._model, self._chain)
            self._state = loop.run(plain, self._params, self._state, look)
        else:
            both = speculative_round.SpeculativeState(decode=self._state, drafting=self._drafting)
            step = self._speculation.step(self._model, self._chain)
            both = loop.run(step, self._speculation.params(self._params), both, look)
            self._state, self._drafting = both.decode, both.drafting
        return self._look()

    def _look(self) -> list[Chunk]:
        """Reads the new tokens of every row, and ends rows at their stop strings."""
        assert self._state is not None
        status_B = np.asarray(self._state.status_B)
        num_new_B, tokens_BM = np.asarray(self._state.num_new_B), np.asarray(self._state.tokens_BM)
        chunks, stopped_B = [], np.zeros(self._rows, bool)
        for row in range(self._rows):
            if self._finish_reasons[row] is not None:
                continue
            if status_B[row] == state.INVALID:
                raise FloatingPointError(
                    f"logits of row {row}: expected finite numbers, got NaN or infinity after "
                    f"{num_new_B[row]} new tokens; the weights are broken, their dtype is too narrow, or a transform "
                    "left no token"
                )
            new = [int(token) for token in tokens_BM[row, self._seen[row] : num_new_B[row]]]
            chunk = self._read(row, new, state.FINISH_REASONS[int(status_B[row])])
            stopped_B[row] = chunk.finish_reason is not None
            if chunk.token_ids or chunk.text or chunk.finish_reason:
                chunks.append(chunk)
        if (stopped_B & (status_B == state.RUNNING)).any():
            self._state = state.finish(self._state, stopped_B)
        return chunks

    def _read(self, row: int, new: list[int], finish_reason: str | None) -> Chunk:
        """Turns a row's new tokens into text."""
        reader, text = self._readers[row], ""
        if reader is not None:
            is_stop_token = finish_reason == "stop" and new and new[-1] in self._request.stop_ids
            text = reader.push(new[:-1] if is_stop_token else new)
            if reader.stopped:
                assert reader.stop_token_count is not None
                new = new[: reader.stop_token_count - self._seen[row]]
                finish_reason = "stop"
            if finish_reason is not None:
                text += reader.finish()
        self._seen[row] += len(new)
        self._finish_reasons[row] = finish_reason
        return Chunk(row=row, text=text, token_ids=new, finish_reason=finish_reason)

    def _make_result(self, stats: dict[str, float]) -> GenerateResult:
        assert self._state is not None
        request, final = self._request, self._state
        lengths = np.asarray(self._seen, np.int32)
        is_real_BM = np.arange(final.tokens_BM.shape[1])[None, :] < lengths[:, None]
        width = max(int(lengths.max()), 1)
        is_real_BM = is_real_BM[:, :width]
        decoded = int(lengths.sum()) - self._rows
        rate = decoded / stats["decode_seconds"] if stats["decode_seconds"] > 0 else 0.0
        logprobs, top_logprobs = self._scores(lengths, width, is_real_BM)
        return GenerateResult(
            texts=[reader.text if reader else "" for reader in self._readers],
            tokens=np.where(is_real_BM, np.asarray(final.tokens_BM)[:, :width], 0),
            lengths=lengths,
            finish_reasons=[str(reason) for reason in self._finish_reasons],
            prompt_tokens=[list(prompt) for prompt in request.row_prompts],
            seeds=list(request.seeds),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            stats={
                **stats,
                "decode_tokens_per_second": rate,
                "prompt_tokens": sum(len(prompt) for prompt in request.prompts),
                "new_tokens": int(lengths.sum()),
                "kv_cache_bytes": final.cache.num_bytes,
                "weight_bytes": self._weight_bytes,
                **self._compression_stats(),
                **self._reading_stats,
                **self._drafting_stats(),
            },
        )

    def _compression_stats(self) -> dict[str, int]:
        assert self._state is not None
        num_evicted = int(kv_cache.num_evicted(self._state.cache).sum())
        peak = {} if self._how is None else {"prompt_cache_bytes": self._prompt_cache_bytes}
        return {"tokens_evicted": num_evicted, **peak}

    def _drafting_stats(self) -> dict[str, Any]:
        if self._speculation is None or self._drafting is None:
            return {}
        return {
            **statistics.summary(self._drafting.counts),
            "draft_cache_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._drafting.memory)),
            "draft_weight_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(self._speculation.draft_params)),
        }

    def _scores(self, lengths: np.ndarray, width: int, is_real_BM: np.ndarray):
        """Returns the log-probabilities in the form of ``GenerateResult``."""
        assert self._state is not None
        scores = self._state.scores
        if scores is None:
            return None, None
        scores = jax.tree.map(np.asarray, scores)
        logprobs = np.where(is_real_BM, scores.logprob_BM[:, :width], 0.0)
        if not scores.top_ids_BMJ.shape[2]:
            return logprobs, None
        top_logprobs = [
            [
                list(zip(ids_J.tolist(), logprobs_J.tolist(), strict=True))
                for ids_J, logprobs_J in zip(
                    scores.top_ids_BMJ[row, :length], scores.top_logprobs_BMJ[row, :length], strict=True
                )
            ]
            for row, length in enumerate(lengths)
        ]
        return logprobs, top_logprobs
