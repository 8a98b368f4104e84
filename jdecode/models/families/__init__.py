"""The registry of model families."""

import difflib

from jdecode.models.families import family as family_lib
from jdecode.models.families import gemma3, llama

FAMILIES: tuple[family_lib.Family, ...] = (llama.LLAMA, gemma3.GEMMA3)


def find(model_type: str) -> family_lib.Family:
    """Finds the family of a ``model_type`` of ``config.json``.

    Args:
      model_type: such as ``llama`` or ``gemma3_text``.

    Returns:
      The family.

    Raises:
      ValueError: for an unknown one; names the known ones and the nearest.
    """
    return _find(model_type, {name: family for family in FAMILIES for name in family.model_types}, "model_type")


def find_gguf(architecture: str) -> family_lib.Family:
    """Finds the family of a ``general.architecture`` of a GGUF file; raises as ``find``."""
    known = {name: family for family in FAMILIES for name in family.gguf_architectures}
    return _find(architecture, known, "general.architecture")


def find_name(name: str) -> family_lib.Family:
    """Finds the family that ``ModelConfig.family`` names; raises as ``find``."""
    return _find(name, {family.name: family for family in FAMILIES}, "family")


def _find(name: str, known: dict[str, family_lib.Family], what: str) -> family_lib.Family:
    if isinstance(name, str) and name in known:
        return known[name]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.5)
    nearest = f"; the nearest is {near[0]!r}" if near else ""
    raise ValueError(f"{what}: expected a known family ({', '.join(known)}), got {str(name)[:60]!r}{nearest}")
