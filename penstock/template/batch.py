"""Collects the rendered rows of a batch into a `Rendered`, one row at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

import numpy as np

from penstock.chat.conversation import Conversation, Role, role_number
from penstock.chat.notes import Note
from penstock.errors import RowError
from penstock.template.flags import Shown, flags_of, shows_documents, shows_tools
from penstock.template.jinja.tracer import Trace
from penstock.template.ownership import Piece
from penstock.template.rendered import MessageFlag, Rendered


class BatchCollector:
    """The rows of a batch that have been rendered so far."""

    def __init__(self, conversations: Sequence[Conversation], used_keys: Mapping[str, str]) -> None:
        self.reference: Counter[str] = Counter()
        self._conversations, self._used_keys = conversations, used_keys
        self._texts: list[bytes] = []
        self._size = 0
        self._ends: list[int] = []
        self._known: list[bool] = []
        self._pieces: list[tuple[int, int, int, int]] = []
        self._spans: list[tuple[int, int, int]] = []
        self._offsets: list[int] = [0]
        self._roles: list[Role] = []
        self._flags: list[int] = []
        self._errors: dict[int, RowError] = {}
        self._notes: dict[Note, list[int]] = {}

    def add(self, conversation: Conversation, text: str, data: bytes, trace: Trace | None) -> None:
        """Add a row; `trace` is None if its regions are unknown."""
        pieces: list[Piece] = []
        spans: list[tuple[int, int]] = []
        if trace is not None:
            ends = chain(*(piece[1:] for piece in trace.pieces), *trace.generations)
            at = byte_offsets(text, data, ends)
            pieces = [(number, at[start], at[end]) for number, start, end in trace.pieces]
            spans = [(at[start], at[end]) for start, end in trace.generations]
        printed = [b""] * len(conversation.messages)
        for number, start, end in pieces:
            printed[number] += data[start:end]
        for message, own in zip(conversation.messages, printed, strict=True):
            role = role_number(message.get("role"))
            whole = trace is None or (role is not Role.ASSISTANT and not own)
            self._add_message(role, flags_of(message, Shown(data if whole else own, data), self._used_keys))
        if conversation.tools and not shows_tools(conversation.tools, conversation.messages, data):
            self._notes.setdefault(Note.TOOLS_DROPPED, []).append(len(self._ends))
        if conversation.variables and not shows_documents(conversation.variables, data):
            self._notes.setdefault(Note.DOCUMENTS_DROPPED, []).append(len(self._ends))
        self._add_row(data, trace is not None, pieces, spans)

    def add_pieces(self, pieces: Iterable[tuple[Role, str]]) -> None:
        """Add a row without a template: each piece counts as a message."""
        texts, places, size = [], [], 0
        for number, (role, text) in enumerate(pieces):
            texts.append(text.encode())
            if text:
                places.append((number, size, size + len(texts[-1])))
            size += len(texts[-1])
            self._add_message(role, MessageFlag.CONTENT_PRINTED)
        self._add_row(b"".join(texts), True, places, [])

    def add_error(self, conversation: Conversation, error: RowError) -> None:
        """Add a row that the template refused."""
        self._errors[len(self._ends)] = error
        for message in conversation.messages:
            self._add_message(role_number(message.get("role") if isinstance(message, dict) else None), MessageFlag(0))
        self._add_row(b"", True, [], [])

    def _add_message(self, role: Role, flags: MessageFlag) -> None:
        self._roles.append(role)
        self._flags.append(flags.value)

    def _add_row(self, data: bytes, known: bool, pieces: list[Piece], spans: list[tuple[int, int]]) -> None:
        row, base = len(self._ends), self._size
        self._pieces += [(row, message, base + start, base + end) for message, start, end in pieces]
        self._spans += [(row, base + start, base + end) for start, end in spans]
        self._texts.append(data)
        self._size += len(data)
        self._ends.append(self._size)
        self._known.append(known)
        self._offsets.append(len(self._roles))

    def rendered(self) -> Rendered:
        """The collected batch."""
        pieces = np.array(self._pieces, np.int64).reshape(-1, 4)
        spans = np.array(self._spans, np.int64).reshape(-1, 3)
        return Rendered(
            data=b"".join(self._texts),
            text_ends=np.array(self._ends, np.int64),
            known=np.array(self._known, np.bool_),
            piece_rows=pieces[:, 0].astype(np.int32),
            piece_messages=pieces[:, 1].astype(np.int32),
            piece_starts=pieces[:, 2].copy(),
            piece_ends=pieces[:, 3].copy(),
            span_rows=spans[:, 0].astype(np.int32),
            span_starts=spans[:, 1].copy(),
            span_ends=spans[:, 2].copy(),
            message_offsets=np.array(self._offsets, np.int64),
            message_roles=np.array(self._roles, np.uint8),
            message_flags=np.array(self._flags, np.uint8),
            conversation=self._conversations.__getitem__,
            notes={note: np.array(rows, np.int64) for note, rows in self._notes.items()},
            errors=self._errors,
            reference=self.reference,
        )


def byte_offsets(text: str, data: bytes, places: Iterable[int]) -> dict[int, int]:
    """Maps character positions in a text to offsets in its UTF-8 bytes."""
    if len(text) == len(data):
        return {place: place for place in places}
    offsets: dict[int, int] = {}
    last = size = 0
    for place in sorted(set(places)):
        size += len(text[last:place].encode())
        offsets[place], last = size, place
    return offsets
