"""Options of the regions stage, importable without loading it."""

from __future__ import annotations

from enum import StrEnum


class RegionsMode(StrEnum):
    """Who decides what an assistant wrote."""

    AUTO = "auto"  # the author's {% generation %} blocks where the template has them, else the structure
    STRUCTURE = "structure"


class StopMode(StrEnum):
    """What ends an assistant's turn."""

    TEMPLATE = "template"  # the end token that the template prints as part of the turn, if it prints one
    NEXT_MARKER = "next-marker"  # where it prints none: the token after the turn, if it is an end token of the model
