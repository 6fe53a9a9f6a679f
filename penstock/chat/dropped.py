"""What a template left out: tool calls (the row is refused), answers and system prompts (noted).

Enters: the conversations of a batch, their regions and segments. Leaves: an error per row whose calls are missing,
since training on it would teach silence, and notes for the ledger. Costs one look at every message, and a search of
the text only for calls and for messages that came out shorter than they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from penstock.chat.conversation import ROLE_OF_NAME, Conversation, Message, Part, Role, role_number
from penstock.chat.cuts import Pieces
from penstock.chat.regions import Int64, Regions, Segments, UInt8
from penstock.errors import RowError

_ROLES: dict[object, int] = {**ROLE_OF_NAME}


class Facts(NamedTuple):
    """What is read of the messages of a batch in one pass; arrays have an entry per message."""

    offsets: Int64  # row r owns messages offsets[r]:offsets[r+1]
    roles: UInt8
    lengths: Int64  # characters of content, where it is text
    calls: list[int]  # messages with tool calls


def read_facts(conversations: Sequence[Conversation]) -> Facts:
    """Read roles, content lengths and who calls tools."""
    messages = [message for conversation in conversations for message in conversation.messages]
    counts = np.fromiter((len(c.messages) for c in conversations), np.int64, len(conversations))
    names = [message.get("role") for message in messages]
    try:
        roles = np.fromiter((_ROLES.get(name, Role.OTHER) for name in names), np.uint8, len(names))
    except TypeError:  # an unhashable role
        roles = np.fromiter((role_number(name) for name in names), np.uint8, len(names))
    contents = [message.get("content") for message in messages]
    lengths = np.fromiter((len(c) if type(c) is str else 0 for c in contents), np.int64, len(contents))
    calls = [number for number, message in enumerate(messages) if message.get("tool_calls")]
    return Facts(np.concatenate(([0], np.cumsum(counts))), roles, lengths, calls)


class _Texts:
    """Finds what a message printed, or its row's whole text where regions are not known."""

    def __init__(self, conversations: Sequence[Conversation], regions: Regions, facts: Facts, pieces: Pieces) -> None:
        self.conversations, self.regions, self.facts, self.pieces = conversations, regions, facts, pieces
        self.printed = np.zeros(len(facts.roles), np.bool_)
        self.printed[pieces.numbers] = True

    def place(self, number: int) -> tuple[int, int, Message]:
        """Row, number in the conversation, and the message itself."""
        row = int(np.searchsorted(self.facts.offsets, number, side="right")) - 1
        index = number - int(self.facts.offsets[row])
        return row, index, self.conversations[row].messages[index]

    def row(self, row: int) -> bytes:
        start = int(self.regions.text_ends[row - 1]) if row else 0
        return self.regions.data[start : int(self.regions.text_ends[row])]

    def message(self, number: int, row: int) -> bytes:
        if not self.regions.known[row]:
            return self.row(row)
        low = int(np.searchsorted(self.pieces.rows, row, side="left"))
        high = int(np.searchsorted(self.pieces.rows, row, side="right"))
        own = low + np.flatnonzero(self.pieces.numbers[low:high] == number)
        ends = zip(self.pieces.starts[own].tolist(), self.pieces.ends[own].tolist(), strict=True)
        return b"".join(self.regions.data[start:end] for start, end in ends)


def find_dropped(
    conversations: Sequence[Conversation], regions: Regions, facts: Facts, pieces: Pieces, segments: Segments
) -> tuple[dict[int, RowError], Counter[str]]:
    """Refuse rows without their calls; note answers and system prompts that are not there."""
    texts = _Texts(conversations, regions, facts, pieces)
    errors: dict[int, RowError] = {}
    for number in facts.calls:
        row, index, message = texts.place(number)
        if row not in regions.errors and row not in errors and _lacks_calls(message, texts.message(number, row)):
            errors[row] = _calls_dropped(index)
    answers, systems = set(), set()
    for number in _shortened(facts, segments):
        row, _, message = texts.place(number)
        if row not in regions.errors and segments.known[row] and not _says(texts.message(number, row), message):
            answers.add(row)
    for number in np.flatnonzero((facts.roles == Role.SYSTEM) & (facts.lengths > 0) & ~texts.printed).tolist():
        row, _, message = texts.place(number)
        if row not in regions.errors and not _says(texts.row(row), message):
            systems.add(row)
    notes = Counter({"content_dropped": len(answers), "system_dropped": len(systems)})
    return errors, +notes


def _calls_dropped(index: int) -> RowError:
    return RowError(
        "tool_calls_dropped",
        f"the chat template drops the tool calls of message {index}",
        "Use a template that prints tool calls (--template), or remove the calls from the row",
    )


def _shortened(facts: Facts, segments: Segments) -> list[int]:
    """Assistant messages whose bodies are shorter than their contents."""
    rows = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    lengths = np.diff(segments.ends, prepend=0)
    firsts = segments.offsets[:-1][np.diff(segments.offsets) > 0]
    lengths[firsts] = segments.ends[firsts]
    body = (segments.parts == Part.BODY) & (segments.roles == Role.ASSISTANT)
    numbers = facts.offsets[rows[body]] + segments.messages[body]
    printed = np.bincount(numbers, lengths[body], minlength=len(facts.roles))
    return np.flatnonzero((facts.roles == Role.ASSISTANT) & (printed < facts.lengths)).tolist()


def _says(text: bytes, message: Message) -> bool:
    """Whether a message's text, less the reasoning in it, occurs."""
    content: str = message["content"].rpartition("</think>")[2].strip()
    return content.encode(errors="replace") in text


def _lacks_calls(message: Message, text: bytes) -> bool:
    """Whether some called function is not named as often as it is called."""
    calls = message["tool_calls"]
    names = Counter(name for call in calls if (name := _name(call))) if isinstance(calls, list) else Counter[str]()
    return any(all(text.count(spelling) < times for spelling in _spellings(name)) for name, times in names.items())


def _name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""


def _spellings(name: str) -> set[bytes]:
    """A name as text, and as templates that print JSON escape it."""
    return {
        name.encode(errors="replace"),
        json.dumps(name)[1:-1].encode(),
        json.dumps(name, ensure_ascii=False)[1:-1].encode(errors="replace"),
    }
