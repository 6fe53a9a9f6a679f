"""Rows of usual messages, decoded straight into what stencils need.

The bytes of rows enter; for each row a list of messages leaves, or None: the row has more to it (tools, reasoning,
control characters, an error), and is to be read by `rows`. What is decoded here would have been read equally there, but
for messages that say nothing and should: these the draft lets go.
Keys that the template never reads are let pass. The decoder checks types and names as it parses, which costs less than
parsing into dicts: some 1.5 µs a KB.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Sequence
from operator import attrgetter
from typing import Annotated, Any, Final, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from penstock.chat.conversation import ROLE_OF_NAME, Message
from penstock.chat.formats import ROLES, Format, Mapping
from penstock.chat.formats_columns import ChatColumns
from penstock.chat.locality import Locality

Plain = list[Any]  # messages, each with `role` (as the row names it), `content` and `tool_calls` (UNSET: none)
Add = Callable[[Sequence[int], Sequence[Plain]], None]
_AT_ONCE: Final = 64  # rows
_MOST_COLUMNS: Final = 200
_UNKNOWN: Final = "Object contains unknown field"
_BESIDE: Final = ("tool_call_id", "name", "id")  # of a message: for few templates to read
_DOUBTFUL: Final = re.compile("[\x00-\x08\x0b\x0e-\x1f\ud800-\udfff]")
_REFUSALS: Final = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
_role_of = attrgetter("role")


class Function(Struct, forbid_unknown_fields=True, gc=False):
    """What a tool call calls."""

    name: Annotated[str, Meta(min_length=1)]
    arguments: dict[str, Any] | str


class Call(Struct, forbid_unknown_fields=True, gc=False):
    """A tool call in the usual form."""

    type: Literal["function"]
    function: Function
    id: str | UnsetType | None = UNSET

    def as_json(self) -> dict[str, Any]:
        function = {"name": self.function.name, "arguments": self.function.arguments}
        return {"type": "function", "function": function}


def as_message(message: Any, role: str) -> Message:
    """One of these messages, as all other stages know them."""
    calls = message.tool_calls
    if calls is UNSET:
        return {"role": role, "content": message.content}
    return {"role": role, "content": message.content, "tool_calls": [call.as_json() for call in calls]}


class PlainRows:
    """Decodes rows as a mapping says, for a local template."""

    def __init__(self, mapping: Mapping, locality: Locality) -> None:
        self.roles = {name: role for name, role in (dict(mapping.roles) or ROLES).items() if role in ROLE_OF_NAME}
        self._answers = frozenset(name for name, role in self.roles.items() if role == "assistant")
        self._messages = dict(mapping.columns)["messages"]
        self._others = ChatColumns(mapping).names
        names = {"role": mapping.role_key or "role", "content": mapping.content_key or "content"}
        calls = Annotated[list[Call], Meta(min_length=1)] if locality.calls else UnsetType
        fields: list[Any] = [("role", Literal[tuple(self.roles)]), ("content", str | None)]
        fields.append(("tool_calls", calls | UnsetType, UNSET))
        ignored = set(_BESIDE) - locality.read - set(mapping.weight_keys) - set(names.values())
        fields += [(name, str | UnsetType | None, UNSET) for name in sorted(ignored)]
        self._message = msgspec.defstruct("Message", fields, rename=names, forbid_unknown_fields=True, gc=False)
        self._columns: list[str] = []
        self._learn(())

    @staticmethod
    def can_read(mapping: Mapping) -> bool:
        """Whether rows of this mapping are messages that can be read so."""
        return mapping.format in (Format.MESSAGES, Format.SHAREGPT)

    def _learn(self, columns: Iterable[str]) -> bool:
        """Let rows have these columns besides their messages: they are parsed, since they might be broken."""
        new = set(columns) - {self._messages, *self._columns}
        if not new.isdisjoint(self._others) or len(self._columns) + len(new) > _MOST_COLUMNS:
            return False
        self._columns += sorted(new)
        fields: list[Any] = [("messages", list[self._message])]  # type: ignore[name-defined]
        fields += [(f"column_{number}", Any, None) for number in range(len(self._columns))]
        names = {f"column_{number}": column for number, column in enumerate(self._columns)}
        row = msgspec.defstruct(
            "Row", fields, rename={"messages": self._messages, **names}, forbid_unknown_fields=True, gc=False
        )
        self._decode = msgspec.json.Decoder(row).decode
        return True

    def read(self, rows: Sequence[bytes], escaped: Container[int], others: Container[int], add: Add) -> None:
        """Add all rows that are plain and not among the others. `escaped` have escapes such as \\u0007.

        Adds a few rows at a time, while they are still in the processor's caches.
        """
        for start in range(0, len(rows), _AT_ONCE):
            numbers, lists = [], []
            for number, row in enumerate(rows[start : start + _AT_ONCE], start):
                if number in others:
                    continue
                try:
                    messages: Plain | None = self._decode(row).messages  # type: ignore[attr-defined]
                except _REFUSALS as error:
                    messages = self._read_again(row, error)
                if messages is None or self._answers.isdisjoint(map(_role_of, messages)):
                    continue
                if number in escaped and _is_doubtful(messages):
                    continue
                numbers.append(number)
                lists.append(messages)
            add(numbers, lists)

    def _read_again(self, row: bytes, error: Exception) -> Plain | None:
        """A row that was refused; with columns that were not known, and now are, it may be read."""
        try:
            return self._decode(row).messages if self._is_new(str(error), row) else None  # type: ignore[attr-defined]
        except _REFUSALS:
            return None

    def _is_new(self, error: str, row: bytes) -> bool:
        """Whether a row has columns that were not known, and now are."""
        if not error.startswith(_UNKNOWN) or " - at " in error:
            return False
        try:
            columns = msgspec.json.decode(row, type=dict[str, msgspec.Raw])
        except _REFUSALS:
            return False
        return not set(columns) <= {self._messages, *self._columns} and self._learn(columns)


def _is_doubtful(messages: Plain) -> bool:
    return any(message.tool_calls is not UNSET or _DOUBTFUL.search(message.content or "") for message in messages)
