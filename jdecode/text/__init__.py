"""Text in and out: tokenizers, chat templates, and the stream of text out of tokens. Imports no jax."""
