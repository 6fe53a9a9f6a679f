"""The plan: which rows each global step holds, found without looking at any other step.

`Plan.at(step)` is a pure function of (lengths, settings, step); ranks, workers and earlier calls don't affect it.

An epoch of a view contains all of its items, so one packing serves every epoch. A mixture with fractions has different
items each epoch: each epoch is then packed separately, and locating a step counts the steps of all earlier epochs (from
their histograms, 0.1 s each per million rows). Packing costs 0.1 to 0.4 s per million rows; sequences cost nothing.
"""

from __future__ import annotations

import threading
from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32, Int64
from penstock.errors import UsageError, ViewError
from penstock.pack.best_fit import Histogram, best_fit
from penstock.pack.bins import Compact, compact
from penstock.pack.epoch import EpochRows, PackedRows, RowItems, Sequences
from penstock.pack.permute import key_of
from penstock.pack.settings import PlanSettings, Tail
from penstock.view.mixture import BaseMixture
from penstock.view.view import Served

AlignedLengths = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


class StepRows(NamedTuple):
    """The rows of one global step, at most `batch_size`: their concatenated items, and the number of items per row."""

    step: int
    epoch: int
    items: Int64
    counts: Int64


class Plan:
    """The map from steps to rows."""

    def __init__(self, served: Served, settings: PlanSettings) -> None:
        if not len(served):
            raise ViewError("the view has no examples, so there is nothing to feed. See its ledger for the reasons.")
        if settings.capacity is not None:
            _check_fits(served.lengths, settings.capacity, settings.align)
        self.settings = settings
        self._served = served
        self._constant = not _varies(served)
        self._counts: list[int] = []  # rows per epoch, for the epochs counted so far
        self._kept: tuple[int, EpochRows] | None = None  # the last epoch planned
        self._lock = threading.Lock()  # the prefetching thread may plan the next epoch while the main thread calls

    def steps_in(self, epoch: int) -> int:
        """The number of steps in an epoch."""
        rows, size = self._rows_in(epoch), self.settings.batch_size
        steps = rows // size if self.settings.tail is Tail.DROP else -(-rows // size)
        if not steps:
            raise UsageError(
                f"an epoch has {rows} rows, fewer than batch_size={size}, and tail='drop' leaves no step. "
                "Use tail='fill' or 'wrap', or a smaller batch_size."
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
        return positions % count if self.settings.tail is Tail.WRAP else positions[positions < count]

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
            self._kept = epoch, _plan_epoch(self._served, epoch, self._constant, self.settings)
        return self._kept[1]


def _varies(served: Served) -> bool:
    """Whether the items differ from epoch to epoch."""
    shares = served.shares.values() if isinstance(served, BaseMixture) else ()
    return any(share.per_epoch % len(share.view) for share in shares)


def _plan_epoch(served: Served, epoch: int, constant: bool, settings: PlanSettings) -> EpochRows:
    items: Compact | None = None
    if not constant or isinstance(served, BaseMixture):
        items = compact(served.epoch_indices(epoch))
    if settings.capacity is None:
        return Sequences(len(served) if items is None else items)
    lengths = aligned(served.lengths if items is None else served.lengths[items], settings)
    histogram = Histogram.of(lengths)
    bins = best_fit(histogram, settings.capacity)
    # Sorting 16-bit keys takes linear time; the complement puts the longest first and keeps equal lengths in order.
    order = compact(np.argsort(np.iinfo(lengths.dtype).max - lengths, kind="stable"))
    classes = compact(np.concatenate(([0], np.cumsum(histogram.counts, dtype=np.int64))))
    return PackedRows(bins, order if items is None else items[order], classes)


def aligned(lengths: Int32, settings: PlanSettings) -> AlignedLengths:
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
