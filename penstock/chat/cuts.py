"""Cuts: one batch's texts cut into runs, as arrays; the last step before `Segments`.

Enters: for every run its absolute end and its labels, in order; runs may be empty. Leaves: `Segments`, in which every
byte of every text belongs to exactly one run. Costs a few numpy passes over the runs.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from penstock.chat.regions import Bool, Int32, Int64, Regions, Segments, UInt8


class Cuts(NamedTuple):
    """Runs of the joined texts: each starts where the one before ends, and none crosses a text's end."""

    ends: Int64
    roles: UInt8
    parts: UInt8
    messages: Int32
    inclusive: Bool


class Pieces(NamedTuple):
    """The pieces of the rows whose regions are known, with the conversation's facts beside them."""

    rows: Int32
    messages: Int32
    numbers: Int64  # of the message in the batch
    roles: UInt8
    starts: Int64
    ends: Int64

    def take(self, which: Int64) -> Pieces:
        """Only some of the pieces."""
        return Pieces(
            self.rows[which],
            self.messages[which],
            self.numbers[which],
            self.roles[which],
            self.starts[which],
            self.ends[which],
        )


class Outcome(NamedTuple):
    """The cuts of a batch; `lost` rows are cut as if they had no pieces, since they are not certain."""

    cuts: Cuts
    lost: set[int]
    silent: set[int]  # rows with an assistant message that no stop token ends


def to_segments(cuts: Cuts, regions: Regions, known: Bool, notes: Counter[str]) -> Segments:
    """Drop empty runs, and make ends relative to their texts."""
    filled = np.diff(cuts.ends, prepend=0) > 0
    ends = cuts.ends[filled]
    rows = np.searchsorted(regions.text_ends, ends, side="left")
    counts = np.bincount(rows, minlength=len(regions.text_ends))
    text_starts = np.concatenate(([0], regions.text_ends[:-1]))
    return Segments(
        offsets=np.concatenate(([0], np.cumsum(counts))),
        ends=ends - text_starts[rows],
        roles=cuts.roles[filled],
        parts=cuts.parts[filled],
        messages=cuts.messages[filled],
        inclusive=cuts.inclusive[filled],
        known=known,
        notes=notes,
    )


def run_lengths(segments: Segments) -> Int64:
    """The length of each segment in bytes."""
    lengths = np.diff(segments.ends, prepend=0)
    firsts = segments.offsets[:-1][np.diff(segments.offsets) > 0]
    lengths[firsts] = segments.ends[firsts]
    return lengths
