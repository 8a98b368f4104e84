"""The one convenience on top: a model with its parameters and its tokenizer, ready to write text.

Everything here only calls public functions of the layers below: ``cache.allocate``, ``decode``, ``generation``.
"""

import dataclasses
import pathlib
from collections.abc import Sequence
from typing import Any, Unpack

import jax
import numpy as np

from jdecode import cache_plan, chat_session, drafts, generation, request_memory
from jdecode import config as config_lib
from jdecode import request as request_lib
from jdecode import sampling as sampling_lib
from jdecode import streaming as streaming_lib
from jdecode.attention import select
from jdecode.cache import kv_cache
from jdecode.decode import compressed_prefill, continuation, loop, prefill
from jdecode.models import transformer
from jdecode.parallel import device_memory
from jdecode.parallel import mesh as mesh_lib
from jdecode.serving import prefix_cache as prefix_cache_lib
from jdecode.speculative import speculation as speculation_lib
from jdecode.text import chat
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.weights import checkpoint
from jdecode.weights import load as load_lib
from jdecode.weights import placement as placement_lib

capacity_for = cache_plan.capacity_for

WEIGHT_LAYOUTS = ("auto", "rows")

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModel:
    """A frozen bundle of what it takes to decode.

    Attributes:
      config: of the model.
      model: the flax module; ``model.apply(params, tokens_BT, cache)`` returns logits and the cache after them.
      params: of the model.
      tokenizer: ``None`` for weights without one; prompts are then token ids.
      end_token_ids: tokens that end a text: all that the model's files name.
      mesh: the devices, ``None`` for the default one.
    """

    config: config_lib.ModelConfig
    model: transformer.Transformer
    params: Any
    tokenizer: tokenizer_lib.Tokenizer | None
    end_token_ids: tuple[int, ...] = ()
    mesh: jax.sharding.Mesh | None = None

    @property
    def weight_bytes(self) -> int:
        """Bytes of all parameters."""
        return sum(leaf.nbytes for leaf in jax.tree.leaves(self.params))

    def with_window(self, window: int, num_sinks: int = config_lib.StreamingConfig.num_sinks) -> "LanguageModel":
        """Returns the same model, with the same parameters, for text of any length in constant memory.

        Every layer without a window sees the latest ``window`` positions and the first ``num_sinks`` from here on, the
        latter at distances inside the cache (Xiao et al. 2024; ``models.sinks``); layers with a window keep theirs.
        What leaves the window is forgotten.

        Raises:
          ValueError: every layer has a window, or window and sinks exceed the positions that the model was trained for.
        """
        streaming = config_lib.StreamingConfig(window=window, num_sinks=num_sinks)
        streaming_lib.check(self.config, streaming)
        config = streaming_lib.with_window(self.config, streaming)
        return dataclasses.replace(self, config=config, model=dataclasses.replace(self.model, config=config))

    def init_cache(
        self, *, batch_size: int, capacity: int, cache: config_lib.CacheConfig = config_lib.CacheConfig()
    ) -> kv_cache.KVCache:
        """Allocates an empty cache.

        Args:
          batch_size: B.
          capacity: the longest text, prompt and output, that a row must hold, in tokens.
          cache: layout and dtype.

        Raises:
          ValueError: a size is under 1, the config evicts tokens, or the devices have too little memory.
        """
        batch_size = request_lib.count("batch_size", batch_size, least=1)
        plan = self.plan_cache(cache, request_lib.count("capacity", capacity, least=1))
        what = f"a cache of {batch_size} rows x {capacity} slots"
        device_memory.check(plan.row_shapes(), self.mesh, what, times=batch_size)
        return plan.init(batch_size, mesh=self.mesh)

    def plan_cache(self, cache: config_lib.CacheConfig, capacity: int) -> cache_plan.CachePlan:
        """Plans one cache of ``capacity`` slots a row."""
        cache_plan.check_config(cache)
        return cache_plan.CachePlan(model=self.config, cache=cache, compute_dtype=self.model.dtype, capacity=capacity)

    def init_prefix_cache(
        self,
        *,
        num_pages: int,
        page_len: int = prefix_cache_lib.DEFAULT_PAGE_LEN,
        cache: config_lib.CacheConfig = config_lib.CacheConfig(),
        salt: str | None = None,
    ) -> prefix_cache_lib.PrefixCache:
        """Allocates what keeps the beginnings of prompts, for ``prefix_cache=`` of ``stream``. Reads all weights once.

        Args:
          num_pages: of ``page_len`` tokens. When they are full, the least recently used text gives way.
          page_len: in tokens.
          cache: layout and dtype of the requests' caches.
          salt: shares nothing with prompts of another salt; see ``PrefixCache.with_salt``.

        Raises:
          ValueError: a count is under 1, the salt is empty, or the pages are larger than the memory of the devices.
        """
        geometry = {"num_pages": num_pages, "page_len": page_len, "mesh": self.mesh}
        return prefix_cache_lib.make(self.model, self.params, cache=cache, salt=salt, **geometry)

    def load_prefix_cache(self, folder: str | pathlib.Path, *, salt: str | None = None) -> prefix_cache_lib.PrefixCache:
        """Reads what ``PrefixCache.save`` wrote, as large as it was.

        Args:
          salt: as in ``init_prefix_cache``; what was kept under others stays theirs.

        Raises:
          ValueError: it is another model's, or damaged; one line.
        """
        return prefix_cache_lib.load(folder, self.model, self.params, mesh=self.mesh, salt=salt)

    def encode(self, prompt: str) -> list[int]:
        """Turns a raw prompt into token ids, with the start token if the tokenizer adds one.

        Raises:
          ValueError: the model has no tokenizer, or nothing is left to start from.
        """
        ids = self._text_tokenizer().encode(prompt)
        if not ids:
            raise ValueError("prompt: expected some text (this tokenizer adds no start token), got an empty prompt")
        return ids

    def encode_chat(self, messages: Sequence[dict[str, Any]]) -> list[int]:
        """Renders messages (``{"role": ..., "content": ...}``) by the model's chat template, into token ids.

        Raises:
          ValueError: the model has no tokenizer or no chat template, or the template refuses the messages.
        """
        return chat.encode_chat(self._text_tokenizer(), messages)

    def generate(
        self, prompts: request_lib.Prompts, **options: Unpack[request_lib.Options]
    ) -> generation.GenerateResult:
        """Continues prompts to their end. Takes the options of ``stream``, and only the whole result is returned."""
        options.setdefault("steps_per_look", generation.STOP_STRING_STEPS if options.get("stop") else loop.ALL_TOKENS)
        stream = self.stream(prompts, **options)
        for _ in stream:
            pass
        assert stream.result is not None
        return stream.result

    def stream(
        self,
        prompts: request_lib.Prompts,
        *,
        max_new_tokens: int = 64,
        sampling: request_lib.SamplingConfigs = config_lib.SamplingConfig(),
        num_samples: int = 1,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        ignore_eos: bool = False,
        logprobs: int | None = None,
        transforms: Sequence[sampling_lib.Transform] = (),
        cache: config_lib.CacheConfig = config_lib.CacheConfig(),
        capacity: int | None = None,
        prefix_cache: prefix_cache_lib.PrefixCache | None = None,
        lengths: Sequence[int] | np.ndarray | None = None,
        draft: Any = None,
        num_draft_tokens: int = drafts.DEFAULT.num_draft_tokens,
        verify: str = drafts.DEFAULT.verify,
        adaptive_draft: bool = drafts.DEFAULT.adaptive,
        steps_per_look: int = generation.STREAM_STEPS,
    ) -> generation.TextStream:
        """Continues prompts, and yields text as it comes.

        Args:
          prompts: a string, a list of token ids, a list of either, or a padded int array with ``lengths``.
          max_new_tokens: of every row, 1 to ``request.MOST_NEW_TOKENS``.
          sampling: how tokens are chosen: one config, or one for each prompt.
          num_samples: rows a prompt, which share its prefill; rows stand prompt by prompt.
          stop: strings that end a text and do not appear in it.
          stop_token_ids: tokens that end a text, beside the model's own end tokens.
          ignore_eos: do not end at the model's own end tokens.
          logprobs: give the log-probability of each new token, and of so many of the most likely ones (0 for none).
          transforms: the caller's own (see ``sampling.Transform``), applied before the temperature.
          cache: layout and dtype of the cache, and what it keeps of a prompt.
          capacity: cache slots a row; ``None`` for what the request needs.
          prefix_cache: of ``init_prefix_cache``: what it holds of a prompt is not computed, and what is new it keeps.
          lengths: how many ids of each row are real, for an array of prompts.
          draft: what proposes tokens (speculative decoding): a smaller ``LanguageModel`` with the same tokens,
            ``"ngram"`` (what followed the latest tokens before), ``"layer_skip"`` (this model's first layers), or a
            ``speculative.Draft`` of one's own or with options; ``None`` for plain decoding.
          num_draft_tokens: the most tokens that are proposed at once.
          verify: ``"rejection"`` accepts most and keeps the law of the text; ``"coupled"`` keeps the text itself: that
            of plain decoding with the same seed. Greedy texts are those of plain decoding under both.
          adaptive_draft: propose fewer tokens, or none, while few are accepted.
          steps_per_look: tokens a row between two chunks; a round of speculation may write past it.

        Returns:
          An iterable of ``Chunk``; its ``result`` is there when it is exhausted.

        Raises:
          ValueError: an argument that cannot be honoured, one line.
          FloatingPointError: the model's logits were not finite.
        """
        ids = self._prompt_ids(prompts, lengths)
        max_new_tokens = request_lib.count("max_new_tokens", max_new_tokens, least=1, most=request_lib.MOST_NEW_TOKENS)
        num_samples = request_lib.count("num_samples", num_samples, least=1)
        if logprobs is not None:
            logprobs = request_lib.count("logprobs", logprobs, least=0, most=self.config.vocab_size)
        longest = max(len(prompt) for prompt in ids) + max_new_tokens
        speculation = drafts.make_speculation(
            self,
            draft=draft,
            num_draft_tokens=num_draft_tokens,
            verify=verify,
            adaptive_draft=adaptive_draft,
            cache=cache,
            num_tokens=longest,
        )
        if speculation is not None:
            cache = speculation_lib.with_slack(cache, speculation.num_draft_tokens)
        plan = self._request_caches(cache, ids, max_new_tokens, capacity)
        request_memory.check(
            len(ids) * num_samples,
            plan,
            self.mesh,
            num_tokens=longest,
            max_new_tokens=max_new_tokens,
            logprobs=logprobs,
            speculation=speculation,
        )
        reader = prefix_cache_lib.reader_for(prefix_cache, self.model, self.params, cache, mesh=self.mesh)
        if plan.how is not None:
            reader = compressed_prefill.CompressingReader(plan.how)
        request = request_lib.resolve(
            ids,
            vocab_size=self.config.vocab_size,
            tokenizer=self.tokenizer,
            end_token_ids=self.end_token_ids,
            max_new_tokens=max_new_tokens,
            sampling=sampling,
            num_samples=num_samples,
            stop=stop,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            logprobs=logprobs,
            transforms=transforms,
            steps_per_look=steps_per_look,
        )
        empty = plan.init(len(ids), mesh=self.mesh)
        return generation.TextStream(
            self.model,
            self.params,
            self.tokenizer,
            request,
            empty,
            speculation=speculation,
            how=plan.how,
            weight_bytes=self.weight_bytes,
            reader=reader,
        )

    def score(
        self, texts: request_lib.Prompts, *, lengths: Sequence[int] | np.ndarray | None = None
    ) -> list[np.ndarray]:
        """Computes the log-probability of every token but the first, given those before it.

        Args:
          texts: as ``stream`` takes prompts.

        Returns:
          For each row float32, one entry fewer than it has tokens, in nats.
        """
        ids = self._prompt_ids(texts, lengths)
        cache = self.init_cache(batch_size=len(ids), capacity=capacity_for(max(len(row) for row in ids)))
        return prefill.score(self.model, self.params, ids, cache)

    def score_continuation(
        self,
        prompts: request_lib.Prompts,
        continuations: request_lib.Prompts,
        *,
        cache: config_lib.CacheConfig = config_lib.CacheConfig(),
    ) -> list[np.ndarray]:
        """Computes the log-probability of each token of given continuations, with what the cache keeps of the prompts.

        Args:
          prompts: as ``stream`` takes them.
          continuations: as many, likewise; text goes on with the prompt's, without a start token.
          cache: layout and dtype of the cache, and what it keeps of a prompt.

        Returns:
          For each row float32, one entry for each token of its continuation, in nats.
        """
        ids = self._prompt_ids(prompts, None)
        more = request_lib.prompt_rows(
            continuations, None, encode=self._encode_continuation, vocab_size=self.config.vocab_size
        )
        if len(more) != len(ids):
            raise ValueError(f"continuations: expected one for each of {len(ids)} prompts, got {len(more)}")
        plan = self._request_caches(cache, ids, max(len(row) for row in more), None)
        device_memory.check(plan.row_shapes(), self.mesh, f"caches of {len(ids)} rows", times=len(ids))
        empty = plan.init(len(ids), mesh=self.mesh)
        return continuation.score(self.model, self.params, ids, more, empty, plan.how)

    def chat_session(
        self,
        *,
        system: str | None = None,
        sampling: config_lib.SamplingConfig = config_lib.SamplingConfig(),
        cache: config_lib.CacheConfig = config_lib.CacheConfig(),
        capacity: int | None = None,
        **drafting: Unpack[request_lib.DraftOptions],
    ) -> chat_session.ChatSession:
        """Starts a conversation that keeps its cache between turns.

        Args:
          system: text of the system message, ``None`` for the template's own.
          sampling: of every reply.
          cache: layout and dtype of the cache.
          capacity: the longest conversation, in tokens; ``None`` for the least of the trained length and 4,096.
          drafting: ``draft``, ``num_draft_tokens``, ``verify`` and ``adaptive_draft`` of ``stream``. The draft reads
            the whole conversation anew each turn.
        """
        return chat_session.ChatSession(
            self, system=system, sampling=sampling, cache=cache, capacity=capacity, **drafting
        )

    def _prompt_ids(self, prompts: request_lib.Prompts, lengths: Sequence[int] | np.ndarray | None) -> list[list[int]]:
        return request_lib.prompt_rows(prompts, lengths, encode=self.encode, vocab_size=self.config.vocab_size)

    def _encode_continuation(self, text: str) -> list[int]:
        return self._text_tokenizer().encode_literal(text, starts_text=False)

    def _request_caches(
        self, cache: config_lib.CacheConfig, ids: list[list[int]], max_new_tokens: int, capacity: int | None
    ) -> cache_plan.CachePlan:
        return cache_plan.plan(
            self.config,
            cache,
            self.model.dtype,
            longest_prompt=max(len(prompt) for prompt in ids),
            max_new_tokens=max_new_tokens,
            capacity=None if capacity is None else request_lib.count("capacity", capacity, least=1),
        )

    def _text_tokenizer(self) -> tokenizer_lib.Tokenizer:
        if self.tokenizer is None:
            raise ValueError("prompt: expected token ids, got text (these weights come without a tokenizer)")
        return self.tokenizer


