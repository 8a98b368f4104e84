"""The attention backends by name, and which one a call gets."""

from collections.abc import Callable

import jax

from jdecode.attention import banded, blockwise, reference

Attend = Callable[..., jax.Array]
"""The signature of ``reference.attend``."""

BACKENDS: dict[str, Attend] = {
    "banded": banded.attend,  # only a block without a cache, as training has it
    "blockwise": blockwise.attend,
    "reference": reference.attend,
}


def backend(name: str) -> Attend:
    """Returns the backend called ``name``; ``"auto"`` is the fastest that supports every call on every platform.

    Raises:
      ValueError: no backend has this name.
    """
    if name == "auto":
        return blockwise.attend
    if name not in BACKENDS:
        raise ValueError(f"attention: expected auto or one of {', '.join(BACKENDS)}, got {name!r}")
    return BACKENDS[name]
