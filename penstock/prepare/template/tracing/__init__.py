"""Finds out which message, and which of its fields, printed which characters of a text that jinja2 rendered."""
