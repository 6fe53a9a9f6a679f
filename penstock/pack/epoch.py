"""The rows of an epoch, in an order that is computed where it is asked for.

Enters: the items of an epoch with their lengths. Leaves: `Rows`: how many rows there are, and which items the rows at
given positions of a shuffled epoch hold. `Sequences` are rows of one item each; `PackedRows` are bins.

Packed: (seed, epoch) permutes the items of equal length among their places, and the bins among the steps. Step by
step it takes one bin of each stratum, strata being bins with a similar number of sequences; so steps are alike, and
the mean length of a step stays closer to the epoch's than in a random partition.

Memory: 4 bytes an item once planned, and the shapes of the bins; 20 to 40 while planning.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np

from penstock.arrays import Int64
from penstock.pack.bins import Bins, Compact
from penstock.pack.permute import key_of, permuted
from penstock.view.runs import UInt64


class Taken(NamedTuple):
    """Some rows: their items one after the other, and how many each row has."""

    items: Int64
    counts: Int64


class Rows(Protocol):
    """The rows of an epoch."""

    @property
    def count(self) -> int:
        """How many there are."""
        ...

    @property
    def nbytes(self) -> int:
        """What is kept in memory to know them."""
        ...

    def take(self, positions: Int64, batch_size: int, key: int | None) -> Taken:
        """The rows at these positions of the epoch's order; without a key, of the unshuffled order."""
        ...


class Sequences:
    """Every item is a row."""

    def __init__(self, items: int | Compact) -> None:
        """`items`: so many, or the numbers of these."""
        self.count = items if isinstance(items, int) else len(items)
        self._items = None if isinstance(items, int) else items

    @property
    def nbytes(self) -> int:
        """What is kept in memory."""
        return 0 if self._items is None else self._items.nbytes

    def take(self, positions: Int64, batch_size: int, key: int | None) -> Taken:
        """The rows at these positions of the epoch's order."""
        del batch_size
        ranks = positions if key is None else permuted(positions, self.count, key)
        items = ranks if self._items is None else self._items[ranks].astype(np.int64)
        return Taken(items, np.ones(len(positions), np.int64))


class PackedRows:
    """Bins of items."""

    def __init__(self, bins: Bins, order: Compact, classes: Compact) -> None:
        """`order`: the item at each place. Places of one length are a class: classes[c]:classes[c+1]."""
        self._bins, self._order, self._classes = bins, order, classes
        self.count = bins.total

    @property
    def nbytes(self) -> int:
        """What is kept in memory."""
        return self._order.nbytes + self._classes.nbytes + sum(part.nbytes for part in self._bins)

    def take(self, positions: Int64, batch_size: int, key: int | None) -> Taken:
        """The rows at these positions of the epoch's order."""
        places, counts = self._bins.places(stratified(positions, self.count, batch_size, key))
        if key is not None:
            places = self._shuffled(places, key)
        return Taken(self._order[places].astype(np.int64), counts)

    def _shuffled(self, places: Int64, key: int) -> Int64:
        """Another place of the same length for each."""
        which = np.searchsorted(self._classes, places, side="right") - 1
        start = self._classes[which].astype(np.int64)
        size = self._classes[which + 1] - start
        return start + permuted(places - start, size, _keys(key, "places", which))


def stratified(positions: Int64, count: int, batch_size: int, key: int | None) -> Int64:
    """The bin at each position: a step's slots draw on different strata of the bins, in turn and without repetition."""
    slots = min(batch_size, count)
    turn, slot = np.divmod(positions, batch_size)
    stratum = np.arange(slots) if key is None else permuted(np.arange(slots), slots, key_of(key, "strata"))
    whole, rest = divmod(count, batch_size)
    sizes = np.empty(slots, np.int64)
    sizes[stratum] = whole + (np.arange(slots) < rest)  # an epoch's last step reaches its first slots only
    starts = np.cumsum(sizes) - sizes
    own = stratum[slot]
    if key is not None:
        turn = permuted(turn, sizes[own], _keys(key, "turns", own))
    return starts[own] + turn


def _keys(key: int, purpose: str, numbers: Int64) -> UInt64:
    """A key of its own for each number."""
    return numbers.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key_of(key, purpose))
