"""Checkpoints: reading Hugging Face folders, hub ids and GGUF files, and writing Hugging Face folders."""
