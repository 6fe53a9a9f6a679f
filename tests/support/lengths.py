"""Views with lengths but no tokens (plans read nothing else), and a reference packer."""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int32, Int64


class Lengths:
    """The `Items` of a plan."""

    varies, in_order = False, True

    def __init__(self, lengths: npt.ArrayLike) -> None:
        self.lengths: Int32 = np.asarray(lengths, np.int32)

    def epoch_indices(self, epoch: int) -> Int64:
        return np.arange(len(self))

    def __len__(self) -> int:
        return len(self.lengths)


def chat_like(count: int, seed: int = 0) -> Int32:
    """Short turns with a long tail, truncated to 8192."""
    drawn = np.random.default_rng(seed).lognormal(6.0, 1.0, count)
    return np.clip(drawn, 8, 8192).astype(np.int32)


def reasoning_like(count: int, seed: int = 0) -> Int32:
    """Long answers, truncated to 16384."""
    drawn = np.random.default_rng(seed).lognormal(8.3, 0.8, count)
    return np.clip(drawn, 64, 16384).astype(np.int32)


def best_fit_decreasing(lengths: Int32, capacity: int) -> int:
    """The number of rows that plain best-fit decreasing needs, one sequence at a time."""
    open_rows: dict[int, int] = {}
    spaces: list[int] = []
    rows = 0
    for length in np.sort(lengths)[::-1].tolist():
        at = bisect_left(spaces, length)
        if at == len(spaces):
            rows, space = rows + 1, capacity
        else:
            space = spaces[at]
            open_rows[space] -= 1
            if not open_rows[space]:
                del spaces[at]
        left = space - length
        if not open_rows.get(left):
            insort(spaces, left)
        open_rows[left] = open_rows.get(left, 0) + 1
    return rows
