"""Balancing: every row in one cell, equal cell sizes on all ranks, balanced work."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Int32
from penstock.load.assemble import shares, sizes_of, work_of
from penstock.load.options import PlanOptions
from penstock.load.plan import Plan
from tests.support.lengths import Lengths, chat_like, reasoning_like


@settings(deadline=None)
@given(
    work=st.lists(st.floats(0, 1e9), max_size=40),
    missing=st.integers(0, 10),
    world_size=st.integers(1, 9),
    micro_batch=st.one_of(st.none(), st.integers(1, 12)),
)
def test_every_row_once_and_equal_sizes(
    work: list[float], missing: int, world_size: int, micro_batch: int | None
) -> None:
    rows = max(len(work) + missing, 1)
    cells = shares(np.array(work), rows, world_size, micro_batch)
    sizes = [[len(cell) for cell in rank] for rank in cells]
    assert len(cells) == world_size and all(own == sizes_of(rows, world_size, micro_batch) for own in sizes)
    found = [row for rank in cells for cell in rank for row in cell if row >= 0]
    assert sorted(found) == list(range(len(work)))
    assert all(max(own) <= (micro_batch or rows) for own in sizes)
    real = [[row for row in cell if row >= 0] for rank in cells for cell in rank]
    assert all(cell == sorted(cell) for cell in real), "cells keep the plan's order"
    for rank in cells:
        loads = [sum(work[row] for row in cell if row >= 0) for cell in rank if len(cell) == len(rank[0])]
        assert loads == sorted(loads, reverse=True), "micro-batches are sorted by work"


def test_single_rank_keeps_the_plan_order() -> None:
    assert shares(np.array([1.0, 9, 4]), 4, 1, None) == [[[0, 1, 2, -1]]]


def test_fewer_rows_than_ranks() -> None:
    cells = shares(np.array([5.0, 1, 3]), 3, 8, None)
    assert [len(rank[0]) for rank in cells] == [1] * 8
    assert sum(row >= 0 for rank in cells for row in rank[0]) == 3


def test_micro_batches_are_sorted_by_work() -> None:
    cells = shares(np.array([100.0, 90, 1, 2, 3, 4, 80, 70]), 8, 2, 2)
    work = [100.0, 90, 1, 2, 3, 4, 80, 70]
    loads = [[sum(work[row] for row in cell) for cell in rank] for rank in cells]
    assert all(rank == sorted(rank, reverse=True) for rank in loads)
    assert max(map(sum, loads)) / min(map(sum, loads)) < 1.05
    assert shares(np.array([5.0, 4, 3, 0]), 4, 1, 2) == [[[1, 2], [0, 3]]], "heaviest micro-batch first"


@pytest.mark.parametrize(("lengths", "capacity"), [(chat_like(60_000), 8192), (reasoning_like(30_000), 16384)])
def test_work_of_64_packed_rows_over_8_ranks(lengths: Int32, capacity: int) -> None:
    plan = Plan(Lengths(lengths), PlanOptions(64, capacity))
    ratios = []
    for step in range(plan.steps_in(0) - 1):
        rows = plan.at(step)
        work = work_of(lengths[rows.items].astype(np.float64), rows.counts)
        loads = [sum(work[row] for row in rank[0]) for rank in shares(work, 64, 8, None)]
        ratios.append(max(loads) / np.mean(loads))
    assert np.mean(ratios) < 1.1
