"""The rows of a batch, however they were rendered, become one `Regions` record.

Most rows arrive as marked texts in the first alphabet and are split together; the others arrive split already.
Costs one pass of numpy over the texts, plus a little Python for rows with nested regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from penstock.chat.conversation import Conversation
from penstock.chat.flat import Flat, Pieces, split_flat
from penstock.chat.regions import Bool, Int64, Regions
from penstock.chat.sentinels import CONTROL, Mark
from penstock.chat.split import Marks, Split, find_marks, split_marks
from penstock.errors import RowError

ROW = CONTROL.mark(Mark.ROW)
Entry = tuple[int, int, int, int]  # row, message, start, end


@dataclass(slots=True)
class Rendered:
    """The rows of a batch on their way to `Regions`."""

    marked: list[str]  # one per row; '' where `apart` or `errors` has it
    apart: dict[int, tuple[bytes, Split]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
    reference: Counter[str] = field(default_factory=Counter)


def assistants(conversation: Conversation) -> list[bool]:
    return [message.get("role") == "assistant" for message in conversation.messages]


def assemble(rendered: Rendered, conversations: Sequence[Conversation]) -> Regions:
    """One record from all rows."""
    marks = find_marks(ROW.join([*rendered.marked, ""]).encode())
    is_row = marks.codes == Mark.ROW
    ends = marks.positions[is_row]
    counts = np.fromiter((len(c.messages) for c in conversations), np.int64, len(conversations))
    flat = split_flat(marks, counts)
    known = np.ones(len(conversations), np.bool_)
    pieces, spans = _tidy(flat, conversations), flat.spans
    if flat.nested.any():
        bounds = np.concatenate(([0], np.flatnonzero(is_row) + 1))
        more_pieces, more_spans = _split_nested(marks, bounds, ends, np.flatnonzero(flat.nested), conversations, known)
        pieces, spans = _merge(pieces, more_pieces), _merge(spans, more_spans)
    clean = marks.clean
    if rendered.apart:
        clean, ends, pieces, spans = _insert(rendered.apart, clean, ends, pieces, spans, known)
    return Regions(
        data=clean,
        text_ends=ends,
        known=known,
        piece_rows=pieces.rows.astype(np.int32),
        piece_messages=pieces.messages.astype(np.int32),
        piece_starts=pieces.starts,
        piece_ends=pieces.ends,
        span_rows=spans.rows.astype(np.int32),
        span_starts=spans.starts,
        span_ends=spans.ends,
        errors=rendered.errors,
        reference=rendered.reference,
    )


def _tidy(flat: Flat, conversations: Sequence[Conversation]) -> Pieces:
    """Drop what repeats an assistant's text outside of its turn, and join adjacent pieces of one message."""
    pieces = flat.pieces
    outside = np.flatnonzero(flat.outside)
    if len(outside):
        rows, messages = pieces.rows[outside].tolist(), pieces.messages[outside].tolist()
        spoken = [
            conversations[row].messages[n].get("role") == "assistant" for row, n in zip(rows, messages, strict=True)
        ]
        if any(spoken):
            suspects = outside[np.array(spoken)]
            width = int(pieces.messages.max()) + 1
            keys = pieces.rows * width + pieces.messages
            repeated = suspects[np.isin(keys[suspects], keys[~flat.outside])]
            keep = np.ones(len(keys), np.bool_)
            keep[repeated] = False
            pieces = pieces.select(keep)
    joins = (
        (pieces.starts[1:] == pieces.ends[:-1])
        & (pieces.messages[1:] == pieces.messages[:-1])
        & (pieces.rows[1:] == pieces.rows[:-1])
    )
    if not joins.any():
        return pieces
    first, last = np.append(True, ~joins), np.append(~joins, True)
    return Pieces(pieces.rows[first], pieces.messages[first], pieces.starts[first], pieces.ends[last])


def _split_nested(
    marks: Marks, bounds: Int64, ends: Int64, rows: Int64, conversations: Sequence[Conversation], known: Bool
) -> tuple[list[Entry], list[Entry]]:
    """The marks of these rows are followed one by one."""
    pieces: list[Entry] = []
    spans: list[Entry] = []
    for row in rows.tolist():
        mine = slice(int(bounds[row]), int(bounds[row + 1]) - 1)
        start = int(ends[row - 1]) if row else 0
        codes, positions = marks.codes[mine].tolist(), marks.positions[mine].tolist()
        split = split_marks(codes, positions, assistants(conversations[row]), start)
        known[row] = split.sound
        pieces += [(row, *piece) for piece in split.pieces]
        spans += [(row, -1, *span) for span in split.spans]
    return pieces, spans


def _insert(
    apart: dict[int, tuple[bytes, Split]], clean: bytes, ends: Int64, pieces: Pieces, spans: Pieces, known: Bool
) -> tuple[bytes, Int64, Pieces, Pieces]:
    """Put the rows that were split apart into their places."""
    bounds = [0, *ends.tolist()]
    texts = [apart[row][0] if row in apart else clean[bounds[row] : bounds[row + 1]] for row in range(len(ends))]
    new_ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    starts = np.concatenate(([0], new_ends[:-1]))
    shift = starts - np.array(bounds[:-1], np.int64)
    more_pieces: list[Entry] = []
    more_spans: list[Entry] = []
    for row, (_, split) in apart.items():
        base = int(starts[row])
        known[row] = split.sound
        more_pieces += [(row, message, base + start, base + end) for message, start, end in split.pieces]
        more_spans += [(row, -1, base + start, base + end) for start, end in split.spans]
    return (
        b"".join(texts),
        new_ends,
        _merge(_moved(pieces, shift), more_pieces),
        _merge(_moved(spans, shift), more_spans),
    )


def _moved(entries: Pieces, shift: Int64) -> Pieces:
    by = shift[entries.rows]
    return Pieces(entries.rows, entries.messages, entries.starts + by, entries.ends + by)


def _merge(entries: Pieces, more: list[Entry]) -> Pieces:
    if not more:
        return entries
    table = np.array(more, np.int64).reshape(-1, 4)
    joined = Pieces(*(np.concatenate((column, table[:, number])) for number, column in enumerate(entries)))
    return joined.select(np.lexsort((joined.ends, joined.starts, joined.rows)))
