"""Attention over segments of key/value slots: a reference and a blockwise form, under one contract."""
