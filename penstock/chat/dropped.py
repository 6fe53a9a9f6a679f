"""What a template left out: tool calls (the row is refused), answers and system prompts (noted).

Enters: the conversations of a batch, their regions and segments. Leaves: an error per row whose calls are missing,
since training on it would teach silence, and notes for the ledger. Costs one look at every message, and a search of
the text only for calls and for messages that came out shorter than they are.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import chain
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np

from penstock.chat.conversation import ROLE_OF_NAME, Conversation, Message, Part, Role, role_number
from penstock.chat.cuts import Pieces, run_lengths
from penstock.chat.regions import Int64, Regions, Segments, UInt8
from penstock.errors import RowError

_NEXT_TO_NOTHING = 24  # bytes; an empty thinking block is 19
_ROLES: dict[object, int] = {name: role.value for name, role in ROLE_OF_NAME.items()}


class Facts(NamedTuple):
    """What is read of the messages of a batch in one pass."""

    offsets: Int64  # row r owns messages offsets[r]:offsets[r+1]
    roles: UInt8  # one per message
    calls: list[int]  # numbers of the messages with tool calls


def read_facts(conversations: Sequence[Conversation]) -> Facts:
    """Read who speaks and who calls tools."""
    lists = [conversation.messages for conversation in conversations]
    messages = list(chain.from_iterable(lists))
    try:
        roles = np.fromiter(map(_ROLES.__getitem__, map(itemgetter("role"), messages)), np.uint8, len(messages))
    except (KeyError, TypeError):  # a role beyond the usual four, or none
        names = (message.get("role") for message in messages)
        roles = np.fromiter(map(role_number, names), np.uint8, len(messages))
    counts = np.fromiter(map(len, lists), np.int64, len(lists))
    calls = [number for number, message in enumerate(messages) if message.get("tool_calls")]
    return Facts(np.concatenate(([0], np.cumsum(counts))), roles, calls)


class _Texts:
    """What messages and rows printed."""

    def __init__(self, regions: Regions, pieces: Pieces, messages: int) -> None:
        self._regions, self._pieces = regions, pieces
        self.counts = np.bincount(pieces.numbers, minlength=messages)
        self._last = np.zeros(messages, np.int64)
        self._last[pieces.numbers] = np.arange(len(pieces.numbers))

    def of_row(self, row: int) -> bytes:
        start = int(self._regions.text_ends[row - 1]) if row else 0
        return self._regions.data[start : int(self._regions.text_ends[row])]

    def of_message(self, number: int, row: int) -> bytes:
        """All that a message printed; its row's whole text where regions are not known."""
        if not self._regions.known[row]:
            return self.of_row(row)
        if self.counts[number] == 1:
            last = self._last[number]
            return self._regions.data[int(self._pieces.starts[last]) : int(self._pieces.ends[last])]
        own = np.flatnonzero(self._pieces.numbers == number)
        ends = zip(self._pieces.starts[own].tolist(), self._pieces.ends[own].tolist(), strict=True)
        return b"".join(self._regions.data[start:end] for start, end in ends)


def find_dropped(
    conversations: Sequence[Conversation], regions: Regions, facts: Facts, pieces: Pieces, segments: Segments
) -> tuple[dict[int, RowError], Counter[str]]:
    """Refuse rows without their calls; note answers and system prompts that are not there."""
    texts = _Texts(regions, pieces, len(facts.roles))
    errors: dict[int, RowError] = {}
    answers, systems = set(), set()
    doubtful, printed = _doubtful(facts, segments)
    for number, row, index in _places(facts, regions, doubtful):
        message = conversations[row].messages[index]
        if conversations[row].plain and printed[number] >= len(message["content"]):
            continue  # a short answer, all there
        text = texts.of_message(number, row)
        if message.get("tool_calls") and row not in errors and _lacks_calls(message, text):
            errors[row] = _calls_dropped(index)
        if segments.known[row] and not _says(text, message):
            answers.add(row)
    unprinted = np.flatnonzero((facts.roles == Role.SYSTEM) & (texts.counts == 0)).tolist()
    for _, row, index in _places(facts, regions, unprinted):
        if not _says(texts.of_row(row), conversations[row].messages[index]):
            systems.add(row)
    return errors, +Counter({"content_dropped": len(answers), "system_dropped": len(systems)})


def _places(facts: Facts, regions: Regions, numbers: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Messages by their number in the batch, with row and number in the row; those of refused rows are left out."""
    rows = np.searchsorted(facts.offsets, np.array(numbers, np.int64), side="right") - 1
    indices = np.array(numbers, np.int64) - facts.offsets[rows]
    for number, row, index in zip(numbers, rows.tolist(), indices.tolist(), strict=True):
        if row not in regions.errors:
            yield number, row, index


def _calls_dropped(index: int) -> RowError:
    return RowError(
        "tool_calls_dropped",
        f"the chat template drops the tool calls of message {index}",
        "Use a template that prints tool calls (--template), or remove the calls from the row",
    )


def _doubtful(facts: Facts, segments: Segments) -> tuple[list[int], list[float]]:
    """Assistant messages whose words may be missing: those with calls, and those that printed next to nothing.

    And, for every message, how many bytes it printed as an assistant.
    """
    rows = np.repeat(np.arange(len(segments.offsets) - 1), np.diff(segments.offsets))
    body = (segments.parts == Part.BODY) & (segments.roles == Role.ASSISTANT)
    numbers = facts.offsets[rows[body]] + segments.messages[body]
    printed = np.bincount(numbers, run_lengths(segments)[body], minlength=len(facts.roles))
    doubtful = printed < _NEXT_TO_NOTHING
    doubtful[facts.calls] = True
    return np.flatnonzero(doubtful & (facts.roles == Role.ASSISTANT)).tolist(), printed.tolist()


def _says(text: bytes, message: Message) -> bool:
    """Whether a message's text, less the reasoning in it, occurs."""
    content = message.get("content")
    if not isinstance(content, str):
        return True
    return content.rpartition("</think>")[2].strip().encode(errors="replace") in text


def _lacks_calls(message: Message, text: bytes) -> bool:
    """Whether some called function is not named as often as it is called."""
    calls = message["tool_calls"]
    names = [name for call in calls if (name := _name(call))] if isinstance(calls, list) else []
    return any(not _printed(name, names.count(name), text) for name in names)


def _printed(name: str, times: int, text: bytes) -> bool:
    """Whether a name occurs so often, as text or as templates that print JSON escape it."""
    if text.count(name.encode(errors="replace")) >= times:
        return True
    escaped = json.dumps(name)[1:-1], json.dumps(name, ensure_ascii=False)[1:-1]
    return any(text.count(spelling.encode(errors="replace")) >= times for spelling in escaped)


def _name(call: Any) -> str:
    function = call.get("function", call) if isinstance(call, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    return name if isinstance(name, str) else ""
