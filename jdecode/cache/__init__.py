"""The key/value cache: layouts map positions to slots, codecs map rows to bytes; they are orthogonal."""
