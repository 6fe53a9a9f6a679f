"""The plan: which rows each global step holds, found without looking at any other step.

`Plan.at(step)` is a pure function of (lengths, settings, step); ranks, workers and earlier calls don't affect it.

An epoch of a view contains all of its items, so one packing serves every epoch. A mixture with fractions has different
items each epoch: each epoch is then packed separately, and locating a step counts the steps of all earlier epochs (from
their histograms, 0.1 s each per million rows). Packing costs 0.1 to 0.4 s per million rows; sequences cost nothing.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import orjson
from blake3 import blake3

from penstock.arrays import Int32, Int64
from penstock.errors import UsageError, ViewError
from penstock.load.index import splitmix64
from penstock.load.options import IncompleteStep, PlanOptions
from penstock.load.packing import Bins, Compact, Histogram, best_fit, compact
from penstock.load.policy import UInt64

# ---- permute ---------------------------------------------------------------------------------------------------------
# Stateless permutations, computed per position without a shuffled array.
#
# A permutation depends on (size, key) alone and is the same on every machine, so finding step one million costs no more
# than finding step zero.
#
# The algorithm is a Feistel network over pairs of digits in base ⌈√size⌉ with cycle walking: an image outside the set
# is permuted again, which is rare because base² barely exceeds the size. Costs about 0.2 µs per position, 0.1 ms per
# call.


_ROUNDS: Final = 7  # enough even for sets of two or three, whose digits are single bits
_NEXT: Final = np.uint64(0xD6E8FEB86659FD93)  # added to the key after each round
_HALF: Final = np.uint64(32)


def key_of(*parts: int | str) -> int:
    """A 64-bit key derived from these values by hashing."""
    texts = [str(part) for part in parts]  # seeds may exceed the range of JSON numbers
    return int.from_bytes(blake3(orjson.dumps(texts)).digest(8), "little")


def permute(positions: Int64, sizes: int | Int64, keys: int | UInt64) -> Int64:
    """The image of each position within 0:size. Sizes and keys may differ per position."""
    size = np.broadcast_to(np.asarray(sizes, np.uint64), positions.shape)
    key = np.broadcast_to(np.asarray(keys, np.uint64), positions.shape)
    images = positions.astype(np.uint64)
    if (images >= size).any():
        raise IndexError("a position is outside the permuted set")
    base = _base(size)
    images = _network(images, base, key)
    outside = np.flatnonzero(images >= size)
    while len(outside):
        images[outside] = _network(images[outside], base[outside], key[outside])
        outside = outside[images[outside] >= size[outside]]
    return images.astype(np.int64)


def _base(size: UInt64) -> UInt64:
    """The smallest number whose square is at least the size."""
    base = np.sqrt(size.astype(np.float64)).astype(np.uint64)
    base += base * base < size
    return base


def _network(values: UInt64, base: UInt64, key: UInt64) -> UInt64:
    left, right = values // base, values % base
    for _ in range(_ROUNDS):
        left, right = right, (left + (splitmix64(right + key) >> _HALF)) % base
        key = key + _NEXT
    return left * base + right


# ---- epoch -----------------------------------------------------------------------------------------------------------
# The rows of an epoch: their number, and the items of the rows at any positions of the shuffled epoch.
#
# `Sequences` are rows of one item each; `PackedRows` are bins.
#
# For packed rows, (seed, epoch) permutes the items of equal length among their places, and the bins among the steps.
# Bins are split into strata with a similar number of sequences, and each step takes one bin from each stratum. So steps
# are alike, and the mean length of a step stays closer to the epoch's than in a random partition.
#
# Memory: 4 bytes per item plus the shapes of the bins once planned; 20 to 40 bytes per item while planning.


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


# ---- plan ------------------------------------------------------------------------------------------------------------


AlignedLengths = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class StepRows(NamedTuple):
    """The rows of one global step, at most `batch_size`: their concatenated items, and the number of items per row."""

    step: int
    epoch: int
    items: Int64
    counts: Int64


class Items(Protocol):
    """What a plan needs to know of a view, a mixture or the trees of a view."""

    @property
    def lengths(self) -> Int32:
        """Tokens per item; for pairs, a column per side."""
        ...

    @property
    def varies(self) -> bool:
        """Whether the items differ from epoch to epoch."""
        ...

    @property
    def in_order(self) -> bool:
        """Whether an epoch is every item once, in order."""
        ...

    def epoch_indices(self, epoch: int, /) -> Int64:
        """The items of an epoch."""
        ...

    def __len__(self) -> int: ...


class Plan:
    """The map from steps to rows."""

    def __init__(self, served: Items, settings: PlanOptions) -> None:
        if not len(served):
            raise ViewError("the view has no examples, so there is nothing to feed. See its ledger for the reasons.")
        if settings.capacity is not None:
            _check_fits(served.lengths, settings.capacity, settings.align)
        self.settings = settings
        self._served = served
        self._constant = not served.varies
        self._counts: list[int] = []  # rows per epoch, for the epochs counted so far
        self._kept: tuple[int, EpochRows] | None = None  # the last epoch planned
        self._lock = threading.Lock()  # the prefetching thread may plan the next epoch while the main thread calls

    def steps_in(self, epoch: int) -> int:
        """The number of steps in an epoch."""
        rows, size = self._rows_in(epoch), self.settings.batch_size
        steps = rows // size if self.settings.incomplete_step is IncompleteStep.DROP else -(-rows // size)
        if not steps:
            raise UsageError(
                f"an epoch has {rows} rows, fewer than batch_size={size}, and incomplete_step='drop' leaves no step. "
                "Use incomplete_step='fill' or 'wrap', or a smaller batch_size."
            )
        return steps

    def steps(self, epochs: int) -> int:
        """The number of steps in the first `epochs` epochs."""
        return self.steps_in(0) * epochs if self._fixed else sum(self.steps_in(epoch) for epoch in range(epochs))

    def locate(self, step: int) -> tuple[int, int]:
        """The epoch of a global step, and the step's number within it."""
        if step < 0:
            raise IndexError(f"step {step}: steps are counted from 0")
        if self._fixed:
            return divmod(step, self.steps_in(0))
        for epoch in count():
            steps = self.steps_in(epoch)
            if step < steps:
                return epoch, step
            step -= steps
        raise AssertionError("epochs never end")

    def at(self, step: int) -> StepRows:
        """The rows of a global step."""
        epoch, local = self.locate(step)
        return StepRows(step, epoch, *self.take(epoch, self._positions(epoch, local, 1)))

    def visited(self, first: int, last: int) -> Int64:
        """The items of the global steps first:last, sorted, each once."""
        seen = np.zeros(len(self._served), np.bool_)
        while first < last and not seen.all():
            epoch, local = self.locate(first)
            steps = min(self.steps_in(epoch) - local, last - first)
            seen[self.take(epoch, self._positions(epoch, local, steps)).items] = True
            first += steps
        return np.flatnonzero(seen)

    def _positions(self, epoch: int, local: int, steps: int) -> Int64:
        """The positions in an epoch that some of its steps take."""
        size, count = self.settings.batch_size, self._rows_in(epoch)
        positions = np.arange(local * size, (local + steps) * size)
        return (
            positions % count if self.settings.incomplete_step is IncompleteStep.WRAP else positions[positions < count]
        )

    def take(self, epoch: int, positions: Int64) -> RowItems:
        """The rows at these positions of an epoch, regardless of the tail setting."""
        key = key_of(self.settings.seed, "epoch", epoch) if self.settings.shuffle else None
        return self._rows(epoch).take(positions, self.settings.batch_size, key)

    def padding_in(self, epoch: int) -> float:
        """The fraction of an epoch's packed rows that is padding; 0 for sequences."""
        capacity = self.settings.capacity
        if capacity is None:
            return 0.0
        lengths = self._served.lengths[self._served.epoch_indices(epoch)]
        return 1 - int(lengths.sum(dtype=np.int64)) / (self._rows_in(epoch) * capacity)

    @property
    def nbytes(self) -> int:
        """The memory taken by the last planned epoch."""
        return self._kept[1].nbytes if self._kept else 0

    @property
    def _fixed(self) -> bool:
        """Whether all epochs have the same number of rows; a mixture always has the same number of items."""
        return self._constant or self.settings.capacity is None

    def _rows_in(self, epoch: int) -> int:
        with self._lock:
            if self._fixed:
                epoch = 0
            while len(self._counts) <= epoch:
                self._counts.append(self._count(len(self._counts)))
            return self._counts[epoch]

    def _count(self, epoch: int) -> int:
        """The rows of an epoch, counted from its histogram if it is not planned yet."""
        capacity = self.settings.capacity
        if capacity is None or self._constant:
            return self._planned(epoch).count
        lengths = self._served.lengths[self._served.epoch_indices(epoch)]
        return best_fit(Histogram.of(aligned(lengths, self.settings)), capacity).total

    def _rows(self, epoch: int) -> EpochRows:
        with self._lock:
            return self._planned(epoch)

    def _planned(self, epoch: int) -> EpochRows:
        epoch = 0 if self._constant else epoch
        if self._kept is None or self._kept[0] != epoch:
            self._kept = None  # free the old plan before building the new one
            self._kept = epoch, _plan_epoch(self._served, epoch, self.settings)
        return self._kept[1]


