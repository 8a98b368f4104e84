"""Checkpoints: reading Hugging Face and Orbax folders, hub ids and GGUF files, writing such folders, pooling heads."""
