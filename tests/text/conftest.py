"""Tokenizers that the text tests share: a tiny one of each type, always; the two real ones where their files are."""

import json
import pathlib
from typing import Any

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jdecode.text import token_bytes
from jdecode.text import tokenizer as tokenizer_lib
from jdecode.weights import gguf_file

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"

# A chat format in which every part matters: BOS, a trimmed content, and control strings round each turn.
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content | trim }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)


def golden(name: str) -> Any:
    """Reads a golden file of the text tests."""
    return json.loads((GOLDEN / "text" / name).read_text(encoding="utf-8"))


def gguf_fields(path: pathlib.Path) -> dict[str, Any]:
    """Reads the tokenizer's fields of a GGUF, arrays as lists."""
    fields = gguf_file.read_header(path).fields
    return {
        name: value.tolist() if hasattr(value, "tolist") else value
        for name, value in fields.items()
        if name.startswith("tokenizer.")
    }


def byte_level_backend() -> tokenizers.Tokenizer:
    """Builds a byte-level BPE: three control tokens, 256 bytes in order from id 3, ten merges, one added token."""
    alias = {byte: char for char, byte in token_bytes.byte_aliases().items()}
    vocabulary = {token: i for i, token in enumerate(["<|start|>", "<|turn|>", "<|stop|>"])}
    vocabulary.update({alias[byte]: byte + 3 for byte in range(256)})
    pairs = ["o p", "t h", "th e", "Ġ the", "i n", "Ġ a", "s t", "st op", "< |", "| >"]
    merges = [(left, right) for left, right in map(str.split, pairs)]
    for left, right in merges:
        vocabulary[left + right] = len(vocabulary)
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|start|>", "<|turn|>", "<|stop|>"])
    backend.add_tokens([tokenizers.AddedToken("<think>", normalized=False, special=False)])
    return backend


def write_folder(folder: pathlib.Path, backend: tokenizers.Tokenizer, **config: Any) -> pathlib.Path:
    """Writes a tokenizer as a Hugging Face folder has it."""
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> tokenizer_lib.Tokenizer:
    """A tiny byte-level tokenizer with a chat template, which adds BOS."""
    folder = write_folder(
        tmp_path_factory.mktemp("byte_level"),
        byte_level_backend(),
        bos_token="<|start|>",
        eos_token={"content": "<|stop|>", "lstrip": False},
        add_bos_token=True,
        chat_template=CHAT_TEMPLATE,
    )
    return tokenizer_lib.from_folder(folder)


@pytest.fixture(scope="session")
def sentencepiece_fields() -> dict[str, Any]:
    """The fields of a tiny sentencepiece-type vocabulary: 288 tokens, byte fallback, a space before each text."""
    return gguf_fields(GOLDEN / "gguf" / "llama_gqa.f32.gguf")


@pytest.fixture(scope="session")
def sentencepiece(sentencepiece_fields: dict[str, Any]) -> tokenizer_lib.Tokenizer:
    """A tiny sentencepiece-type tokenizer."""
    return tokenizer_lib.from_gguf_fields(sentencepiece_fields)


@pytest.fixture(scope="session")
def gemma3_fields(gemma3_gguf: pathlib.Path) -> dict[str, Any]:
    """The fields of Gemma 3's vocabulary: 262144 tokens, no space before a text."""
    return gguf_fields(gemma3_gguf)


@pytest.fixture(scope="session")
def gemma3(gemma3_fields: dict[str, Any]) -> tokenizer_lib.Tokenizer:
    """Gemma 3's tokenizer."""
    return tokenizer_lib.from_gguf_fields(gemma3_fields)


@pytest.fixture(scope="session")
def smollm2(smollm2_gguf: pathlib.Path) -> tokenizer_lib.Tokenizer:
    """SmolLM2's tokenizer, with its chat template."""
    return tokenizer_lib.from_gguf_fields(gguf_fields(smollm2_gguf))
