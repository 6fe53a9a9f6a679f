"""Maintenance of a cache: list, verify, collect garbage."""
