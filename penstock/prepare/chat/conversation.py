"""The normalised conversation: the record that is read from a row and rendered by a template."""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum
from typing import Any, NamedTuple

from penstock.prepare.chat.notes import Note

Message = dict[str, Any]


class Role(IntEnum):
    """The role that a segment of tokens belongs to; stored as uint8 in shards, so the numbers never change."""

    NONE = 0  # glue: text that no message printed
    SYSTEM = 1
    USER = 2
    ASSISTANT = 3
    TOOL = 4
    OTHER = 5  # any further role that a template knows (developer, ipython, …)


class Part(IntEnum):
    """The part of a message's region; stored as uint8 in shards, so the numbers never change.

    An assistant's body is cut into the parts from REASONING on; what prints it decides which. `BODY` is a body that is
    not cut: of other roles, and where nothing is known about its parts.
    """

    GLUE = 0
    HEADER = 1
    BODY = 2
    STOP = 3
    TAIL = 4
    CONTEXT = 5  # of a message that another example of the row trains (`--turns faithful`)
    # 6 is reserved for media
    REASONING = 7
    CONTENT = 8
    CALL_NAME = 9
    CALL_ARGUMENTS = 10  # with the braces, quotes and keys inside them
    REASONING_MARKUP = 11  # what the template prints around reasoning
    CALL_MARKUP = 12  # what it prints before, inside and after calls
    EMPTY_REASONING = 13  # a block of reasoning that the template makes up
    MARKUP = 14  # the rest, such as names of channels


BODY_PARTS = (Part.BODY, *(part for part in Part if part >= Part.REASONING))


ROLE_OF_NAME: dict[str, Role] = {
    "system": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
}


def role_number(name: object) -> Role:
    """Returns the stored number of a message's role name."""
    return ROLE_OF_NAME.get(name, Role.OTHER) if isinstance(name, str) else Role.OTHER


def roles_of(messages: Iterable[object]) -> list[Role]:
    """Returns the stored numbers of the messages' roles."""
    return [role_number(message.get("role") if isinstance(message, dict) else None) for message in messages]


Marked = tuple[tuple[int, int], ...]  # marked spans of a text in code points: sorted, disjoint, not empty


class Conversation(NamedTuple):
    """One normalised conversation: what a template renders, or plain texts.

    `texts` is set for rows without a template (plain text, string prompt and completion): they are concatenated, and
    each counts as one message of the given role; `messages` is then empty.
    `weights` has one entry per message (None if not given). `variables` are the row's own template variables. `notes`
    record which parts of the row aren't used. `spans` and `span_weights` have one entry per message (None if it has no
    marked spans): spans of its content, or for each part of a content that is a list, and the weights of all of them.
    """

    messages: list[Message]
    tools: list[Any] | None = None
    weights: tuple[float | None, ...] | None = None
    variables: dict[str, Any] | None = None
    texts: tuple[tuple[Role, str], ...] | None = None
    notes: tuple[Note, ...] = ()
    label: bool | None = None  # KTO: whether the answer is desirable
    spans: tuple[Marked | tuple[Marked, ...] | None, ...] | None = None
    span_weights: tuple[tuple[float, ...] | None, ...] | None = None
