"""Checks of values that rows bring with them: integer ids, finite weights, bounds inside their file.

An unchecked value would not fail, but be served: a fraction is truncated, a negative bound counts from the file's end.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.adoption.chunk import RowPlaces
from penstock.arrays import Float32, Int64
from penstock.errors import SourceError

LARGEST_WEIGHT = float(np.finfo(np.float32).max)  # weights are stored as 32-bit floats


def row_at(lengths: Int64, position: int | np.integer[Any]) -> int:
    """The row of a position in concatenated rows."""
    return int(np.searchsorted(np.cumsum(lengths), position, side="right"))


def checked_weights(places: RowPlaces, name: str, values: Any, lengths: Int64) -> Float32:
    """Loss weights as 32-bit floats; each must be a finite number from 0 up."""
    weights = np.asarray(values, np.float64)
    wrong = np.flatnonzero(~((weights >= 0) & (weights <= LARGEST_WEIGHT)))  # NaN compares false
    if len(wrong):
        raise SourceError(
            f"{places.of(row_at(lengths, wrong[0]))}: {name!r} has the value {weights[wrong[0]]:g}. "
            "A weight must be a finite number from 0 up; use 0 for tokens that are not trained."
        )
    return weights.astype(np.float32)


def check_bounds(places: RowPlaces, starts: Int64, ends: Int64, tokens: int) -> None:
    """Raises an error unless every sequence lies inside the file and no two overlap."""
    wrong = np.flatnonzero((starts < 0) | (ends < starts) | (ends > tokens))
    if len(wrong):
        row = int(wrong[0])
        raise SourceError(
            f"{places.of(row)}: tokens {starts[row]:,} to {ends[row]:,} are not within the {tokens:,} tokens of the "
            "file. The index is damaged, or belongs to another file; write it again."
        )
    filled = np.flatnonzero(ends > starts)
    order = filled[np.argsort(starts[filled], kind="stable")]
    shared = np.flatnonzero(starts[order][1:] < ends[order][:-1])
    if len(shared):
        one, other = sorted((int(order[shared[0]]), int(order[shared[0] + 1])))
        raise SourceError(
            f"{places.of(other)}: tokens {starts[other]:,} to {ends[other]:,} overlap those of row "
            f"{places.first + one + 1}, {starts[one]:,} to {ends[one]:,}. The index is damaged; write it again."
        )