def _plan_epoch(served: Items, epoch: int, settings: PlanOptions) -> EpochRows:
    items = None if served.in_order else compact(served.epoch_indices(epoch))
    if settings.capacity is None:
        return Sequences(len(served) if items is None else items)
    lengths = aligned(served.lengths if items is None else served.lengths[items], settings)
    histogram = Histogram.of(lengths)
    bins = best_fit(histogram, settings.capacity)
    # Sorting 16-bit keys takes linear time; the complement puts the longest first and keeps equal lengths in order.
    order = compact(np.argsort(np.iinfo(lengths.dtype).max - lengths, kind="stable"))
    classes = compact(np.concatenate(([0], np.cumsum(histogram.counts, dtype=np.int64))))
    return PackedRows(bins, order if items is None else items[order], classes)


def aligned(lengths: Int32, settings: PlanOptions) -> AlignedLengths:
    """The space each sequence takes in a bin: its length rounded up to the alignment."""
    assert settings.capacity is not None
    align = settings.align
    taken = lengths if align == 1 else (lengths + (align - 1)) // align * align
    return taken.astype(np.uint16) if settings.capacity < 2**16 else taken.astype(np.uint32)


def _check_fits(lengths: Int32, capacity: int, align: int) -> None:
    if lengths.ndim > 1:
        raise UsageError("preference pairs can't be packed. Use collate='pairs'.")
    item = int(lengths.argmax())
    longest = int(lengths[item])
    taken = -(-longest // align) * align
    if taken > capacity:
        raise UsageError(
            f"item {item} has {longest} tokens{f' ({taken} aligned)' if align > 1 else ''}, more than "
            f"capacity={capacity}, and packing never splits a row. Raise the capacity, or set the view's max_length "
            f"to at most {capacity // align * align}."
        )
