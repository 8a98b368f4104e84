"""The tests of jdecode; a package so that they can share what stands in for a model."""
