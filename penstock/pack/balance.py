"""Shares of a step: which of its rows a rank gets, and in which micro-batch, so that all have the same work.

Enters: the work of each row of a step (Σ length², what attention costs), the number of ranks, rows per micro-batch.
Leaves: row numbers by rank and micro-batch, -1 where a row without loss fills up. Every row is in exactly one cell,
and cells of the same number have the same size on all ranks, so all ranks do the same number of batches.

Longest first: each row goes to the rank with the least work that still has room; inside a rank the same again for
its micro-batches, which then stand in order of their work, so that ranks that wait for each other wait for equals.
Inside a cell rows keep the order of the plan. Costs about a microsecond a row; one rank without micro-batches, nothing.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.arrays import Int64

Work = npt.NDArray[np.float64]


def sizes_of(rows: int, world_size: int, micro_batch: int | None) -> list[int]:
    """Rows per micro-batch of each rank, when a step has so many rows."""
    share = -(-rows // world_size)
    size = min(micro_batch or share, share)
    whole, rest = divmod(share, size)
    return [size] * whole + [rest] * (rest > 0)


def shares(work: Work, rows: int, world_size: int, micro_batch: int | None) -> list[list[list[int]]]:
    """Row numbers by rank and micro-batch; `rows` is the full size of a step, of which `work` may cover fewer."""
    sizes = sizes_of(rows, world_size, micro_batch)
    every = [sum(sizes)] * world_size
    return [_micro_batches(rank, work, sizes) for rank in _deal(range(len(work)), work, every)]


def _micro_batches(rows: list[int], work: Work, sizes: list[int]) -> list[list[int]]:
    cells = _deal(rows, work, sizes)
    # Only cells of one size may change places; the one that is smaller stays last.
    alike = sum(size == sizes[0] for size in sizes)
    cells[:alike] = sorted(cells[:alike], key=lambda cell: -sum(work[row] for row in cell))
    return [cell + [-1] * (size - len(cell)) for cell, size in zip(cells, sizes, strict=True)]


def _deal(rows: Sequence[int], work: Work, sizes: list[int]) -> list[list[int]]:
    """Rows dealt to cells of these sizes, the heaviest first to the one with the least work."""
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
    """Σ length² per row, of rows with so many sequences each."""
    owner = np.repeat(np.arange(len(counts)), counts)
    return np.bincount(owner, weights=lengths**2, minlength=len(counts)).astype(np.float64)
