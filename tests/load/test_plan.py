"""Plans: every item once per epoch, steps in any order, tails, mixtures, memory."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrays import Int32
from penstock.errors import UsageError, ViewError
from penstock.load.options import IncompleteStep, PlanOptions
from penstock.load.plan import Plan
from penstock.load.view import Mixture, mix
from penstock.prepare.chat.conversation import Role
from tests.support.lengths import Lengths, chat_like, reasoning_like
from tests.support.memory_dataset import MemoryDataset
from tests.support.view_rows import chat


def epoch_items(plan: Plan, epoch: int) -> list[int]:
    first = sum(plan.steps_in(before) for before in range(epoch))
    steps = [plan.at(first + step) for step in range(plan.steps_in(epoch))]
    assert all(step.epoch == epoch for step in steps)
    return [item for step in steps for item in step.items.tolist()]


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=120)


@settings(max_examples=150, deadline=None)
@given(
    lengths=LENGTHS,
    batch_size=st.integers(1, 12),
    packing=st.one_of(st.none(), st.tuples(st.integers(32, 90), st.sampled_from([1, 1, 4, 8]))),
    seed=st.integers(0, 2**70),
    shuffle=st.booleans(),
)
def test_every_item_once_per_epoch_and_no_row_overfull(
    lengths: list[int], batch_size: int, packing: tuple[int, int] | None, seed: int, shuffle: bool
) -> None:
    capacity, align = packing or (None, 1)
    plan = Plan(Lengths(lengths), PlanOptions(batch_size, capacity, align, seed, shuffle))
    for epoch in (0, 1, 5):
        assert sorted(epoch_items(plan, epoch)) == list(range(len(lengths)))
    for step in range(plan.steps(2)):
        rows = plan.at(step)
        assert 1 <= len(rows.counts) <= batch_size and rows.counts.sum() == len(rows.items)
        taken = -(-np.array(lengths)[rows.items] // align) * align
        full = np.add.reduceat(taken, np.cumsum(rows.counts) - rows.counts)
        assert (full <= (capacity or 30)).all() and (capacity is not None or (rows.counts == 1).all())


@settings(max_examples=40, deadline=None)
@given(lengths=LENGTHS, batch_size=st.integers(1, 12), capacity=st.sampled_from([None, 40]), seed=st.integers(0, 99))
def test_tails_differ_only_in_the_last_step(
    lengths: list[int], batch_size: int, capacity: int | None, seed: int
) -> None:
    fill, drop, wrap = (
        Plan(Lengths(lengths), PlanOptions(batch_size, capacity, seed=seed, incomplete_step=t)) for t in IncompleteStep
    )
    steps = fill.steps_in(0)
    assert wrap.steps_in(0) == steps
    rows = sum(len(fill.at(step).counts) for step in range(steps))
    if rows < batch_size:
        with pytest.raises(UsageError, match="incomplete_step='drop' leaves no step"):
            drop.steps_in(0)
    else:
        assert drop.steps_in(0) == rows // batch_size
        assert all(same(drop.at(step), fill.at(step)) for step in range(drop.steps_in(0)))
    assert all(same(wrap.at(step), fill.at(step)) for step in range(steps - 1))
    last, again = wrap.at(steps - 1), fill.at(steps - 1)
    assert len(last.counts) == batch_size and last.items[: len(again.items)].tolist() == again.items.tolist()
    start = wrap.at(0).items.tolist()
    assert last.items[len(again.items) :].tolist()[: len(start)] == start[: len(last.items) - len(again.items)]


def same(left: object, right: object) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))  # type: ignore[call-overload]


@pytest.mark.parametrize("capacity", [None, 8192])
def test_step_does_not_depend_on_earlier_calls(capacity: int | None) -> None:
    served = Lengths(chat_like(2000))
    plan = Plan(served, PlanOptions(16, capacity, seed=3))
    far = 1_000_000
    fresh = Plan(served, PlanOptions(16, capacity, seed=3)).at(far)
    for step in range(20):
        plan.at(step)
    assert same(fresh, plan.at(far)) and fresh.epoch == far // plan.steps_in(0)
    assert not np.array_equal(plan.at(0).items, plan.at(plan.steps_in(0)).items), "epochs differ"
    other = Plan(served, PlanOptions(16, capacity, seed=4)).at(0)
    assert not np.array_equal(other.items, plan.at(0).items), "seeds differ"


def test_sequences_in_order_without_shuffling() -> None:
    plan = Plan(Lengths([3] * 10), PlanOptions(4, shuffle=False))
    assert [plan.at(step).items.tolist() for step in range(4)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9], [0, 1, 2, 3]]


@pytest.mark.parametrize(
    ("lengths", "capacity", "batch_size"),
    [(chat_like(100_000), 8192, 64), (reasoning_like(100_000), 16384, 64), (reasoning_like(50_000), 16384, 16)],
)
def test_mean_length_of_a_step_is_as_even_as_in_a_random_partition(
    lengths: Int32, capacity: int, batch_size: int
) -> None:
    plan = Plan(Lengths(lengths), PlanOptions(batch_size, capacity))
    errors = []
    for step in range(plan.steps_in(0) - 1):
        own = lengths[plan.at(step).items]
        errors.append((own.mean() - lengths.mean()) / (lengths.std() / np.sqrt(len(own))))
    assert np.sqrt(np.mean(np.square(errors))) < 1, "a random partition has 1"
    assert np.mean(np.abs(errors) > 3) < 0.0027, "as rare as in a random partition"
    trend = np.corrcoef(np.arange(len(errors)), errors)[0, 1]
    assert abs(trend) < 4 / np.sqrt(len(errors)), "steps are not sorted by length"


def mixture(amounts: tuple[float, float]) -> Mixture:
    rng = np.random.default_rng(0)
    parts = [
        MemoryDataset.of(
            [chat((Role.USER, int(size)), (Role.ASSISTANT, 2), first_id=7 * part) for size in rng.integers(1, 60, 80)]
        )
        for part in range(2)
    ]
    return mix({"a": (parts[0], amounts[0]), "b": (parts[1], amounts[1])}, seed=1)


@pytest.mark.parametrize("amounts", [(1.0, 2.0), (1.0, 0.3), (0.5, 1.7)])
@pytest.mark.parametrize("capacity", [None, 70])
def test_mixture_epochs(amounts: tuple[float, float], capacity: int | None) -> None:
    mixed = mixture(amounts)
    plan = Plan(mixed, PlanOptions(8, capacity, seed=5))
    total = plan.steps(4)
    for epoch in (3, 0, 2, 1):
        assert sorted(epoch_items(plan, epoch)) == sorted(mixed.epoch_indices(epoch).tolist())
    backwards = [Plan(mixed, PlanOptions(8, capacity, seed=5)).at(step) for step in (total - 1, 0)]
    assert same(backwards[0], plan.at(total - 1)) and backwards[0].epoch == 3 and same(backwards[1], plan.at(0))
    assert plan.at(total).epoch == 4


def test_digest_covers_all_settings() -> None:
    base = PlanOptions(8, 100)
    others = [PlanOptions(9, 100), PlanOptions(8), PlanOptions(8, 100, 2), PlanOptions(8, 100, seed=2**65)]
    others += [PlanOptions(8, 100, shuffle=False), PlanOptions(8, 100, incomplete_step=IncompleteStep.WRAP)]
    assert len({plan.digest for plan in (base, *others)}) == 7 and base.digest == PlanOptions(8, 100).digest


def test_the_bytes_of_a_digest_are_pinned() -> None:
    """Loader states and checkpoints store digests: a renamed option must not change them."""
    plan = PlanOptions(12, 8192, align=8, seed=2**65, shuffle=False, incomplete_step=IncompleteStep.WRAP)
    assert plan.digest == "b3-c57e10ed5fe69bdb3264b118e4ea8c66c67b2bcb974460d0c4e53a6ac8e30061"


def test_errors() -> None:
    with pytest.raises(UsageError, match=r"item 1 has 90 tokens, more than capacity=64.*max_length to at most 64"):
        Plan(Lengths([5, 90]), PlanOptions(1, 64))
    with pytest.raises(UsageError, match=r"item 0 has 61 tokens \(64 aligned\).*at most 56"):
        Plan(Lengths([61]), PlanOptions(1, 63, align=8))
    with pytest.raises(ViewError, match="nothing to feed"):
        Plan(Lengths([]), PlanOptions(1))
    with pytest.raises(UsageError, match="pairs can't be packed"):
        Plan(Lengths([[1, 2]]), PlanOptions(1, 64))
    with pytest.raises(IndexError):
        Plan(Lengths([1]), PlanOptions(1)).at(-1)


@pytest.mark.parametrize("capacity", [8192, 100_000])
def test_memory_during_and_after_planning(capacity: int) -> None:
    count = 200_000
    served = Lengths(chat_like(count))
    tracemalloc.start()
    try:
        plan = Plan(served, PlanOptions(64, capacity))
        plan.at(0)
        kept, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept / count < 16 and peak / count < 48 and plan.nbytes <= kept
