"""Shorter prompts: what a small model finds predictable is left out before the model reads a prompt."""
