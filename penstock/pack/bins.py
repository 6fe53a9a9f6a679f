"""What a packing plan knows of bins: for any bin, which places it holds.

A *place* is a rank among all sequences sorted by length, longest first; which sequence stands there is the plan's
affair. Equal bins are kept as one shape with a count: some kilobytes for a million sequences. Where bins are all
different, their description is at most as long as the list of places.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64

Compact = npt.NDArray[np.uint32] | npt.NDArray[np.int64]


def compact(numbers: Int64) -> Compact:
    """The same numbers, none negative, in 4 bytes each where these suffice."""
    return numbers.astype(np.uint32) if numbers.max(initial=0) < 2**32 else numbers


class Bins(NamedTuple):
    """Bins by shape: shape s is the bins first_bin[s]:first_bin[s+1], and made of entries[s]:entries[s+1].

    Bin number j of a shape holds, per entry, the `width` places from `first_place + j * width` on. Shapes stand in
    order of their number of sequences, few first.
    """

    first_bin: Compact
    entries: Compact
    first_place: Compact
    width: Compact

    @property
    def total(self) -> int:
        """How many bins there are."""
        return int(self.first_bin[-1])

    def places(self, bins: Int64) -> tuple[Int64, Int64]:
        """The places of these bins one after the other, and how many each bin holds."""
        shape = np.searchsorted(self.first_bin, bins, side="right") - 1
        turn = bins - self.first_bin[shape]
        entry, owner = ranges(self.entries[shape].astype(np.int64), self.entries[shape + 1].astype(np.int64))
        width = self.width[entry].astype(np.int64)
        first = self.first_place[entry] + turn[owner] * width
        places, _ = ranges(first, first + width)
        counts = np.bincount(owner, weights=width, minlength=len(bins)).astype(np.int64)
        return places, counts


def ranges(first: Int64, last: Int64) -> tuple[Int64, Int64]:
    """The numbers of all ranges first:last joined, and which range each comes from."""
    sizes = last - first
    owner = np.repeat(np.arange(len(sizes)), sizes)
    before = np.cumsum(sizes) - sizes
    return np.arange(len(owner)) + (first - before)[owner], owner
