"""Messages as small codes: two messages of one code differ only in words, names and arguments.

Conversations enter; out come, for those that stencils may serve, the codes of their messages, and from these one number
per message, its context: all the facts that a local template can tell it apart by. Costs 0.2 µs a message where
messages are plain, 1 µs elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import chain, compress, repeat
from operator import attrgetter, is_not, not_
from typing import Any, Final, NamedTuple

import numpy as np
from msgspec import UNSET

from penstock.chat.adapt import Adapter
from penstock.chat.context import REASONING_FIELDS
from penstock.chat.conversation import ROLE_OF_NAME, Conversation, Message, Role
from penstock.chat.guards import suspects
from penstock.chat.locality import SLICES, Locality
from penstock.chat.plain_rows import Flat, Plain, as_message
from penstock.chat.regions import Bool, Int64, UInt8

MOST_CODES: Final = 255
MOST_TOOLS: Final = 126
_ROLES: Final[dict[object, Role]] = dict(ROLE_OF_NAME.items())
_MORE_WITH_TOOLS: Final = "tools, with which the template does more than print them, or very many"
_CALL_KEYS: Final = frozenset(("id", "type", "function"))
_role_of, _content_of, _calls_of = attrgetter("role"), attrgetter("content"), attrgetter("tool_calls")
_messages_of, _tools_of = attrgetter("messages"), attrgetter("tools")


class Shape(NamedTuple):
    """What a message is like."""

    role: Role
    content: str | None  # "text": words that are not blank; "", None: no words
    calls: int = 0


Tools = Sequence[Any]


class Given(NamedTuple):
    """What of a message is filled in."""

    content: Any
    calls: Sequence[tuple[str, Any]] = ()  # names and arguments
    tools: Tools = ()  # of the row, where they are printed with this message


class Batch(NamedTuple):
    """The rows of a batch that may be served."""

    rows: list[int]
    words: list[Any]  # the contents of the messages of all these rows, one after the other: str, bytes, None
    odd: dict[int, Given]  # by their place there: messages that are more, or less, than words
    codes: Int64  # one per message; 0: it has none, and its row can't be served
    offsets: Int64  # the k-th row has messages offsets[k]:offsets[k+1]
    tools: list[Tools | None]  # of the k-th row

    def taken(self, keep: Bool) -> Batch:
        """Only some of the rows."""
        counts = np.diff(self.offsets)
        of_messages = np.repeat(keep, counts)
        places = np.cumsum(of_messages) - 1
        return Batch(
            list(compress(self.rows, keep.tolist())),
            list(compress(self.words, of_messages.tolist())),
            {int(places[place]): given for place, given in self.odd.items() if of_messages[place]},
            self.codes[of_messages],
            np.concatenate(([0], np.cumsum(counts[keep]))),
            list(compress(self.tools, keep.tolist())),
        )


class Draft:
    """Rows on their way to a batch; the adapter gives messages and tools the form that the template takes."""

    def __init__(self, shapes: Shapes, adapter: Adapter) -> None:
        self.rows: list[int] = []
        self.left: dict[int, str] = {}  # rows that stencils do not serve, and why, as far as it is known
        self._shapes, self._adapter = shapes, adapter
        self._words: list[Any] = []
        self._codes: list[int] = []
        self._counts: list[int] = []
        self._tools: list[Tools | None] = []
        self._odd: dict[int, Given] = {}

    def add_flat(self, flat: Flat) -> None:
        """Add rows whose messages stand one after the other."""
        codes = list(flat.roles.translate(bytes(map(self._shapes.plain.__getitem__, flat.names)).ljust(256)))
        for place, message in flat.odd.items():
            codes[place], given = (0, None) if message is None else self._looked_at(message)
            if given is not None:
                self._odd[len(self._codes) + place] = given
        self.rows += flat.rows
        self._words += flat.words
        self._codes += codes
        self._counts += flat.counts
        self._tools += repeat(None, len(flat.rows))

    def add_plain(self, rows: Sequence[int], decoded: Sequence[Plain]) -> None:
        """Add rows that were decoded as plain."""
        lists = list(map(_messages_of, decoded))
        flat = list(chain.from_iterable(lists))
        words = list(map(_content_of, flat))
        codes = list(map(self._shapes.plain.__getitem__, map(_role_of, flat)))
        places = range(len(flat))
        odd = {*compress(places, map(is_not, map(_calls_of, flat), repeat(UNSET))), *compress(places, map(not_, words))}
        if any(map(str.isspace, filter(None, words))):
            odd |= {place for place, said in enumerate(words) if said and said.isspace()}
        for place in odd:
            codes[place], given = self._looked_at(flat[place])
            if given is not None:
                self._odd[len(self._codes) + place] = given
        tools = list(map(_tools_of, decoded))
        if any(map(is_not, tools, repeat(None))):
            first = 0
            for number, given_tools in enumerate(tools):
                if given_tools is not None:
                    tools[number] = self._adapter.adapt_tools(given_tools)
                    if not self._shapes.allow(tools[number]):
                        codes[first] = 0
                        self.left[rows[number]] = _MORE_WITH_TOOLS
                first += len(lists[number])
        self.rows += rows
        self._words += words
        self._codes += codes
        self._counts += map(len, lists)
        self._tools += tools

    def _looked_at(self, message: Any) -> tuple[int, Given | None]:
        """The code of an odd message, 0 where it has none, and what of it is filled in."""
        calls = message.tool_calls
        if calls is UNSET or (message.content and message.content.isspace()):
            return self._adapted(message)
        given = Given(message.content, [(call.function.name, call.function.arguments) for call in calls])
        if not all(type(arguments) is dict for _, arguments in given.calls):
            return self._adapted(message)
        # What becomes of objects and words does not depend on what is in them, so it is found out once.
        kind = message.role, given.content and True, len(calls)
        if kind not in self._shapes.calling:
            self._shapes.calling[kind] = self._adapted(message)[0]
        return self._shapes.calling[kind], given

    def _adapted(self, message: Any) -> tuple[int, Given | None]:
        """The same, of the message in the form that the template takes; it may have none, or say nothing and should."""
        role = self._shapes.names[message.role]
        if message.content is None and message.tool_calls is UNSET and role != "tool":
            return 0, None
        adapted = self._adapter.adapt_message(as_message(message, role))
        code = None if adapted is None else self._shapes.code(adapted)
        return (0, None) if adapted is None or not code else (code, _given(adapted))

    def add(self, row: int, conversation: Conversation) -> None:
        """Add one row, if it may be served."""
        tools = conversation.tools
        if conversation.variables or not conversation.messages:
            self.left[row] = "template variables of the row"
            return
        if tools is not None and not self._shapes.allow(tools):
            self.left[row] = _MORE_WITH_TOOLS
            return
        suspect = suspects([conversation]).get(0)
        if suspect is not None and suspect.control and suspect.private:
            self.left[row] = "control characters"  # no marks are left: the engine would not know its regions
            return
        codes = self._shapes.codes(conversation)
        if codes is None:
            return
        numbers = range(len(codes)) if conversation.odd is None else conversation.odd
        self._odd.update((len(self._codes) + number, _given(conversation.messages[number])) for number in numbers)
        self.rows.append(row)
        self._words += [message["content"] for message in conversation.messages]
        self._codes += codes
        self._counts.append(len(codes))
        self._tools.append(tools)

    def batch(self) -> Batch:
        """All rows whose messages have codes."""
        offsets = np.concatenate(([0], np.cumsum(np.array(self._counts, np.int64))))
        batch = Batch(self.rows, self._words, self._odd, np.array(self._codes, np.int64), offsets, self._tools)
        if batch.rows and not batch.codes.all():
            return batch.taken(np.minimum.reduceat(batch.codes, batch.offsets[:-1]) > 0)
        return batch


class Shapes:
    """The shapes met so far, by code; a code is the shape's number in this list."""

    def __init__(self, locality: Locality, names: Mapping[str, str]) -> None:
        self.known: list[Shape | None] = [None, *(Shape(role, "text") for role in ROLE_OF_NAME.values())]
        self._codes = {shape: code for code, shape in enumerate(self.known)}
        self._usual = {name: self._codes[Shape(role, "text")] for name, role in ROLE_OF_NAME.items()}
        self.names = names  # as plain rows name their roles
        self.plain = {name: self._usual[role] for name, role in names.items()}
        self.calling: dict[tuple[str, Any, int], int] = {}  # codes of plain messages with so many calls
        # The template is given reasoning under all its names, if under one.
        reasoning = REASONING_FIELDS if not locality.read.isdisjoint(REASONING_FIELDS) else ()
        self._watched = locality.read | {"tool_calls", *reasoning}
        self._calls, self._tools = locality.calls, locality.tools

    def allow(self, tools: Sequence[Any]) -> bool:
        """Whether rows with these tools may be served."""
        return self._tools and len(tools) <= MOST_TOOLS and all(type(tool) is dict for tool in tools)

    def codes(self, conversation: Conversation) -> list[int] | None:
        """The codes of all messages, of which only the odd ones need be looked at; None where one has none."""
        messages, odd = conversation.messages, conversation.odd
        codes: list[int | None] = [self._usual.get(message["role"]) for message in messages]
        for number in range(len(messages)) if odd is None else odd:
            codes[number] = self.code(messages[number])
        return None if None in codes else codes  # type: ignore[return-value]

    def code(self, message: Message) -> int | None:
        content = message.get("content")
        calls = 0
        if not self._watched.isdisjoint(message):
            if self._watched & message.keys() != {"tool_calls"} or not self._calls:
                return None
            calls = _usual_calls(message["tool_calls"])
            if not calls:
                return None
        elif type(content) is str and content and not content.isspace():
            return self._usual.get(message["role"])
        if "content" not in message or (content is not None and (type(content) is not str or content.isspace())):
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

    def contexts(self, batch: Batch) -> Int64:
        """For each message a number that tells its shape, its place, the roles around it, how its row begins and how
        many tools that has."""
        codes, offsets = batch.codes, batch.offsets
        roles = self.roles(codes).astype(np.int64)
        counts = np.diff(offsets)
        first, last = offsets[:-1], offsets[1:] - 1
        index = np.arange(len(codes)) - np.repeat(first, counts)
        before, after = np.roll(roles, 1), np.roll(roles, -1)
        before[first] = after[last] = Role.NONE
        # The message "before" the first one is, to a template that counts down, the last one.
        around = np.where(index <= SLICES, np.repeat(roles[last], counts), Role.NONE)
        beginning = np.array([0 if tools is None else 1 + len(tools) for tools in batch.tools], np.int64)
        for k in range(SLICES + 1):
            beginning = beginning << 8 | np.where(counts > k, codes[np.minimum(first + k, last)], 0)
        number = np.repeat(beginning, counts) << 8 | codes
        for role in (before, after, around):
            number = number << 3 | role
        return number << 3 | np.minimum(index, SLICES + 1) << 1 | index & 1


def _given(message: Message) -> Given:
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    return Given(message["content"], [(function["name"], function["arguments"]) for function in calls])


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
