"""Pieces of all rows whose regions are not nested, in one pass of numpy over the marks of a batch.

Rows with regions inside regions (and rows whose marks don't match up) are named, for split.py to follow one by one.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.chat.regions import Bool, Int64
from penstock.chat.sentinels import Mark
from penstock.chat.split import DIGIT_ZERO, Marks


class Pieces(NamedTuple):
    """Columns of pieces, in order; of spans `messages` is -1. Offsets are absolute in the buffer."""

    rows: Int64
    messages: Int64
    starts: Int64
    ends: Int64

    def select(self, keep: Bool | Int64) -> Pieces:
        return Pieces(*(column[keep] for column in self))


class Flat(NamedTuple):
    pieces: Pieces
    outside: Bool  # one per piece: printed outside of the loop
    spans: Pieces
    nested: Bool  # one per row: not split here


def split_flat(marks: Marks, counts: Int64) -> Flat:
    """Split all rows that allow it; `counts` is the number of messages of each row."""
    rows = np.cumsum(marks.codes == Mark.ROW)
    nested = np.zeros(len(counts), np.bool_)
    spans = _spans(marks, rows, nested)
    structural = np.flatnonzero(_is_structural(marks.codes))
    codes, rows = marks.codes[structural], rows[structural]
    begins = codes <= Mark.OUTSIDE
    steps = codes == Mark.NEXT
    following = np.append(codes[1:], np.uint8(Mark.ROW))
    closes_next = following == Mark.CLOSE
    lonely = begins != closes_next  # a region that is not closed at once, or a close without its region
    lonely |= steps & (following != Mark.NEXT) & (following != Mark.END)
    nested[rows[lonely & (codes != Mark.ROW)]] = True
    # a stray close right after a row's end shows up at the ROW mark before it
    nested[np.minimum(rows[lonely & (codes == Mark.ROW)], len(counts) - 1)] = True
    if len(codes) and codes[0] == Mark.CLOSE:
        nested[0] = True

    where = np.flatnonzero(begins | steps)
    piece_rows = rows[where]
    starts = marks.positions[structural[where]]
    ends = marks.positions[structural[np.minimum(where + 1, len(structural) - 1)]]
    messages = _numbers(marks.codes, structural[where])
    in_order = steps[where]
    per_row = np.bincount(piece_rows[in_order], minlength=len(counts))
    before = np.concatenate(([0], np.cumsum(per_row)[:-1]))
    step_rows = piece_rows[in_order]
    messages[in_order] = np.arange(len(step_rows)) - before[step_rows] + (counts - per_row)[step_rows]
    nested |= per_row > counts
    nested[piece_rows[messages >= counts[piece_rows]]] = True
    keep = (ends > starts) & (messages >= 0) & ~nested[piece_rows]
    pieces = Pieces(piece_rows, messages, starts, ends).select(keep)
    return Flat(pieces, (codes[where] == Mark.OUTSIDE)[keep], spans.select(~nested[spans.rows]), nested)


def _is_structural(codes: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> Bool:
    kept: Bool = (codes < DIGIT_ZERO) & (codes != Mark.GENERATION) & (codes != Mark.END_GENERATION)
    return kept


def _spans(marks: Marks, rows: Int64, nested: Bool) -> Pieces:
    """Generation spans; rows in which they don't come as begin, end, begin, end are nested."""
    chosen = np.flatnonzero(
        (marks.codes == Mark.GENERATION) | (marks.codes == Mark.END_GENERATION) | (marks.codes == Mark.ROW)
    )
    codes = marks.codes[chosen]
    begins = codes == Mark.GENERATION
    ended = np.append(codes[1:], np.uint8(Mark.ROW)) == Mark.END_GENERATION
    wrong = begins != ended
    if len(codes) and codes[0] == Mark.END_GENERATION:
        nested[0] = True
    nested[np.minimum(rows[chosen[wrong]], len(nested) - 1)] = True
    where = np.flatnonzero(begins & ended)
    starts, ends = marks.positions[chosen[where]], marks.positions[chosen[where + 1]]
    return Pieces(rows[chosen[where]], np.full(len(where), -1, np.int64), starts, ends)


def _numbers(codes: np.ndarray[tuple[int], np.dtype[np.uint8]], where: Int64) -> Int64:
    """The octal number after each of these marks, -1 where there is none."""
    padded = np.append(codes, np.uint8(Mark.ROW))
    numbers = np.full(len(where), -1, np.int64)
    active = np.ones(len(where), np.bool_)
    step = 1
    while True:
        digits = padded[np.minimum(where + step, len(padded) - 1)]
        active &= digits >= DIGIT_ZERO
        if not active.any():
            return numbers
        numbers[active] = np.maximum(numbers[active], 0) * 8 + digits[active] - DIGIT_ZERO
        step += 1