def load(
    source: str | pathlib.Path | checkpoint.Checkpoint,
    *,
    dtype: str = "auto",
    mesh: config_lib.MeshConfig | None = None,
    backend: str = "auto",
    weight_layout: str = "auto",
) -> LanguageModel:
    """Loads a language model.

    Args:
      source: the name of a packaged model (``"gqa_small"``), a folder with ``config.json`` and safetensors or Orbax
        parameters, a ``.gguf`` file, or a hub id (``owner/name``); or one of these that
        ``weights.checkpoint.open_checkpoint`` has opened.
      dtype: of parameters and computation: ``"float32"``, ``"bfloat16"``, ``"float16"``; ``"auto"`` is float32 on a
        CPU and bfloat16 elsewhere.
      mesh: devices to spread the model over; ``None`` for the default one.
      backend: of attention, see ``attention.select``.
      weight_layout: ``"rows"`` holds every weight (out, in), as ``models.parameter_shapes`` lists them; ``"auto"`` does
        so too, but for float32 on a CPU it brings them into ``models.panels``, which are faster.

    Raises:
      ValueError: the source, or an argument, cannot be honoured; one line.
      FileNotFoundError: there is no such file.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    select.backend(backend)  # a name that is not known is refused before gigabytes are read
    if weight_layout not in WEIGHT_LAYOUTS:
        raise ValueError(f"weight_layout: expected one of {', '.join(WEIGHT_LAYOUTS)}, got {weight_layout!r}")
    if dtype == "auto":
        dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    if mesh is not None and not isinstance(mesh, config_lib.MeshConfig):
        raise TypeError(f"mesh: expected a MeshConfig, got {type(mesh).__name__}")
    if not isinstance(source, str | pathlib.Path | checkpoint.Checkpoint) or not str(source) or "\0" in str(source):
        raise ValueError(f"source: expected a folder, a .gguf file or a hub id, got {source!r}")
    device_mesh = None if mesh is None else mesh_lib.make_mesh(mesh)
    placement = placement_lib.placement(device_mesh, is_packed=weight_layout == "auto" and dtype == "float32")
    opened = source if isinstance(source, checkpoint.Checkpoint) else checkpoint.open_checkpoint(source)
    loaded = load_lib.load_opened(opened, dtype=dtype, placement=placement)
    return LanguageModel(
        config=loaded.config,
        model=transformer.Transformer(loaded.config, backend=backend, dtype=dtype),
        params={"params": loaded.params},
        tokenizer=loaded.tokenizer,
        end_token_ids=loaded.eos_token_ids,
        mesh=device_mesh,
    )
