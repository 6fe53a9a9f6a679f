"""The choices that change what is prepared. Leftmost of all stages, so that options need none of them."""

from __future__ import annotations

from enum import StrEnum


class Choice(StrEnum):
    """A choice whose values are also found with hyphens, as recipes store them."""

    @classmethod
    def _missing_(cls, value: object) -> Choice | None:
        return next((member for member in cls if member.value == str(value).replace("-", "_")), None)


class RegionsMode(StrEnum):
    """How an assistant's own words are identified."""

    AUTO = "auto"  # the template's {% generation %} blocks if it has any, else its structure
    STRUCTURE = "structure"


class TurnsMode(StrEnum):
    """The context in which an assistant's turn is trained."""

    CONVERSATION = "conversation"  # the conversation rendered once, as transformers does it
    FAITHFUL = "faithful"  # the prompt that inference sees before the turn


class StopMode(Choice):
    """Which token ends an assistant's turn."""

    TEMPLATE = "template"  # the end token that the template prints in the turn, if any
    NEXT_MARKER = "next_marker"  # if there is none, the token after the turn, if that is an end token of the model
    APPEND = "append"  # as next_marker, and a last answer that nothing follows gets the token that would follow it


class ReasoningInContent(StrEnum):
    """Whether text between `<think>` and `</think>` in a message's content is a part of its own."""

    AUTO = "auto"  # where the template prints tags of its own around it
    SPLIT = "split"  # always


class Straddle(StrEnum):
    """Which tokens at the border of a marked span get its weight."""

    INSIDE = "inside"  # those that lie inside of it
    TOUCH = "touch"  # those that overlap it
    ERROR = "error"  # no token may cross the border; rows with such tokens are rejected


class SpecialText(Choice):
    """What to do with special tokens that occur in the text of messages."""

    AS_TEMPLATE = "as_template"
    REJECT = "reject"


class Eos(StrEnum):
    """Whether an end-of-sequence token follows plain text and completions that are strings."""

    AUTO = "auto"  # unless the text ends with it or the tokenizer adds it
    ALWAYS = "always"
    NEVER = "never"


class DroppedCalls(StrEnum):
    """What to do with a conversation whose tool calls the template doesn't print."""

    REJECT = "reject"
    KEEP = "keep"


class Arguments(Choice):
    """The form in which templates receive the arguments of tool calls."""

    AUTO = "auto"  # parsed or written as JSON if the template can't print them otherwise
    AS_GIVEN = "as_given"


class TokenizerAs(StrEnum):
    """Which implementation of the tokenizer decides the ids."""

    FILE = "file"
    AUTO = "auto"
