"""Options of the regions stage, importable without loading it."""

from __future__ import annotations

from enum import StrEnum


class RegionsMode(StrEnum):
    """Who decides what an assistant wrote."""

    AUTO = "auto"  # the author's {% generation %} blocks where the template has them, else the structure
    STRUCTURE = "structure"


class TurnsMode(StrEnum):
    """The context in which an assistant's turn is trained."""

    CONVERSATION = "conversation"  # the conversation rendered once, as transformers does it
    FAITHFUL = "faithful"  # what inference sees before that turn


class StopMode(StrEnum):
    """What ends an assistant's turn."""

    TEMPLATE = "template"  # the end token that the template prints as part of the turn, if it prints one
    NEXT_MARKER = "next-marker"  # where it prints none: the token after the turn, if it is an end token of the model
