"""Rendered texts cut into segments: runs of one message, role and part. Positions are UTF-8 byte offsets."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple

import numpy as np

from penstock.arrays import Bool, Float32, Int32, Int64, UInt8
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.chat.notes import NotedRows
from penstock.prepare.template.rendered import Rendered
from penstock.prepare.template.turns import Field


class Crossing(IntEnum):
    """Which segment owns a token that crosses a segment's end."""

    LATER = 0  # the one in which it ends
    OWN = 1  # this one
    NEXT = 2  # this one, if the token ends in the next one
    ON_SPAN = 4  # added to one of these: the end is the border of a marked span


@dataclass(frozen=True, slots=True)
class Segments:
    """Every text cut into consecutive runs; row r owns entries offsets[r]:offsets[r+1].

    `ends` are relative to the row's text; the last one of a row is the text's length (a row with an empty
    text has no entries). A row with unknown regions has one entry (glue).
    """

    offsets: Int64
    ends: Int64
    roles: UInt8
    parts: UInt8
    messages: Int32  # -1 for glue
    crossing: UInt8  # `Crossing`, at the end of each
    known: Bool  # one per row
    weights: Float32 | None = None  # the weight of the segment's message; NaN if none is given
    notes: NotedRows = field(default_factory=dict)  # notes made while splitting, for the ledger

    def followed_by(self, more: Segments) -> Segments:
        """Appends the rows of `more`."""
        weights = None
        if self.weights is not None or more.weights is not None:
            weights = np.concatenate((self.some_weights(), more.some_weights()))
        return Segments(
            offsets=np.concatenate((self.offsets, more.offsets[1:] + self.offsets[-1])),
            ends=np.concatenate((self.ends, more.ends)),
            roles=np.concatenate((self.roles, more.roles)),
            parts=np.concatenate((self.parts, more.parts)),
            messages=np.concatenate((self.messages, more.messages)),
            crossing=np.concatenate((self.crossing, more.crossing)),
            known=np.concatenate((self.known, more.known)),
            weights=weights,
        )

    def some_weights(self) -> Float32:
        """The weights, with NaN where none are given."""
        return np.full(len(self.ends), np.nan, np.float32) if self.weights is None else self.weights

    def taken(self, order: Int64) -> Segments:
        """Selects rows, in the given order."""
        places, offsets = gathered(self.offsets, order)
        return replace(self.picked(places, offsets), known=self.known[order])

    def picked(self, places: Int64, offsets: Int64) -> Segments:
        """Selects segments; `offsets` assigns them to rows."""
        return replace(
            self,
            offsets=offsets,
            ends=self.ends[places],
            roles=self.roles[places],
            parts=self.parts[places],
            messages=self.messages[places],
            crossing=self.crossing[places],
            weights=None if self.weights is None else self.weights[places],
        )


def gathered(offsets: Int64, order: Int64) -> tuple[Int64, Int64]:
    """Flat positions of the elements of the selected lists, and the offsets of the gathered lists."""
    lengths = np.diff(offsets)[order]
    out = np.concatenate(([0], np.cumsum(lengths)))
    return np.arange(out[-1]) + np.repeat(offsets[:-1][order] - out[:-1], lengths), out


# ---- cuts: the step before segments


class Cuts(NamedTuple):
    """Runs of the concatenated texts, with absolute ends. Each starts where the previous one ends, none crosses the end
    of a text, and they may be empty."""

    ends: Int64
    roles: UInt8
    parts: UInt8
    messages: Int32
    crossing: UInt8


class Spans(NamedTuple):
    """The spans of rows with known regions, and the number and role of each span's message."""

    rows: Int32
    messages: Int32
    numbers: Int64  # of the message in the batch
    roles: UInt8
    starts: Int64
    ends: Int64

    def take(self, which: Int64) -> Spans:
        """Selects spans by index."""
        return Spans(
            self.rows[which],
            self.messages[which],
            self.numbers[which],
            self.roles[which],
            self.starts[which],
            self.ends[which],
        )


class PartCuts(NamedTuple):
    """The cuts of a batch. `lost` rows are uncertain, so they are cut as if they had no spans."""

    cuts: Cuts
    lost: set[int]
    unstopped: set[int]  # rows with an assistant message that no stop token ends


