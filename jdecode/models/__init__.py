"""Decoder-only transformers in flax.linen: pure functions of parameters, tokens and an explicit cache."""
