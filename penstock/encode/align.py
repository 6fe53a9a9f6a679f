"""Segments in bytes become segments in tokens.

Token byte lengths from the vocabulary, summed up per row, say where every token ends; a binary search of the
segments' ends does the rest, for a whole batch at once. It holds only where a row's sum equals its length in bytes
(normalisers and tokens that swallow spaces break it): other rows take the reference encoder's offsets.
A token that crosses a boundary belongs to the segment in which it ends, unless the segment before it is `inclusive`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64
from penstock.regions.segments import Segments

_STEP: Final = 1 << 16


def segment_token_ends(
    ids: npt.NDArray[np.uint32],
    offsets: Int64,
    text_lengths: Int64,
    segments: Segments,
    byte_lengths: npt.NDArray[np.unsignedinteger],
    token_ends: Callable[[int], Int64],
) -> tuple[Int64, int]:
    """For each segment, the number of the row's tokens up to its end; and how many rows needed offsets."""
    ends = _token_ends(ids, byte_lengths, int(text_lengths.sum()))
    base = ends[offsets[:-1]]
    exact = ends[offsets[1:]] - base == text_lengths
    row_of = np.repeat(np.arange(len(text_lengths)), np.diff(segments.offsets))
    targets = (base[row_of] + segments.ends).astype(ends.dtype)  # of one type, or all of it would be converted
    counts = np.searchsorted(ends[1:], targets, side="right")
    crossing = np.flatnonzero(segments.inclusive)
    if len(crossing):
        counts[crossing] = np.searchsorted(ends[1:], targets[crossing], side="left") + 1
    result = np.minimum(counts, offsets[1:][row_of]) - offsets[:-1][row_of]
    inexact = np.flatnonzero(~exact & (np.diff(offsets) > 0))
    for row in inexact.tolist():
        own = slice(int(segments.offsets[row]), int(segments.offsets[row + 1]))
        result[own] = _by_offsets(token_ends(row), segments.ends[own], segments.inclusive[own])
    _close_rows(result, segments.offsets, np.diff(offsets))
    return result, len(inexact)


def _token_ends(
    ids: npt.NDArray[np.uint32], byte_lengths: npt.NDArray[np.unsignedinteger], size: int
) -> npt.NDArray[Any]:
    """Where tokens end in the joined texts, with a 0 in front. In steps, since large arrays cost more than they hold:
    each page of theirs is new memory."""
    lengths = np.empty(len(ids), byte_lengths.dtype)
    for start in range(0, len(ids), _STEP):
        np.take(byte_lengths, ids[start : start + _STEP], out=lengths[start : start + _STEP], mode="clip")
    ends = np.zeros(len(ids) + 1, np.int64 if size >> 30 else np.int32)
    np.cumsum(lengths, dtype=ends.dtype, out=ends[1:])
    return ends


def _by_offsets(token_ends: Int64, ends: Int64, inclusive: npt.NDArray[np.bool_]) -> Int64:
    counts = np.searchsorted(token_ends, ends, side="right")
    crossing = np.minimum(np.searchsorted(token_ends, ends, side="left") + 1, len(token_ends))
    return np.where(inclusive, crossing, counts)


def _close_rows(result: Int64, segment_offsets: Int64, lengths: Int64) -> None:
    """The last segment of a row ends where the row ends, and ends never go back."""
    owned = np.flatnonzero(np.diff(segment_offsets))
    result[segment_offsets[1:][owned] - 1] = lengths[owned]
    # An inclusive end may reach past the end of an empty or tiny segment that follows it.
    rows = np.repeat(np.arange(len(lengths)), np.diff(segment_offsets))
    span = int(lengths.max(initial=0)) + 1
    np.copyto(result, np.maximum.accumulate(result + rows * span) - rows * span)
