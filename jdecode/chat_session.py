"""A conversation that keeps its cache between turns: each turn reads only what is new."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Unpack

import jax.numpy as jnp

from jdecode import config as config_lib
from jdecode import drafts, generation, request_memory
from jdecode import request as request_lib
from jdecode import streaming as streaming_lib
from jdecode.cache import kv_cache
from jdecode.speculative import draft_model
from jdecode.speculative import speculation as speculation_lib
from jdecode.text import chat

if TYPE_CHECKING:
    from jdecode import language_model

DEFAULT_CAPACITY = 4096
"""Tokens that a conversation may hold unless said otherwise, or the model's trained length if that is less."""

ENDLESS_CAPACITY = 2**20
"""The same where no cache grows with the conversation, see ``streaming.is_endless``."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Kept:
    """A cache between turns.

    Attributes:
      cache: one row.
      ids: the tokens that it holds.
      longest: the most tokens that it has ever held, proposals that were not accepted included. What a ring has lost
        it lost then, however often it was cut back since, so this is what bounds the next cut.
    """

    cache: kv_cache.KVCache
    ids: list[int]
    longest: int


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
        **drafting: Unpack[request_lib.DraftOptions],
    ) -> None:
        for name in sorted(drafting.keys() - request_lib.DraftOptions.__annotations__.keys()):
            raise TypeError(
                f"{name}: expected an option of a conversation (system, sampling, cache, capacity, or of a draft), got "
                "another; leave it out"
            )
        self._lm, self._system, self._sampling, self._cache_config = lm, system, sampling, cache
        if isinstance(cache, config_lib.CacheConfig) and cache.eviction is not None:
            raise ValueError(
                f"cache eviction: expected none in a conversation (its cache is cut back between turns), got "
                f"{cache.eviction}; leave it out"
            )
        if lm.tokenizer is not None:
            chat.chat_template(lm.tokenizer)  # what cannot talk is refused before the first turn
        if capacity is not None:
            capacity = request_lib.count("capacity", capacity, least=1)
        self._speculation = drafts.make_speculation(lm, cache=cache, num_tokens=capacity, **drafting)
        self._capacity = self._default_capacity() if capacity is None else capacity
        self._most_drafted = 0
        if self._speculation is not None:
            self._most_drafted = self._speculation.num_draft_tokens
            self._cache_config = speculation_lib.with_slack(cache, self._most_drafted)
        request_memory.check(
            1,
            lm.plan_cache(self._cache_config, self._capacity),
            lm.mesh,
            num_tokens=self._capacity,
            max_new_tokens=self._capacity,
            speculation=self._speculation,
        )
        self.messages: list[dict[str, Any]] = []
        self._turn = 0  # goes up with every send and reset: a reply of an earlier turn counts no more
        self._kept: _Kept | None = None
        self.reset()

    def _default_capacity(self) -> int:
        configs = [self._lm.config]
        if self._speculation is not None and isinstance(self._speculation.draft, draft_model.ModelDraft):
            configs.append(self._speculation.draft.model.config)
        if self._cache_config.layout == "auto" and all(map(streaming_lib.is_endless, configs)):
            return ENDLESS_CAPACITY
        return min(self._lm.config.max_positions, DEFAULT_CAPACITY)

    def reset(self) -> None:
        """Forgets every turn."""
        self.messages = [] if self._system is None else [{"role": "system", "content": self._system}]
        self._turn += 1
        self._kept = None

    def send(self, text: str, *, max_new_tokens: int = 256, steps_per_look: int = generation.STREAM_STEPS) -> "Reply":
        """Adds a turn of the user, and returns the reply as a stream.

        Args:
          max_new_tokens: of the reply; what the capacity leaves is less near its end.

        Returns:
          An iterable of ``Chunk`` with ``result`` after its end. The turn counts once it has been read to its end;
          a reply that is left unread counts no more when the next turn is sent.

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
        kept = self._cut_back(ids)
        request = request_lib.resolve(
            [ids[len(kept.ids) :]],
            vocab_size=self._lm.config.vocab_size,
            tokenizer=self._lm.tokenizer,
            end_token_ids=self._lm.end_token_ids,
            max_new_tokens=min(request_lib.count("max_new_tokens", max_new_tokens, least=1), room),
            sampling=self._sampling,
            steps_per_look=steps_per_look,
            continues_text=False,
        )
        stream = generation.TextStream(
            self._lm.model,
            self._lm.params,
            self._lm.tokenizer,
            request,
            kept.cache,
            history=[kept.ids],
            speculation=self._speculation,
            weight_bytes=self._lm.weight_bytes,
        )
        self._turn += 1
        self._kept = None  # the cache is donated to the stream, and comes back with the end of the reply

        def end_turn(result: generation.GenerateResult) -> None:
            new = [int(token) for token in result.tokens[0, : result.lengths[0]]]
            held = [*ids, *new[:-1]]  # the latest token is not fed yet
            self._kept = _Kept(cache=stream.cache, ids=held, longest=max(kept.longest, len(held) + self._most_drafted))
            self.messages = [*messages, {"role": "assistant", "content": result.texts[0]}]

        return Reply(stream, end_turn, lambda turn=self._turn: turn == self._turn)

    def _cut_back(self, ids: list[int]) -> _Kept:
        """Returns a cache that holds a prefix of ``ids``, short of its last token."""
        kept, common = self._kept, 0
        for ours, theirs in zip(kept.ids if kept else [], ids[:-1], strict=False):
            if ours != theirs:
                break
            common += 1
        if kept is not None and common and kept.longest - common <= kept.cache.max_rollback:
            cache = kv_cache.truncate(kept.cache, jnp.full(1, common, jnp.int32))
            return _Kept(cache=cache, ids=ids[:common], longest=kept.longest)
        empty = self._lm.init_cache(batch_size=1, capacity=self._capacity, cache=self._cache_config)
        return _Kept(cache=empty, ids=[], longest=0)


class Reply:
    """The stream of one reply; see ``ChatSession.send``.

    Args:
      stream: of the reply.
      end_turn: is called with the result when the reply has been read to its end.
      is_current: says whether no other turn has begun since.
    """

    def __init__(
        self,
        stream: generation.TextStream,
        end_turn: Callable[[generation.GenerateResult], None],
        is_current: Callable[[], bool],
    ) -> None:
        self._stream, self._end_turn, self._is_current = stream, end_turn, is_current
        self.result: generation.GenerateResult | None = None

    def __iter__(self) -> Iterator[generation.Chunk]:
        self._check_current()
        for chunk in self._stream:
            yield chunk
            self._check_current()
        assert self._stream.result is not None
        self._end_turn(self._stream.result)
        self.result = self._stream.result

    def _check_current(self) -> None:
        if not self._is_current():
            raise ValueError("reply: expected to be read before the next turn or reset, got an earlier turn's reply")
