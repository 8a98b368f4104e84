"""A stand-in for ``jdecode.language_model``, so that the front doors are tested without weights.

It answers with a fixed text, one token a character (the id is the code point), and notes what it was asked.
"""

import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import jdecode
from jdecode import config
from jdecode.weights import checkpoint

REPLY = " Paris."
STATS = {
    "prefill_seconds": 0.5,
    "decode_seconds": 2.0,
    "decode_tokens_per_second": 3.5,
    "compile_seconds": 1.25,
    "kv_cache_bytes": 3 * 2**20,
    "weight_bytes": 5 * 2**20,
}


class FakeTokenizer:
    def decode(self, ids: Any) -> str:
        return "".join(chr(idx) for idx in ids)


class FakeStream:
    """Yields a chunk for each two characters; the result is there when it is exhausted."""

    def __init__(self, text: str, result: types.SimpleNamespace) -> None:
        self._chunks = [text[idx : idx + 2] for idx in range(0, len(text), 2)]
        self._result = result
        self.result: types.SimpleNamespace | None = None

    def __iter__(self) -> Iterator[types.SimpleNamespace]:
        for chunk in self._chunks:
            yield types.SimpleNamespace(row=0, text=chunk, token_ids=[ord(c) for c in chunk], finish_reason=None)
        self.result = self._result


class FakePrefixCache:
    page_len = 16

    def __init__(self, lm: "FakeLanguageModel") -> None:
        self.lm = lm
        self.statistics = types.SimpleNamespace(num_pages=512, prompts_not_kept=0)
        self.error: Exception | None = None

    def save(self, folder: Any) -> None:
        self.lm.calls.append(("save", {"folder": folder}))
        if self.error is not None:
            raise self.error


class FakeChatSession:
    def __init__(self, lm: "FakeLanguageModel", **arguments: Any) -> None:
        self.lm, self.arguments, self.turns = lm, arguments, 0

    def reset(self) -> None:
        self.lm.calls.append(("reset", {}))
        self.turns = 0

    def send(self, text: str, *, max_new_tokens: int) -> FakeStream:
        if text == "too long":
            raise ValueError("prompt: expected at most 9 tokens, got 12")
        self.turns += 1
        self.lm.calls.append(("send", {"text": text, "max_new_tokens": max_new_tokens}))
        return FakeStream(f"reply {self.turns}", self.lm.result([[1, 2]], [f"reply {self.turns}"]))


class FakeCheckpoint(str):
    """An opened source: equal to its name."""

    config: config.ModelConfig
    tokenizer = None


class FakeLanguageModel:
    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.error: BaseException | None = None
        self.reply = REPLY
        self.stats: dict[str, Any] = {}  # more of them
        self.config = config.ModelConfig(
            vocab_size=11,
            hidden_size=6,
            intermediate_size=10,
            num_heads=2,
            num_kv_heads=1,
            head_dim=4,
            layers=(config.LayerConfig(window=5), config.LayerConfig()),
            norm_eps=1e-5,
        )
        self.tokenizer = FakeTokenizer()
        self.prefix_cache = FakePrefixCache(self)

    def result(self, prompts: list[list[int]], texts: list[str]) -> types.SimpleNamespace:
        ids = [[ord(c) for c in text] for text in texts]
        width = max(map(len, ids)) + 3  # padded, so that a door that prints the padding fails
        return types.SimpleNamespace(
            texts=texts,
            tokens=np.array([row + [0] * (width - len(row)) for row in ids], np.int32),
            lengths=np.array([len(row) for row in ids], np.int32),
            finish_reasons=["stop"] * len(texts),
            logprobs=np.array([[-0.5] * (width - 1) + [-np.inf]] * len(texts), np.float32),
            top_logprobs=[[[(65, -0.25), (66, -np.inf)]] * width for _ in texts],
            prompt_tokens=prompts,
            seeds=[7 + row for row in range(len(texts))],
            stats={**STATS, **self.stats},
        )

    def load(self, source: str, **arguments: Any) -> "FakeLanguageModel":
        self.calls.append(("load", {"source": source, **arguments}))
        if self.error is not None:
            raise self.error
        return self

    def open_checkpoint(self, source: str) -> FakeCheckpoint:
        opened = FakeCheckpoint(source)
        opened.config = self.config
        return opened

    def encode(self, text: str) -> list[int]:
        return [ord(c) for c in text]

    def encode_chat(self, messages: list[dict[str, str]]) -> list[int]:
        self.calls.append(("encode_chat", {"messages": messages}))
        return [1, 2, 3]

    def generate(self, prompts: list[list[int]], **arguments: Any) -> types.SimpleNamespace:
        self.calls.append(("generate", {"prompts": prompts, **arguments}))
        num_rows = len(prompts) * arguments["num_samples"]
        return self.result(prompts, [self.reply if row == 0 else f"{self.reply}{row}" for row in range(num_rows)])

    def stream(self, prompt: list[int], **arguments: Any) -> FakeStream:
        self.calls.append(("stream", {"prompt": prompt, **arguments}))
        return FakeStream(self.reply, self.result([prompt], [self.reply]))

    def init_prefix_cache(self, **arguments: Any) -> "FakePrefixCache":
        self.calls.append(("init_prefix_cache", arguments))
        return self.prefix_cache

    def load_prefix_cache(self, folder: Any) -> "FakePrefixCache":
        self.calls.append(("load_prefix_cache", {"folder": folder}))
        return self.prefix_cache

    def chat_session(self, **arguments: Any) -> FakeChatSession:
        self.calls.append(("chat_session", arguments))
        return FakeChatSession(self, **arguments)

    def with_window(self, window: int, num_sinks: int) -> "FakeLanguageModel":
        self.calls.append(("with_window", {"window": window, "num_sinks": num_sinks}))
        return self

    def asked(self, name: str) -> dict[str, Any]:
        """Returns the arguments of the one call of that name."""
        (arguments,) = [arguments for called, arguments in self.calls if called == name]
        return arguments


def install(monkeypatch: pytest.MonkeyPatch) -> FakeLanguageModel:
    """Puts a fake in the place of the module for one test."""
    lm = FakeLanguageModel()
    module = types.ModuleType("jdecode.language_model")
    module.load = lm.load  # pyright: ignore[reportAttributeAccessIssue]
    monkeypatch.setitem(__import__("sys").modules, "jdecode.language_model", module)
    monkeypatch.setattr(jdecode, "language_model", module, raising=False)
    monkeypatch.setattr(checkpoint, "open_checkpoint", lm.open_checkpoint)
    return lm
