"""Model repositories on the Hugging Face hub, through the optional package huggingface-hub."""

import pathlib
import re

from jdecode.weights import orbax_folder

# owner/name, as the hub allows it. A path that exists is never taken for one.
_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")

_FILES = ("*.json", "*.safetensors", "*.model", "*.jinja", f"{orbax_folder.NAME}/*")


def is_id(source: str) -> bool:
    """Tells whether text has the form of a hub id: two names with one slash between them."""
    return _ID.fullmatch(source) is not None and not source.endswith((".gguf", ".safetensors", ".json", ".yaml"))


def fetch(repo_id: str) -> pathlib.Path:
    """Fetches configuration, tokenizer and parameters of a repository, or finds them in the local cache.

    Args:
      repo_id: such as ``HuggingFaceTB/SmolLM2-135M-Instruct``.

    Returns:
      The folder that holds them.

    Raises:
      ValueError: when the package is missing, or the repository cannot be fetched: wrong id, no access, no network.
    """
    try:
        # Late, and optional: only hub ids need it.
        import huggingface_hub
    except ImportError as error:
        raise ValueError(
            f"{repo_id}: expected the package huggingface-hub for a hub id, got none; pip install 'jdecode[hub]', or "
            f"give a local folder or .gguf file"
        ) from error
    try:
        return pathlib.Path(huggingface_hub.snapshot_download(repo_id, allow_patterns=list(_FILES)))
    except Exception as error:  # network, access and cache faults come in many types; each is the same to the user
        cause = str(error).strip().split("\n")[0] or type(error).__name__
        raise ValueError(
            f"{repo_id}: expected a folder, a .gguf file or a hub id that can be fetched, but: {cause[:200]}; check "
            f"the name and the network"
        ) from error
