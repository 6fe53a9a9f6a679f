"""Balances a step: assigns its rows to ranks and micro-batches so that all have about the same work.

The work of a row is Σ length² over its sequences, the cost of attention. Every row is in exactly one cell (a rank's
micro-batch); the n-th cells of all ranks have the same size, so all ranks run the same number of batches. Missing rows
are -1: rows without loss fill them.

Greedy, heaviest row first: each row goes to the rank with the least work that still has room, and likewise to a
micro-batch within the rank. A rank's micro-batches are then sorted by work, so that ranks which synchronise after each
one wait as little as possible. Rows within a cell keep the plan's order. Costs about 1 µs per row, and nothing for one
rank without micro-batches.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64

Work = npt.NDArray[np.float64]


def sizes_of(rows: int, world_size: int, micro_batch: int | None) -> list[int]:
    """The micro-batch sizes of each rank for a step of `rows` rows."""
    share = -(-rows // world_size)
    size = min(micro_batch or share, share)
    whole, rest = divmod(share, size)
    return [size] * whole + [rest] * (rest > 0)


def shares(work: Work, rows: int, world_size: int, micro_batch: int | None) -> list[list[list[int]]]:
    """Row numbers by rank and micro-batch; `rows` is the full size of a step, and `work` may cover fewer."""
    sizes = sizes_of(rows, world_size, micro_batch)
    every = [sum(sizes)] * world_size
    return [_micro_batches(rank, work, sizes) for rank in _deal(range(len(work)), work, every)]


def _micro_batches(rows: list[int], work: Work, sizes: list[int]) -> list[list[int]]:
    cells = _deal(rows, work, sizes)
    # Only cells of equal size may be reordered; a smaller one stays last.
    equal = sum(size == sizes[0] for size in sizes)
    cells[:equal] = sorted(cells[:equal], key=lambda cell: -sum(work[row] for row in cell))
    return [cell + [-1] * (size - len(cell)) for cell, size in zip(cells, sizes, strict=True)]


def _deal(rows: Sequence[int], work: Work, sizes: list[int]) -> list[list[int]]:
    """Deals rows to cells of the given sizes, heaviest first, each to the cell with the least work."""
    if len(sizes) == 1:
        return [list(rows)]
    cells: list[list[int]] = [[] for _ in sizes]
    heap = [(0.0, cell) for cell, size in enumerate(sizes) if size]
    own = np.asarray(rows, np.int64)
    for row in own[np.argsort(-work[own], kind="stable")].tolist():
        load, cell = heapq.heappop(heap)
        cells[cell].append(row)
        if len(cells[cell]) < sizes[cell]:
            heapq.heappush(heap, (load + float(work[row]), cell))
    return [sorted(cell) for cell in cells]


def work_of(lengths: Work, counts: Int64) -> Work:
    """Σ length² per row, where row i has `counts[i]` sequences."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=lengths**2, minlength=len(counts)).astype(np.float64)
