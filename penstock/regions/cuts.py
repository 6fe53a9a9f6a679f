"""The texts of a batch cut into labelled runs, as arrays; the last step before `Segments`.

Runs are in order, end at absolute offsets and may be empty. In the resulting `Segments`, every byte of every text
belongs to exactly one run. The conversion takes a few numpy passes over the runs.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.arrays import Bool, Int32, Int64, UInt8
from penstock.chat.notes import NotedRows
from penstock.regions.segments import Segments
from penstock.template.rendered import Rendered


class Cuts(NamedTuple):
    """Runs of the concatenated texts: each starts where the previous one ends, and none crosses the end of a text."""

    ends: Int64
    roles: UInt8
    parts: UInt8
    messages: Int32
    inclusive: Bool


class Pieces(NamedTuple):
    """The pieces of rows with known regions, and the number and role of each piece's message."""

    rows: Int32
    messages: Int32
    numbers: Int64  # of the message in the batch
    roles: UInt8
    starts: Int64
    ends: Int64

    def take(self, which: Int64) -> Pieces:
        """Selects pieces by index."""
        return Pieces(
            self.rows[which],
            self.messages[which],
            self.numbers[which],
            self.roles[which],
            self.starts[which],
            self.ends[which],
        )


class PartCuts(NamedTuple):
    """The cuts of a batch. `lost` rows are uncertain, so they are cut as if they had no pieces."""

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
        inclusive=cuts.inclusive[filled],
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
