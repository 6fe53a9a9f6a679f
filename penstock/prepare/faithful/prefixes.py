"""Reads examples whose shared prefix is stored once.

The examples of a row are adjacent. The last one is the root, which is stored whole. Another example consists of its
prefix, which is the first tokens of the root, and its own tokens. A prefix ends where a segment of the root ends, so
whole segments are shared. Shared segments are context, whatever they are in the root.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.errors import CorruptError
from penstock.prepare.chat.conversation import Part, Role
from penstock.prepare.encode.columns import Columns


def roots(columns: Columns) -> Int64:
    """For each example, the root of its row."""
    rows = np.asarray(columns.rows)
    return np.searchsorted(rows, rows, side="right") - 1


def sizes(columns: Columns) -> Int64:
    """The number of tokens of each example, including its prefix."""
    stored = np.diff(columns.id_offsets).astype(np.int64)
    return stored if columns.prefixes is None else stored + columns.prefixes


def tokens(columns: Columns, number: int, start: int = 0, end: int | None = None) -> npt.NDArray[Any]:
    """The tokens start:end of an example."""
    first, last = columns.id_offsets.item(number), columns.id_offsets.item(number + 1)
    prefix = 0 if columns.prefixes is None else columns.prefixes.item(number)
    end = prefix + last - first if end is None else end
    own = columns.ids[first + max(start - prefix, 0) : first + max(end - prefix, 0)]
    if start >= prefix:
        return own
    root = columns.id_offsets.item(root_of(columns, number))
    return np.concatenate((columns.ids[root + start : root + min(end, prefix)], own))


def root_of(columns: Columns, number: int) -> int:
    """The root of the row that an example belongs to."""
    return int(np.searchsorted(columns.rows, columns.rows[number], side="right")) - 1


def row_of(columns: Columns, number: int) -> tuple[int, int]:
    """The first and the last example of the row that an example belongs to."""
    row = columns.rows[number]
    return int(np.searchsorted(columns.rows, row)), root_of(columns, number)


def shared_segments(columns: Columns, number: int) -> slice:
    """The segments of the root that an example begins with."""
    if columns.prefixes is None or not columns.prefixes[number]:
        return slice(0, 0)
    root = root_of(columns, number)
    first, last = columns.segment_offsets.item(root), columns.segment_offsets.item(root + 1)
    count = int(np.searchsorted(columns.segment_ends[first:last], columns.prefixes[number], side="right"))
    return slice(first, first + count)


def shared_counts(columns: Columns) -> Int64:
    """For each example, how many segments of its root it begins with."""
    assert columns.prefixes is not None
    counts = np.diff(columns.segment_offsets)
    owner = np.repeat(np.arange(columns.examples), counts)
    width = np.int64(1) << 32
    keys = owner * width + columns.segment_ends
    root = roots(columns)
    found = np.searchsorted(keys, root * width + columns.prefixes, side="right") - columns.segment_offsets[root]
    return np.where(columns.prefixes > 0, found, 0).astype(np.int64)


def segment_places(columns: Columns) -> tuple[Int64, Int64, Int64]:
    """The stored positions of the segments of all examples (shared ones repeat), the offsets of examples among them,
    and the number of shared segments of each."""
    shared, own = shared_counts(columns), np.diff(columns.segment_offsets).astype(np.int64)
    firsts = columns.segment_offsets.astype(np.int64)
    starts = np.stack((firsts[roots(columns)], firsts[:-1]), axis=1).ravel()
    lengths = np.stack((shared, own), axis=1).ravel()
    ends = np.cumsum(lengths)
    places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(starts - (ends - lengths), lengths)
    return places, np.concatenate(([0], np.cumsum(shared + own))), shared


def last_messages(columns: Columns, role: Role) -> npt.NDArray[np.int32]:
    """For each example, the number of its row's last message of a role, or -1."""
    numbers = np.where(columns.segment_roles == role, columns.segment_messages, np.int32(-1))
    highest = np.full(columns.examples, -1, np.int32)
    filled = np.diff(columns.segment_offsets) > 0
    if filled.any():
        highest[filled] = np.maximum.reduceat(numbers, columns.segment_offsets[:-1][filled])
    root = roots(columns)
    np.maximum.at(highest, root, highest.copy())
    return highest[root]


def context_parts(parts: npt.NDArray[np.uint8], shared: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """The parts of segments, where shared ones become context."""
    return np.where(shared, np.uint8(Part.CONTEXT), parts)


def check_prefixes(columns: Columns) -> None:
    """Raises a `CorruptError` if a prefix does not end where a segment of its root ends."""
    assert columns.prefixes is not None
    root = roots(columns)
    if columns.prefixes[root].any():
        raise CorruptError("the last example of a row has a prefix")
    some = np.flatnonzero(columns.prefixes)
    last = columns.segment_offsets[root] + shared_counts(columns) - 1
    short = last[some] < columns.segment_offsets[root[some]]
    if short.any() or not np.array_equal(columns.segment_ends[last[some]], columns.prefixes[some]):
        raise CorruptError("a prefix does not end where a segment of its root ends")
