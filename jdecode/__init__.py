"""jdecode: a functional decoding engine for language models in JAX.

Example::

    import jdecode

    lm = jdecode.load("model.gguf")
    result = lm.generate("The capital of France is", max_new_tokens=8)
    print(result.texts[0])
"""

import importlib
from typing import TYPE_CHECKING, Any

from jdecode.config import CacheConfig, LayerConfig, MeshConfig, ModelConfig, RopeConfig, RunConfig, SamplingConfig

if TYPE_CHECKING:
    from jdecode.chat_session import ChatSession
    from jdecode.generation import Chunk, GenerateResult, TextStream
    from jdecode.language_model import LanguageModel, load
    from jdecode.prompt_compression.compress import CompressedPrompt, compress_prompt
    from jdecode.serving.prefix_cache import PrefixCache

__version__ = "0.1.0"

__all__ = [
    "CacheConfig",
    "ChatSession",
    "Chunk",
    "CompressedPrompt",
    "GenerateResult",
    "LanguageModel",
    "LayerConfig",
    "MeshConfig",
    "ModelConfig",
    "PrefixCache",
    "RopeConfig",
    "RunConfig",
    "SamplingConfig",
    "TextStream",
    "compress_prompt",
    "load",
]

_MODULES = {
    "ChatSession": "chat_session",
    "Chunk": "generation",
    "CompressedPrompt": "prompt_compression.compress",
    "GenerateResult": "generation",
    "LanguageModel": "language_model",
    "PrefixCache": "serving.prefix_cache",
    "TextStream": "generation",
    "compress_prompt": "prompt_compression.compress",
    "load": "language_model",
}


def __getattr__(name: str) -> Any:
    """Imports what needs jax when it is first asked for, so that a command's usage errors answer at once."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
