"""The rows of an epoch: their number, and the items of the rows at any positions of the shuffled epoch.

`Sequences` are rows of one item each; `PackedRows` are bins.

For packed rows, (seed, epoch) permutes the items of equal length among their places, and the bins among the steps. Bins
are split into strata with a similar number of sequences, and each step takes one bin from each stratum. So steps are
alike, and the mean length of a step stays closer to the epoch's than in a random partition.

Memory: 4 bytes per item plus the shapes of the bins once planned; 20 to 40 bytes per item while planning.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from penstock.arrays import Int64
from penstock.pack.bins import Bins, Compact
from penstock.pack.permute import key_of, permute
from penstock.view.runs import UInt64


class RowItems(NamedTuple):
    """The concatenated items of some rows, and the number of items per row."""

    items: Int64
    counts: Int64


class EpochRows(Protocol):
    """The rows of an epoch."""

    @property
    def count(self) -> int:
        """The number of rows."""
        ...

    @property
    def nbytes(self) -> int:
        """The memory that the rows take."""
        ...

    def take(self, positions: Int64, batch_size: int, key: int | None) -> RowItems:
        """The rows at these positions of the shuffled epoch, or of the unshuffled one if `key` is None."""
        ...


class Sequences:
    """Each item is a row."""

    def __init__(self, items: int | Compact) -> None:
        """`items`: the number of items, or an array of item numbers."""
        self.count = items if isinstance(items, int) else len(items)
        self._items = None if isinstance(items, int) else items

    @property
    def nbytes(self) -> int:
        """What is kept in memory."""
        return 0 if self._items is None else self._items.nbytes

    def take(self, positions: Int64, batch_size: int, key: int | None) -> RowItems:
        """The rows at these positions of the epoch's order."""
        del batch_size
        ranks = positions if key is None else permute(positions, self.count, key)
        items = ranks if self._items is None else self._items[ranks].astype(np.int64)
        return RowItems(items, np.ones(len(positions), np.int64))


class PackedRows:
    """Each row is a bin of items."""

    def __init__(self, bins: Bins, order: Compact, classes: Compact) -> None:
        """`order`: the item at each place. Places of one length are a class: classes[c]:classes[c+1]."""
        self._bins, self._order, self._classes = bins, order, classes
        self.count = bins.total

    @property
    def nbytes(self) -> int:
        """What is kept in memory."""
        return self._order.nbytes + self._classes.nbytes + sum(part.nbytes for part in self._bins)

    def take(self, positions: Int64, batch_size: int, key: int | None) -> RowItems:
        """The rows at these positions of the epoch's order."""
        places, counts = self._bins.places(stratified(positions, self.count, batch_size, key))
        if key is not None:
            places = self._shuffled(places, key)
        return RowItems(self._order[places].astype(np.int64), counts)

    def _shuffled(self, places: Int64, key: int) -> Int64:
        """Moves each place to another one of the same length."""
        which = np.searchsorted(self._classes, places, side="right") - 1
        start = self._classes[which].astype(np.int64)
        size = self._classes[which + 1] - start
        return start + permute(places - start, size, _keys(key, "places", which))


def stratified(positions: Int64, count: int, batch_size: int, key: int | None) -> Int64:
    """The bin at each position: each slot of a step draws from its own stratum of bins, without repetition."""
    slots = min(batch_size, count)
    turn, slot = np.divmod(positions, batch_size)
    stratum = np.arange(slots) if key is None else permute(np.arange(slots), slots, key_of(key, "strata"))
    whole, rest = divmod(count, batch_size)
    sizes = np.empty(slots, np.int64)
    sizes[stratum] = whole + (np.arange(slots) < rest)  # the last step of an epoch only has the first slots
    starts = np.cumsum(sizes) - sizes
    own = stratum[slot]
    if key is not None:
        turn = permute(turn, sizes[own], _keys(key, "turns", own))
    return starts[own] + turn


def _keys(key: int, purpose: str, numbers: Int64) -> UInt64:
    """A separate key for each number."""
    return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key_of(key, purpose))
