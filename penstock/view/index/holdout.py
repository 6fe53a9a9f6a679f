"""The hold-out: assigns each row to one part, depending only on the seed and the row's content.

A row is held out if its keyed hash is at or below a threshold. Equal rows are therefore on the same side, and order,
slicing and mixing don't move a row. If a fraction is held out, rows appended later move no older row; if a number is,
they can only move older rows back to the training part. The cost is one multiply-shift chain per row, and for a number
of rows also 8 bytes per row while the threshold is computed.
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
    """Decides which rows belong to a view's part."""

    __slots__ = ("_part", "_seed", "_threshold")

    def __init__(self, chosen: ViewSettings, hashes: Iterable[UInt64]) -> None:
        """`hashes` are the row hashes by shard, read only if a number of rows is held out."""
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
        """Which of these rows belong to the view's part."""
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
