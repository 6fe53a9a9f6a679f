"""Messages as small codes: two messages of one code differ only in words, names and arguments.

Conversations enter; out come, for those that stencils may serve, the codes of their messages, and from these one number
per message, its context: all the facts that a local template can tell it apart by. Costs 0.2 µs a message where
messages are plain, 1 µs elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.chat.context import REASONING_FIELDS
from penstock.chat.conversation import ROLE_OF_NAME, Conversation, Message, Role
from penstock.chat.locality import SLICES, Locality
from penstock.chat.regions import Int64, UInt8

MOST_CODES: Final = 255
_ROLES: Final[dict[object, Role]] = dict(ROLE_OF_NAME.items())
_CALL_KEYS: Final = frozenset(("id", "type", "function"))
_role_of, _content_of = itemgetter("role"), itemgetter("content")


class Shape(NamedTuple):
    """What a message is like."""

    role: Role
    content: str | None  # "text": words that are not blank; "", None: no words
    calls: int = 0


class Batch(NamedTuple):
    """The rows of a batch that may be served."""

    rows: list[int]
    messages: list[Message]  # of all these rows, one after the other
    codes: Int64  # one per message
    offsets: Int64  # the k-th row has messages offsets[k]:offsets[k+1]


class Shapes:
    """The shapes met so far, by code; a code is the shape's number in this list."""

    def __init__(self, locality: Locality) -> None:
        self.known: list[Shape | None] = [None, *(Shape(role, "text") for role in ROLE_OF_NAME.values())]
        self._codes = {shape: code for code, shape in enumerate(self.known)}
        self._plain = {role.name.lower(): self._codes[Shape(role, "text")] for role in ROLE_OF_NAME.values()}
        self._watched = locality.read | {"tool_calls", *REASONING_FIELDS}
        self._calls = locality.calls

    def read(self, conversations: Sequence[Conversation]) -> Batch:
        """The codes of all rows that have them."""
        plain = [row for row, conversation in enumerate(conversations) if conversation.plain]
        messages = list(chain.from_iterable([conversations[row].messages for row in plain]))
        codes = self._plain_codes(messages)
        if codes is None:  # leave out those that are not so plain
            plain = [row for row in plain if self._plain_codes(conversations[row].messages) is not None]
            messages = list(chain.from_iterable([conversations[row].messages for row in plain]))
            codes = self._plain_codes(messages) or []
        served = frozenset(plain)
        rows = plain
        for row, conversation in enumerate(conversations):
            if row not in served and conversation.tools is None and not conversation.variables:
                found = self._each(conversation)
                if found:
                    rows.append(row)
                    messages += conversation.messages
                    codes += found
        counts = np.fromiter((len(conversations[row].messages) for row in rows), np.int64, len(rows))
        offsets = np.concatenate(([0], np.cumsum(counts)))
        return Batch(rows, messages, np.array(codes, np.int64), offsets)

    def _plain_codes(self, messages: list[Message]) -> list[int] | None:
        """The codes of messages that have a usual role and words, all of them; else None."""
        contents = list(map(_content_of, messages))
        if not all(contents) or any(map(str.isspace, contents)):
            return None
        try:
            return list(map(self._plain.__getitem__, map(_role_of, messages)))
        except KeyError:
            return None

    def _each(self, conversation: Conversation) -> list[int] | None:
        """The codes of all messages, of which only the odd ones need be looked at; None where one has none."""
        messages, odd = conversation.messages, conversation.odd
        codes: list[int | None] = [self._plain.get(message["role"]) for message in messages]
        for number in range(len(messages)) if odd is None else odd:
            codes[number] = self._code(messages[number])
        return None if None in codes else codes  # type: ignore[return-value]

    def _code(self, message: Message) -> int | None:
        content = message.get("content")
        calls = 0
        if not self._watched.isdisjoint(message):
            if self._watched & message.keys() != {"tool_calls"} or not self._calls:
                return None
            calls = _usual_calls(message["tool_calls"])
            if not calls:
                return None
        elif type(content) is str and content and not content.isspace():
            return self._plain.get(message["role"])
        if "content" not in message or (content and (type(content) is not str or content.isspace())):
            return None
        role = _ROLES.get(message["role"])
        if role is None:
            return None
        shape = Shape(role, "text" if content else content, calls)
        code = self._codes.get(shape)
        if code is None and len(self.known) <= MOST_CODES:
            code = self._codes[shape] = len(self.known)
            self.known.append(shape)
        return code

    def roles(self, codes: Int64) -> UInt8:
        """The roles of messages."""
        table = np.array([Role.NONE if shape is None else shape.role for shape in self.known], np.uint8)
        return table[codes]

    def contexts(self, codes: Int64, offsets: Int64) -> Int64:
        """For each message a number that tells its shape, its place, the roles around it and how its row begins."""
        roles = self.roles(codes).astype(np.int64)
        counts = np.diff(offsets)
        first, last = offsets[:-1], offsets[1:] - 1
        index = np.arange(len(codes)) - np.repeat(first, counts)
        before, after = np.roll(roles, 1), np.roll(roles, -1)
        before[first] = after[last] = Role.NONE
        # The message "before" the first one is, to a template that counts down, the last one.
        around = np.where(index <= SLICES, np.repeat(roles[last], counts), Role.NONE)
        beginning = np.zeros(len(counts), np.int64)
        for k in range(SLICES + 1):
            beginning = beginning << 8 | np.where(counts > k, codes[np.minimum(first + k, last)], 0)
        number = np.repeat(beginning, counts) << 8 | codes
        for role in (before, after, around):
            number = number << 3 | role
        return number << 3 | np.minimum(index, SLICES + 1) << 1 | index & 1


def _usual_calls(calls: Any) -> int:
    """How many calls these are, if all have the usual form; else 0."""
    if type(calls) is not list:
        return 0
    for call in calls:
        function = call.get("function")
        if not call.keys() <= _CALL_KEYS or call.get("type") != "function" or type(function) is not dict:
            return 0
        if len(function) != 2 or type(function.get("arguments")) is not dict or not function.get("name"):
            return 0
    return len(calls)
