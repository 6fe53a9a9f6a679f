"""The rows of a batch, however they were rendered, become one `Regions` record.

Most rows arrive as marked texts in the first alphabet and are split together; the others arrive split already.
Costs one pass of numpy over the texts, plus a little Python per row only where a template nests its regions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from penstock.chat.conversation import Conversation
from penstock.chat.regions import Bool, Int64, Regions
from penstock.chat.sentinels import CONTROL, Mark
from penstock.chat.split import Marks, Split, find_marks, split_marks
from penstock.errors import RowError

ROW = CONTROL.mark(Mark.ROW)


@dataclass(slots=True)
class Rendered:
    """The rows of a batch on their way to `Regions`."""

    marked: list[str]  # one per row; '' where `apart` or `errors` has it
    apart: dict[int, tuple[bytes, Split]] = field(default_factory=dict)
    errors: dict[int, RowError] = field(default_factory=dict)
    reference: Counter[str] = field(default_factory=Counter)


class Pieces(NamedTuple):
    """Columns of pieces (or spans, without messages); offsets are absolute in the buffer."""

    rows: Int64
    messages: Int64
    starts: Int64
    ends: Int64


def assistants(conversation: Conversation) -> list[bool]:
    return [message.get("role") == "assistant" for message in conversation.messages]


def assemble(rendered: Rendered, conversations: Sequence[Conversation], nested: bool) -> Regions:
    """One record from all rows; `nested`: the template prints marks beyond those of an ordered loop."""
    data = ROW.join([*rendered.marked, ""]).encode()
    marks = find_marks(data)
    is_row = marks.codes == Mark.ROW
    ends = marks.positions[is_row]
    offsets = np.concatenate(([0], np.flatnonzero(is_row) + 1))
    known = np.ones(len(conversations), np.bool_)
    if nested or not _alternates(marks):
        pieces, spans = _split_each(marks, offsets, ends, conversations, known)
    else:
        counts = np.fromiter((len(c.messages) for c in conversations), np.int64, len(conversations))
        pieces, spans = _split_ordered(marks, counts, known)
    clean = marks.clean
    if rendered.apart:
        clean, ends, pieces, spans = _insert(rendered.apart, clean, ends, pieces, spans, known)
    return Regions(
        clean,
        ends,
        known,
        pieces.rows.astype(np.int32),
        pieces.messages.astype(np.int32),
        pieces.starts,
        pieces.ends,
        spans.rows.astype(np.int32),
        spans.starts,
        spans.ends,
        rendered.errors,
        rendered.reference,
    )


def _alternates(marks: Marks) -> bool:
    """Whether generation marks come strictly as begin, end, begin, end within each row."""
    codes = marks.codes
    kinds = codes[(codes == Mark.GENERATION) | (codes == Mark.END_GENERATION) | (codes == Mark.ROW)]
    begins = kinds == Mark.GENERATION
    closed = kinds == Mark.END_GENERATION
    return bool(np.array_equal(np.flatnonzero(begins) + 1, np.flatnonzero(closed)))


def _split_ordered(marks: Marks, counts: Int64, known: Bool) -> tuple[Pieces, Pieces]:
    """Pieces of an ordered loop: each NEXT begins a message and ends the one before it; vectorised."""
    codes, positions = marks.codes, marks.positions
    rows = np.cumsum(codes == Mark.ROW)
    spans = Pieces(
        rows[codes == Mark.GENERATION],
        np.empty(0, np.int64),
        positions[codes == Mark.GENERATION],
        positions[codes == Mark.END_GENERATION],
    )
    loop = np.flatnonzero((codes == Mark.NEXT) | (codes == Mark.END))
    begins = np.flatnonzero(codes[loop] == Mark.NEXT)
    piece_rows = rows[loop[begins]]
    starts, ends = positions[loop[begins]], positions[loop[begins + 1]]
    per_row = np.bincount(piece_rows, minlength=len(counts))
    first = np.concatenate(([0], np.cumsum(per_row)[:-1]))
    messages = np.arange(len(begins)) - first[piece_rows] + (counts - per_row)[piece_rows]
    known &= per_row <= counts
    keep = (ends > starts) & known[piece_rows]
    return Pieces(piece_rows[keep], messages[keep], starts[keep], ends[keep]), spans


def _split_each(
    marks: Marks, offsets: Int64, ends: Int64, conversations: Sequence[Conversation], known: Bool
) -> tuple[Pieces, Pieces]:
    """Pieces of any template: the marks of each row are followed one by one."""
    codes, positions = marks.codes.tolist(), marks.positions.tolist()
    bounds, starts = offsets.tolist(), [0, *ends.tolist()]
    pieces: list[tuple[int, int, int, int]] = []
    spans: list[tuple[int, int, int, int]] = []
    for row, conversation in enumerate(conversations):
        begin, end = bounds[row], bounds[row + 1] - 1
        if begin == end:
            continue
        split = split_marks(codes[begin:end], positions[begin:end], assistants(conversation), starts[row])
        known[row] = split.sound
        pieces += [(row, *piece) for piece in split.pieces]
        spans += [(row, -1, *span) for span in split.spans]
    return _columns(pieces), _columns(spans)


def _columns(entries: list[tuple[int, int, int, int]]) -> Pieces:
    table = np.array(entries, np.int64).reshape(-1, 4)
    return Pieces(*(np.ascontiguousarray(table[:, column]) for column in range(4)))


def _insert(
    apart: dict[int, tuple[bytes, Split]], clean: bytes, ends: Int64, pieces: Pieces, spans: Pieces, known: Bool
) -> tuple[bytes, Int64, Pieces, Pieces]:
    """Put the rows that were split apart into their places."""
    bounds = [0, *ends.tolist()]
    texts = [apart[row][0] if row in apart else clean[bounds[row] : bounds[row + 1]] for row in range(len(ends))]
    new_ends = np.cumsum(np.fromiter(map(len, texts), np.int64, len(texts)))
    starts = np.concatenate(([0], new_ends[:-1]))
    shift = starts - np.array(bounds[:-1], np.int64)
    more_pieces: list[tuple[int, int, int, int]] = []
    more_spans: list[tuple[int, int, int, int]] = []
    for row, (_, split) in apart.items():
        base = int(starts[row])
        known[row] = split.sound
        more_pieces += [(row, message, base + start, base + end) for message, start, end in split.pieces]
        more_spans += [(row, -1, base + start, base + end) for start, end in split.spans]
    return b"".join(texts), new_ends, _merge(pieces, shift, more_pieces), _merge(spans, shift, more_spans)


def _merge(entries: Pieces, shift: Int64, more: list[tuple[int, int, int, int]]) -> Pieces:
    moved = shift[entries.rows]
    messages = entries.messages if len(entries.messages) else np.full(len(entries.rows), -1, np.int64)
    old = Pieces(entries.rows, messages, entries.starts + moved, entries.ends + moved)
    joined = [np.concatenate(pair) for pair in zip(old, _columns(more), strict=True)]
    order = np.lexsort((joined[3], joined[2], joined[0]))
    return Pieces(*(column[order] for column in joined))
