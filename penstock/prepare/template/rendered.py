"""The result of rendering a batch of conversations, with either engine. Positions are UTF-8 byte offsets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from penstock.arrays import Bool, Float32, Int32, Int64, UInt8
from penstock.errors import RowError
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.notes import NotedRows, joined_notes
from penstock.prepare.template.turns import FieldColumn, Table, Turns, joined_turns


class FieldRuns(NamedTuple):
    """Runs of a batch: sorted, disjoint, never empty, never across texts. Offsets are absolute in its data."""

    rows: Int32
    labels: Int32
    starts: Int64
    ends: Int64

    @classmethod
    def of(cls, table: Table, text_starts: Int64) -> FieldRuns:
        """The runs of a table, whose places count from the start of each text."""
        rows = table[:, FieldColumn.ROW]
        base = text_starts[rows].astype(np.int64)
        starts, ends = base + table[:, FieldColumn.START], base + table[:, FieldColumn.END]
        return cls(rows, table[:, FieldColumn.LABEL], starts, ends)

    def moved(self, places: Int64, shifts: Int64) -> FieldRuns:
        """The runs of texts that moved: each text has a new number (-1: it is left out) and a shift in bytes."""
        kept = places[self.rows] >= 0
        rows = self.rows[kept]
        shift = shifts[rows]
        return FieldRuns(
            places[rows].astype(np.int32), self.labels[kept], self.starts[kept] + shift, self.ends[kept] + shift
        )

    def taken(self, order: Int64) -> FieldRuns:
        """Selects runs by index."""
        return FieldRuns(self.rows[order], self.labels[order], self.starts[order], self.ends[order])


NO_FIELDS = FieldRuns(np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.int64), np.zeros(0, np.int64))


def joined_fields(parts: Sequence[FieldRuns]) -> FieldRuns:
    """The runs of several groups of texts, in order."""
    if not parts:
        return NO_FIELDS
    rows, labels = np.concatenate([p.rows for p in parts]), np.concatenate([p.labels for p in parts])
    starts, ends = np.concatenate([p.starts for p in parts]), np.concatenate([p.ends for p in parts])
    return FieldRuns(rows, labels, starts, ends).taken(np.argsort(starts, kind="stable"))


@dataclass(frozen=True, slots=True)
class Rendered:
    """The texts of a batch, joined without separators, and which message printed which bytes.

    A span is a run of bytes printed by one message. Spans are sorted, never overlap and never cross texts; a message
    may have several. Tags are `{% generation %}` blocks. All offsets are absolute in `data`. A conversation in
    `errors` has an empty text; one whose regions are uncertain has `known` False and no spans or tags.
    """

    data: bytes
    text_ends: Int64  # one per conversation
    known: Bool  # one per conversation
    span_rows: Int32  # number of the conversation in the batch
    span_messages: Int32  # number of the message in its conversation
    span_starts: Int64
    span_ends: Int64
    tag_rows: Int32
    tag_starts: Int64
    tag_ends: Int64
    message_offsets: Int64  # conversation r owns messages message_offsets[r]:message_offsets[r+1]
    message_roles: UInt8
    message_flags: UInt8
    conversation: Callable[[int], Conversation]  # the conversation with this number, as given to the template
    own_variables: Bool | None = None  # which conversations have their own template variables; None if none do
    message_weights: Float32 | None = None  # NaN where the row gives no weight
    special: dict[int, str] = field(default_factory=dict)  # conversation -> the first special token in its text
    notes: NotedRows = field(default_factory=dict)  # note -> conversations
    errors: dict[int, RowError] = field(default_factory=dict)
    reference: Counter[str] = field(default_factory=Counter)  # reason for using the reference -> count
    turns: Turns | None = None  # each assistant turn as inference sees it, if requested
    fields: FieldRuns = NO_FIELDS  # which field of an assistant message printed which bytes

    @property
    def texts(self) -> list[bytes]:
        """The text of each conversation."""
        return [self.data[start:end] for start, end in pairwise([0, *self.text_ends.tolist()])]

    def without_regions(self) -> Rendered:
        """The same texts with all regions unknown."""
        rows, places = np.zeros(0, np.int32), np.zeros(0, np.int64)
        return replace(
            self,
            known=np.zeros_like(self.known),
            span_rows=rows,
            span_messages=rows,
            span_starts=places,
            span_ends=places,
            tag_rows=rows,
            tag_starts=places,
            tag_ends=places,
            fields=NO_FIELDS,
        )


def merge(parts: Sequence[tuple[Rendered, Sequence[int]]], conversation: Callable[[int], Conversation]) -> Rendered:
    """Merges batches into one; conversation k of a part moves to the k-th of the part's positions."""
    places = np.concatenate([np.asarray(own, np.int64) for _, own in parts])
    order = np.argsort(places, kind="stable")  # of all conversations, part after part
    texts = [text for part, _ in parts for text in part.texts]
    sizes = np.array([len(text) for text in texts], np.int64)
    old_starts = np.concatenate([np.concatenate(([0], part.text_ends))[:-1] for part, _ in parts])
    new_ends = np.cumsum(sizes[order])
    new_starts = np.empty(len(places), np.int64)
    new_starts[order] = new_ends - sizes[order]
    firsts = np.cumsum([0, *(len(own) for _, own in parts)]).tolist()

    def moved(name: str, starts: str, ends: str) -> tuple[Int32, Int64, Int64, Int64]:
        rows = np.concatenate([getattr(p, name) + first for (p, _), first in zip(parts, firsts, strict=False)])
        shift = (new_starts - old_starts)[rows]
        begin = np.concatenate([getattr(p, starts) for p, _ in parts]) + shift
        end = np.concatenate([getattr(p, ends) for p, _ in parts]) + shift
        sort = np.lexsort((end, begin, places[rows]))
        return places[rows][sort].astype(np.int32), begin[sort], end[sort], sort

    span_rows, span_starts, span_ends, sort = moved("span_rows", "span_starts", "span_ends")
    tag_rows, tag_starts, tag_ends, _ = moved("tag_rows", "tag_starts", "tag_ends")
    firsts_of = zip(parts, firsts, strict=False)
    shifts = new_starts - old_starts
    fields = [part.fields.moved(places[first : first + len(own)], shifts[first:]) for (part, own), first in firsts_of]
    counts = np.concatenate([np.diff(part.message_offsets) for part, _ in parts])
    offsets = np.concatenate(([0], np.cumsum(counts)))[:-1]
    messages = np.concatenate([np.arange(offsets[k], offsets[k] + counts[k]) for k in order] or [offsets])
    weights = None
    if any(part.message_weights is not None for part, _ in parts):
        weights = np.concatenate([_weights(part) for part, _ in parts])[messages]
    variables = None
    if any(part.own_variables is not None for part, _ in parts):
        variables = np.concatenate([_variables(part) for part, _ in parts])[order]
    return Rendered(
        data=b"".join(texts[k] for k in order.tolist()),
        text_ends=new_ends,
        known=np.concatenate([part.known for part, _ in parts])[order],
        span_rows=span_rows,
        span_messages=np.concatenate([part.span_messages for part, _ in parts])[sort],
        span_starts=span_starts,
        span_ends=span_ends,
        tag_rows=tag_rows,
        tag_starts=tag_starts,
        tag_ends=tag_ends,
        message_offsets=np.concatenate(([0], np.cumsum(counts[order]))),
        message_roles=np.concatenate([part.message_roles for part, _ in parts])[messages],
        message_flags=np.concatenate([part.message_flags for part, _ in parts])[messages],
        conversation=conversation,
        own_variables=variables,
        message_weights=weights,
        special={own[k]: token for part, own in parts for k, token in part.special.items()},
        notes=joined_notes(
            *({note: np.asarray(own, np.int64)[rows] for note, rows in part.notes.items()} for part, own in parts)
        ),
        errors={own[k]: error for part, own in parts for k, error in part.errors.items()},
        reference=sum((part.reference for part, _ in parts), Counter()),
        turns=_turns(parts),
        fields=joined_fields(fields),
    )


def _turns(parts: Sequence[tuple[Rendered, Sequence[int]]]) -> Turns | None:
    found = [(part.turns, np.asarray(own, np.int64)) for part, own in parts if part.turns is not None]
    return joined_turns([turns.moved(places) for turns, places in found]) if found else None


def _weights(part: Rendered) -> Float32:
    if part.message_weights is not None:
        return part.message_weights
    return np.full(len(part.message_roles), np.nan, np.float32)


def _variables(part: Rendered) -> Bool:
    return np.zeros(len(part.text_ends), np.bool_) if part.own_variables is None else part.own_variables
