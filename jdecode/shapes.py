"""Dimension letters, defined once, and the two ways in which a length is rounded.

Arrays of rank two and more carry the letters of their axes as a suffix: ``logits_BV``, ``q_BTNH``, ``k_BSKH``.
Einsum strings use the same capitals.

====== =========================================
letter axis
====== =========================================
B      batch (rows, requests)
T      tokens in this call
S      cache slots
L      layers
D      model width
F      feed-forward width
N      query heads
K      key/value heads
G      query heads a key/value head, ``N // K``
H      head width
V      vocabulary
W      window, in tokens
M      new tokens that an output buffer holds
P      pages
Z      tokens a page, or a group of the cache
U      groups of tokens
E      experts
====== =========================================

In ``speculative/``, G is the most tokens of a proposal and P = G + 1 the places of its block.
"""


def round_up(length: int, multiple: int) -> int:
    """Returns the least multiple of ``multiple`` that is not under ``length``."""
    return -(-length // multiple) * multiple


def power_of_two_at_least(length: int) -> int:
    """Returns the least power of two that is not under ``length`` (1 for lengths under 2)."""
    return 1 << max(length - 1, 0).bit_length()
