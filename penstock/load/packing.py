"""Packs a histogram of lengths into bins by best-fit decreasing.

Every place is in exactly one bin and no bin is overfull; the result depends on the histogram alone.

One change to best-fit decreasing: most of the short sequences are dealt out evenly first. Plain best-fit uses them last
and fills some bins with hundreds of them, so that the mean length of a step varies several times as much as in a random
partition. The remaining short sequences are kept for the end, where they close the gaps, so bins are as full as before.

Bins in the same state are handled as one group: a million sequences cost about as many moves as there are distinct
lengths, a few microseconds each.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64

# ---- bins ------------------------------------------------------------------------------------------------------------
# The result of packing: for each bin, the places it holds.
#
# A *place* is a rank among all sequences sorted by length, longest first; the plan decides which sequence takes it.
# Equal bins are stored as one shape with a count: a few kilobytes for a million sequences. At worst, if all bins
# differ, they take as much memory as the list of places.


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


# ---- best fit --------------------------------------------------------------------------------------------------------


_SHORT: Final = 0.5  # of the mean length: shorter sequences are short,
_TINY: Final = 32  # provided that this many fit in a bin; longer ones are needed to pair up with long ones
_DEALT: Final = 0.94  # share of the short sequences dealt out; the others close gaps
_ROOM: Final = 0.25  # of the capacity: the most that is dealt to a bin

_Group = tuple[int, int, int]  # equal bins: their last move (-1: none yet), the index of the first in it, and the count


class Histogram(NamedTuple):
    """The distinct lengths, longest first, and the number of sequences of each."""

    lengths: Int64
    counts: Int64

    @classmethod
    def of(cls, lengths: npt.NDArray[np.integer]) -> Histogram:
        """Builds the histogram of some lengths."""
        counts = np.bincount(lengths)
        present = np.flatnonzero(counts)[::-1]
        return cls(present, counts[present])


def best_fit(histogram: Histogram, capacity: int) -> Bins:
    """Packs sequences of 1 to `capacity` tokens."""
    lengths, counts = histogram
    assert len(lengths) and lengths[-1] > 0 and lengths[0] <= capacity, "sequences have 1 to capacity tokens"
    packer = _Packer(capacity)
    first_place = np.cumsum(counts) - counts
    dealt, bins = _to_deal(histogram, capacity)
    packer.deal(lengths, dealt, first_place, bins)
    packer.fill(lengths, counts - dealt, first_place + dealt)
    return packer.bins()


def _to_deal(histogram: Histogram, capacity: int) -> tuple[Int64, int]:
    """The number of sequences of each length to deal out first, and the number of bins to deal them to."""
    lengths, counts = histogram
    tokens = counts * lengths
    room = int(_ROOM * capacity)
    short = min(int(_SHORT * tokens.sum() / counts.sum()), capacity // _TINY)
    # A long sequence needs a bin to itself; at most `room` is dealt to the other bins, so everything else still fits.
    bins = int(tokens.sum()) // capacity - int(counts[lengths > capacity - room].sum())
    if bins < 1:
        return np.zeros_like(counts), 0
    is_short = lengths <= short
    share = min(_DEALT, (room - short) * bins / max(int(tokens[is_short].sum()), 1))
    return np.where(is_short, (counts * share).astype(np.int64), 0), bins


def _present(lengths: Int64, counts: Int64, places: Int64) -> Iterator[tuple[int, int, int]]:
    """Length, number of sequences and first place of each length that occurs."""
    some = np.flatnonzero(counts)
    return zip(lengths[some].tolist(), counts[some].tolist(), places[some].tolist(), strict=True)


class _Packer:
    """The moves so far, and the open bins by remaining space."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        # A move adds `width` sequences to each bin of a group; its bin 0 was bin `turn` of its parent move.
        self._parents = array("q")
        self._turns = array("q")
        self._places = array("q")
        self._widths = array("q")
        self._open: dict[int, list[_Group]] = {}  # by space
        self._spaces: list[int] = []  # the keys of _open, sorted

    def deal(self, lengths: Int64, counts: Int64, places: Int64, bins: int) -> None:
        """Deals sequences round-robin, longest first."""
        ring: list[tuple[int, _Group]] = [(self._capacity, (-1, 0, bins))]
        at = 0
        for length, left, place in _present(lengths, counts, places):
            while left:
                space, (move, turn, count) = ring[at]
                taken = min(count, left)
                new = (space - length, (self._move(move, turn, place, 1), 0, taken))
                if taken < count:
                    ring[at : at + 1] = [new, (space, (move, turn + taken, count - taken))]
                else:
                    ring[at] = new
                at = (at + 1) % len(ring)
                place, left = place + taken, left - taken
        for space, group in ring:
            if group[0] >= 0:
                self._put(space, group)

    def fill(self, lengths: Int64, counts: Int64, places: Int64) -> None:
        """Best fit: puts each sequence in the bin with the least sufficient space, or in a new one."""
        for length, left, place in _present(lengths, counts, places):
            while left:
                space, (move, turn, count) = self._best(length, left)
                width = min(space // length, left)  # as best fit would, one sequence at a time
                taken = min(count, left // width)
                self._put(space - width * length, (self._move(move, turn, place, width), 0, taken))
                if taken < count and move >= 0:
                    self._put(space, (move, turn + taken, count - taken))
                place, left = place + width * taken, left - width * taken

    def _best(self, length: int, left: int) -> tuple[int, _Group]:
        at = bisect_left(self._spaces, length)
        if at == len(self._spaces):
            return self._capacity, (-1, 0, left)  # as many new bins as might be needed
        space = self._spaces[at]
        groups = self._open[space]
        group = groups.pop()
        if not groups:
            del self._open[space], self._spaces[at]
        return space, group

    def _put(self, space: int, group: _Group) -> None:
        if space in self._open:
            self._open[space].append(group)
        else:
            self._open[space] = [group]
            insort(self._spaces, space)

    def _move(self, parent: int, turn: int, place: int, width: int) -> int:
        self._parents.append(parent)
        self._turns.append(turn)
        self._places.append(place)
        self._widths.append(width)
        return len(self._parents) - 1

    def bins(self) -> Bins:
        """Follows all groups back to their empty bins, one generation at a time."""
        parents, turns, places, widths = (
            np.frombuffer(part, np.int64) for part in (self._parents, self._turns, self._places, self._widths)
        )
        groups = chain.from_iterable(group for space in self._spaces for group in self._open[space])
        ends = np.fromiter(groups, np.int64).reshape(-1, 3)
        self._open.clear()
        alive, move, turn = np.arange(len(ends)), ends[:, 0], ends[:, 1]
        owners, firsts, counts = [alive[:0]], [alive[:0]], [alive[:0]]
        while len(alive):
            owners.append(alive)
            firsts.append(places[move] + turn * widths[move])
            counts.append(widths[move])
            more = parents[move] >= 0
            alive, move, turn = alive[more], parents[move][more], (turn + turns[move])[more]
        return _sorted_bins(ends[:, 2], np.concatenate(owners), np.concatenate(firsts), np.concatenate(counts))


def _sorted_bins(bins: Int64, owner: Int64, first: Int64, width: Int64) -> Bins:
    """Sorts shapes by their number of sequences and groups the entries of each."""
    sequences = np.bincount(owner, weights=width, minlength=len(bins))
    order = np.argsort(sequences, kind="stable")
    rank = np.empty_like(order)
    rank[order] = np.arange(len(order))
    by_shape = np.argsort(rank[owner], kind="stable")
    entries = np.bincount(rank[owner], minlength=len(bins))
    return Bins(_sums(bins[order]), _sums(entries), compact(first[by_shape]), compact(width[by_shape]))


def _sums(counts: Int64) -> Compact:
    return compact(np.concatenate(([0], np.cumsum(counts, dtype=np.int64))))
