"""The hold-out: which rows a view shows, decided by (seed, content of the row) alone.

Enters: the row hashes of all examples. Leaves: a threshold on keyed hashes; a row is held out where its own lies at
or below it. So equal rows share a side, and neither order, slicing nor mixing moves a row. Rows appended later move
no older row when a fraction is held out; when a number is, they can only push older rows back to the training part.
Costs one multiply-shift chain per row; a number of rows also needs 8 bytes a row while it is computed.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from penstock.arrays import Bool
from penstock.errors import ViewError
from penstock.view.index.keyed import keyed_hashes
from penstock.view.runs import UInt64
from penstock.view.settings import HoldoutPart, ViewSettings


class Holdout:
    """Tells which rows belong to a view's part."""

    __slots__ = ("_part", "_seed", "_threshold")

    def __init__(self, chosen: ViewSettings, hashes: Iterable[UInt64]) -> None:
        """`hashes` are the row hashes by shard; they are read only where a number of rows is held out."""
        self._part, self._seed = chosen.part, chosen.holdout_seed
        self._threshold: np.uint64 | None = None
        match chosen.holdout:
            case None:
                pass
            case int(count):
                self._threshold = _nth_smallest(count, [keyed_hashes(shard, self._seed) for shard in hashes])
            case float(fraction):
                self._threshold = np.uint64(int(fraction * 2.0**64))

    def shows(self, hashes: UInt64) -> Bool:
        """Which of these rows the view's part contains."""
        if self._threshold is None:
            return np.ones(len(hashes), np.bool_)
        held_out = keyed_hashes(hashes, self._seed) <= self._threshold
        return held_out if self._part is HoldoutPart.HELD_OUT else ~held_out


def _nth_smallest(count: int, keyed: list[UInt64]) -> np.uint64:
    rows = np.concatenate(keyed) if keyed else np.empty(0, np.uint64)
    if count >= len(rows):
        raise ViewError(
            f"holdout={count} leaves nothing to train on: the dataset has {len(rows)} rows. Hold out fewer."
        )
    return np.uint64(np.partition(rows, count - 1)[count - 1])
