"""Region modes, importable without loading the splitter."""

from __future__ import annotations

from enum import StrEnum


class RegionsMode(StrEnum):
    """How an assistant's own words are identified."""

    AUTO = "auto"  # the template's {% generation %} blocks if it has any, else its structure
    STRUCTURE = "structure"


class TurnsMode(StrEnum):
    """The context in which an assistant's turn is trained."""

    CONVERSATION = "conversation"  # the conversation rendered once, as transformers does it
    FAITHFUL = "faithful"  # the prompt that inference sees before the turn


class StopMode(StrEnum):
    """Which token ends an assistant's turn."""

    TEMPLATE = "template"  # the end token that the template prints in the turn, if any
    NEXT_MARKER = "next-marker"  # if there is none, the token after the turn, if that is an end token of the model
    APPEND = "append"  # as next-marker, and a last answer that nothing follows gets the token that would follow it