def to_segments(cuts: Cuts, rendered: Rendered, known: Bool, notes: NotedRows) -> Segments:
    """Drops empty runs, makes ends relative to their texts, and looks up the weights of messages."""
    filled = np.diff(cuts.ends, prepend=0) > 0
    ends, messages = cuts.ends[filled], cuts.messages[filled]
    rows = np.searchsorted(rendered.text_ends, ends, side="left")
    counts = np.bincount(rows, minlength=len(rendered.text_ends))
    text_starts = np.concatenate(([0], rendered.text_ends[:-1]))
    weights = None
    if rendered.message_weights is not None:
        weights = np.full(len(messages), np.nan, np.float32)
        own = messages >= 0
        weights[own] = rendered.message_weights[rendered.message_offsets[rows[own]] + messages[own]]
    return Segments(
        offsets=np.concatenate(([0], np.cumsum(counts))),
        ends=ends - text_starts[rows],
        roles=cuts.roles[filled],
        parts=cuts.parts[filled],
        messages=messages,
        crossing=cuts.crossing[filled],
        known=known,
        weights=weights,
        notes=notes,
    )


def run_lengths(segments: Segments) -> Int64:
    """The length of each segment in bytes."""
    lengths = np.diff(segments.ends, prepend=0)
    firsts = segments.offsets[:-1][np.diff(segments.offsets) > 0]
    lengths[firsts] = segments.ends[firsts]
    return lengths


# ---- bodies: the step after segments

TOOL: Final = 255  # in place of a part: text of a tool
_PARTS = {
    Field.REASONING: Part.REASONING,
    Field.CONTENT: Part.CONTENT,
    Field.CALL_NAME: Part.CALL_NAME,
    Field.CALL_ARGUMENTS: Part.CALL_ARGUMENTS,
    Field.THOUGHT: Part.REASONING,
    Field.THINK_TAG: Part.REASONING_MARKUP,
    Field.TOOL_RESPONSE: TOOL,
}
PART_OF_FIELD = np.zeros(len(Field), np.uint8)
PART_OF_FIELD[[*_PARTS]] = [*_PARTS.values()]


class Bodies(NamedTuple):
    """The bodies of a batch; places are absolute."""

    numbers: Int64  # among the segments
    rows: Int64
    places: Int64  # of the message in its row
    messages: Int64  # in the batch
    starts: Int64
    ends: Int64
    text_starts: Int64
    is_first: Bool  # of its message
    first_fields: Int64
    field_counts: Int64
    parts: UInt8  # of bodies that a single field printed, as it does most answers; GLUE for others

    @classmethod
    def of(cls, segments: Segments, rendered: Rendered) -> Bodies:
        """The bodies of assistants' messages, before they are divided."""
        numbers = np.flatnonzero((segments.roles == Role.ASSISTANT) & (segments.parts == Part.BODY))
        rows = np.searchsorted(segments.offsets, numbers, side="right") - 1
        places = segments.messages[numbers].astype(np.int64)
        messages = rendered.message_offsets[rows] + places
        text_starts = np.concatenate(([0], rendered.text_ends))[rows]
        opens = numbers == segments.offsets[rows]
        starts = text_starts + np.where(opens, 0, segments.ends[np.maximum(numbers - 1, 0)])
        is_first = np.diff(messages, prepend=-1) != 0
        ends = text_starts + segments.ends[numbers]
        fields = rendered.fields
        firsts = np.searchsorted(fields.ends, starts, side="right")
        counts = np.maximum(np.searchsorted(fields.starts, ends, side="left") - firsts, 0)
        parts = np.zeros(len(numbers), np.uint8)
        alone = np.flatnonzero(counts == 1)
        at = firsts[alone]
        covered = (fields.starts[at] <= starts[alone]) & (fields.ends[at] >= ends[alone])
        plain = covered & (fields.labels[at] <= Field.CALL_ARGUMENTS)
        parts[alone[plain]] = PART_OF_FIELD[fields.labels[at[plain]]]
        return cls(numbers, rows, places, messages, starts, ends, text_starts, is_first, firsts, counts, parts)

    def taken(self, which: Bool) -> Bodies:
        """Selects bodies."""
        columns: list[Any] = [column[which] for column in self]
        return Bodies(*columns)
