"""HTML for notebooks. Late-bound: what has a `_repr_html_` stands left of `look`, which draws it."""

from __future__ import annotations

from importlib import import_module


def html(shown: object) -> str | None:
    """What a notebook shows of an example, a batch, a dataset or a view; None: its plain repr."""
    drawn: str | None = import_module("penstock.look.notebook").html_of(shown)
    return drawn
