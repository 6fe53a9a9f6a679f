"""The result of packing: for each bin, the places it holds.

A *place* is a rank among all sequences sorted by length, longest first; the plan decides which sequence takes it. Equal
bins are stored as one shape with a count: a few kilobytes for a million sequences. At worst, if all bins differ, they
take as much memory as the list of places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64

Compact = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


def compact(numbers: Int64) -> Compact:
    """Stores non-negative numbers in 4 bytes each if they fit."""
    return numbers.astype(np.uint32) if numbers.max(initial=0) < 2**32 else numbers


class Bins(NamedTuple):
    """Bins by shape: shape s covers bins first_bin[s]:first_bin[s+1] and consists of entries[s]:entries[s+1].

    Bin j of a shape holds, per entry, the `width` places from `first_place + j * width` on. Shapes are sorted by their
    number of sequences, ascending.
    """

    first_bin: Compact
    entries: Compact
    first_place: Compact
    width: Compact

    @property
    def total(self) -> int:
        """The number of bins."""
        return int(self.first_bin[-1])

    def places(self, bins: Int64) -> tuple[Int64, Int64]:
        """The concatenated places of these bins, and the number of places per bin."""
        shape = np.searchsorted(self.first_bin, bins, side="right") - 1
        turn = bins - self.first_bin[shape]
        entry, owner = ranges(self.entries[shape].astype(np.int64), self.entries[shape + 1].astype(np.int64))
        width = self.width[entry].astype(np.int64)
        first = self.first_place[entry] + turn[owner] * width
        places, _ = ranges(first, first + width)
        counts = np.bincount(owner, weights=width, minlength=len(bins)).astype(np.int64)
        return places, counts


def ranges(first: Int64, last: Int64) -> tuple[Int64, Int64]:
    """Concatenates the ranges first:last; also returns the index of the range each number comes from."""
    sizes = last - first
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.cumsum(sizes) - sizes
    return np.arange(len(owner)) + (first - before)[owner], owner
