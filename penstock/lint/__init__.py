"""Lint: which keys of a configuration the installed trainers accept, read from their source and never by import."""
