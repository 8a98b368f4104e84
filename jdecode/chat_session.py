"""A conversation that keeps its cache between turns: each turn reads only what is new."""

import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import generation
from jdecode.cache import kv_cache

if TYPE_CHECKING:
    from jdecode import language_model

DEFAULT_CAPACITY = 4096
"""Tokens that a conversation may hold unless said otherwise, or the model's trained length if that is less."""


class ChatSession:
    """Turns of user and assistant over one cache.

    The whole conversation is rendered by the model's template each turn, and what the cache holds of it already is
    not computed again. (Templates may rewrite earlier turns; then the cache is cut back to where they agree.)

    Attributes:
      messages: the conversation so far.
    """

    def __init__(
        self,
        lm: "language_model.LanguageModel",
        *,
        system: str | None,
        sampling: config_lib.SamplingConfig,
        cache: config_lib.CacheConfig,
        capacity: int | None,
    ) -> None:
        self._lm, self._system, self._sampling, self._cache_config = lm, system, sampling, cache
        self._capacity = min(lm.config.max_positions, DEFAULT_CAPACITY) if capacity is None else capacity
        if self._capacity < 1:
            raise ValueError(f"capacity: expected a count of at least 1, got {capacity}")
        self.messages: list[dict[str, Any]] = []
        self._cache: kv_cache.KVCache | None = None
        self._held: list[int] = []
        self.reset()

    def reset(self) -> None:
        """Forgets every turn."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._cache, self._held = None, []

    def send(self, text: str, *, max_new_tokens: int = 256, steps_per_look: int = generation.STREAM_STEPS) -> "Reply":
        """Adds a turn of the user, and returns the reply as a stream.

        Args:
          max_new_tokens: of the reply; what the capacity leaves is less near its end.

        Returns:
          An iterable of ``Chunk`` with ``result`` after its end. The turn counts once it has been read to its end.

        Raises:
          ValueError: the conversation does not fit, or the template refuses it.
        """
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._lm.encode_chat(messages)
        room = self._capacity - len(ids)
        if room < 1:
            raise ValueError(
                f"capacity: expected room for more than the {len(ids)} tokens of the conversation, got "
                f"{self._capacity}; raise the capacity or reset the conversation"
            )
        cache, num_held = self._cut_back(ids)
        request = self._lm._request(
            [ids[num_held:]],
            self._sampling,
            num_samples=1,
            max_new_tokens=min(max_new_tokens, room),
            stop_ids=self._lm.end_token_ids,
            stop=(),
            transforms=(),
            num_top_logprobs=None,
            steps_per_look=steps_per_look,
        )
        request = dataclasses.replace(request, continues_text=[False])
        self._cache, self._held = None, []  # the cache is donated; it comes back with the end of the reply
        stream = generation.TextStream(
            self._lm.model,
            self._lm.params,
            self._lm.tokenizer,
            request,
            cache,
            history=[ids[:num_held]],
            weight_bytes=self._lm.weight_bytes,
        )
        return Reply(self, stream, messages, ids)

    def _cut_back(self, ids: list[int]) -> tuple[kv_cache.KVCache, int]:
        """Returns a cache that holds a prefix of ``ids``, short of its last token, and how long that prefix is."""
        common = 0
        for ours, theirs in zip(self._held, ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        cache = self._cache
        if cache is not None and common and len(self._held) - common <= cache.max_rollback:
            return kv_cache.truncate(cache, jnp.full(1, common, jnp.int32)), common
        return self._lm.init_cache(batch_size=1, capacity=self._capacity, cache=self._cache_config), 0

    def _end_turn(self, stream: generation.TextStream, messages: list[dict[str, Any]], ids: list[int]) -> None:
        assert stream.result is not None
        result = stream.result
        new = [int(token) for token in result.tokens[0, : result.lengths[0]]]
        self._cache, self._held = stream.cache, [*ids, *new[:-1]]
        self.messages = [*messages, {"role": "assistant", "content": result.texts[0]}]


class Reply:
    """The stream of one reply; see ``ChatSession.send``."""

    def __init__(
        self, session: ChatSession, stream: generation.TextStream, messages: list[dict[str, Any]], ids: list[int]
    ) -> None:
        self._session, self._stream, self._messages, self._ids = session, stream, messages, ids
        self.result: generation.GenerateResult | None = None

    def __iter__(self) -> Iterator[generation.Chunk]:
        yield from self._stream
        self.result = self._stream.result
        self._session._end_turn(self._stream, self._messages, self._ids)
