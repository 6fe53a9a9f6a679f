"""The loader: prefetching, resuming, ranks and tails don't change the rows of a step."""

from __future__ import annotations

import gc
import json
import pickle
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from penstock.errors import FeedError, UsageError
from penstock.load.collate import Batch
from penstock.load.loader import Loader
from penstock.load.view import Served
from tests.support.feed_data import mixture, pair_view, plain, plains, view

KINDS: dict[str, tuple[Callable[[], Served], dict[str, Any]]] = {
    "padded": (view, {"batch_size": 5}),
    "padded left": (view, {"batch_size": 5, "padding_side": "left", "pad_to_multiple_of": 8}),
    "sequential": (view, {"batch_size": 5, "shuffle": False}),
    "micro-batches": (view, {"batch_size": 10, "micro_batch": 3, "rank": 1, "world_size": 2}),
    "packed": (view, {"batch_size": 3, "collate": "packed", "capacity": 100}),
    "packed, aligned": (
        view,
        {"batch_size": 3, "collate": "packed", "capacity": 104, "align": 8, "pad_to_capacity": True},
    ),
    "packed micro-batches": (
        view,
        {"batch_size": 6, "collate": "packed", "micro_batch": 2, "rank": 0, "world_size": 2},
    ),
    "pairs": (pair_view, {"batch_size": 4}),
    "mixture": (mixture, {"batch_size": 5}),
    "packed mixture": (mixture, {"batch_size": 2, "collate": "packed", "capacity": 90}),
    "wrap": (view, {"batch_size": 5, "incomplete_step": "wrap"}),
    "drop": (view, {"batch_size": 5, "incomplete_step": "drop"}),
}


def kinds(*names: str) -> Any:
    return pytest.mark.parametrize(
        ("make", "options"), [KINDS[name] for name in names or KINDS], ids=names or list(KINDS)
    )


def threads() -> int:
    return sum(thread.name == "penstock-prefetch" for thread in threading.enumerate())


@pytest.fixture(autouse=True)
def no_thread_is_left() -> object:
    yield
    if threads():
        gc.collect()
    assert threads() == 0


@kinds()
def test_prefetching_changes_nothing_over_three_epochs(make: Callable[[], Served], options: dict[str, Any]) -> None:
    serial = plains(Loader(make(), epochs=3, seed=7, prefetch=0, **options))
    assert serial[-1]["where"][1] == 2 and len(serial) == len(Loader(make(), epochs=3, seed=7, **options))
    for ahead in (1, 8):
        assert plains(Loader(make(), epochs=3, seed=7, prefetch=ahead, **options)) == serial
    half = Loader(make(), epochs=3, seed=7, prefetch=0, **options)
    assert [plain(half.batch(*divmod(index, half.micros))) for index in range(len(half))] == serial


@kinds()
def test_restoring_at_every_batch_continues_byte_by_byte(make: Callable[[], Served], options: dict[str, Any]) -> None:
    served = make()
    run = Loader(served, epochs=2, seed=3, prefetch=2, **options)
    whole: list[dict[str, Any]] = []
    states = [run.state_dict()]
    for batch in run:
        whole.append(plain(batch))
        states.append(run.state_dict())
    for at, state in enumerate(states):
        for ahead in (0, 1, 8) if at % 7 == 3 else (1,):
            resumed = Loader(served, epochs=2, seed=3, prefetch=ahead, **options)
            resumed.load_state_dict(json.loads(json.dumps(state)))
            assert resumed.state_dict() == state
            assert plains(resumed) == whole[at:]


@pytest.mark.parametrize("count", [37, 40, 3])
@pytest.mark.parametrize("tail", ["fill", "wrap"])
@pytest.mark.parametrize("packing", [{}, {"collate": "packed", "capacity": 100}], ids=["padded", "packed"])
def test_the_rows_of_a_step_do_not_depend_on_the_ranks(count: int, tail: str, packing: dict[str, Any]) -> None:
    served = view(count)
    runs = {}
    for world_size in (1, 2, 4, 8):
        for micro_batch in (None, 1, 3):
            options = {
                "batch_size": 8,
                "epochs": 2,
                "incomplete_step": tail,
                "world_size": world_size,
                "prefetch": 0,
                **packing,
            }
            ranks = [list(Loader(served, rank=rank, micro_batch=micro_batch, **options)) for rank in range(world_size)]
            assert len({len(rank) for rank in ranks}) == 1
            places = {(tuple(b.step for b in rank), tuple(b.micro for b in rank)) for rank in ranks}
            assert len(places) == 1, "all ranks do the same number of batches in every step"
            runs[world_size, micro_batch] = [step_rows(ranks, step) for step in range(ranks[0][-1].step + 1)]
    assert all(run == runs[1, None] for run in runs.values())
    served_rows = sum(runs[1, None][: len(runs[1, None]) // 2], Counter())
    assert {row[:2] for row in served_rows} == {(0, row) for row in range(count)}


def step_rows(ranks: list[list[Batch]], step: int) -> Counter[tuple[int, int]]:
    return Counter(row for rank in ranks for batch in rank if batch.step == step for row in batch.rows)


def test_three_sequences_on_eight_ranks() -> None:
    served = view(3)
    ranks = [list(Loader(served, batch_size=3, rank=rank, world_size=8, framework="numpy")) for rank in range(8)]
    assert [len(rank) for rank in ranks] == [1] * 8
    assert sorted(row for rank in ranks for row in rank[0].rows) == [(0, 0), (0, 1), (0, 2)]
    for (batch,) in ranks:
        assert batch.tensors["input_ids"].shape[0] == 1 and batch.tensors["attention_mask"].any()
        assert batch.counts.filler_rows == 1 - len(batch.rows)
        assert batch.rows or (batch.tensors["labels"] == -100).all()
    packed = [list(Loader(served, batch_size=8, collate="packed", rank=rank, world_size=8)) for rank in range(8)]
    assert all(len(rank) == 1 and rank[0].tensors["input_ids"].shape[1] >= 1 for rank in packed)


def test_uneven_shares_get_filler_rows() -> None:
    served = view(10)
    ranks = [list(Loader(served, batch_size=5, rank=rank, world_size=2)) for rank in range(2)]
    assert [[batch.tensors["input_ids"].shape[0] for batch in rank] for rank in ranks] == [[3, 3], [3, 3]]
    assert sum(batch.counts.filler_rows for rank in ranks for batch in rank) == 2


def test_tails() -> None:
    served = view(12)
    sizes = {
        tail: [
            (len(b.rows), b.tensors["input_ids"].shape[0], b.counts.filler_rows)
            for b in Loader(served, batch_size=5, incomplete_step=tail)
        ]
        for tail in ("fill", "drop", "wrap")
    }
    assert sizes["fill"] == [(5, 5, 0), (5, 5, 0), (2, 5, 3)]
    assert sizes["drop"] == [(5, 5, 0)] * 2
    assert sizes["wrap"] == [(5, 5, 0)] * 3
    first, *_, last = Loader(served, batch_size=5, incomplete_step="wrap")
    assert last.rows[2:] == first.rows[:3]


def test_evaluation_serves_every_row_once_in_order_every_time() -> None:
    served = view()
    evaluation = Loader(served, batch_size=8, shuffle=False)
    for _ in range(2):
        assert [row for batch in evaluation for row in batch.rows] == [(0, row) for row in range(37)]


def test_a_run_limited_by_steps_crosses_epochs() -> None:
    loader = Loader(view(10), batch_size=4, steps=7)
    assert [(batch.step, batch.epoch) for batch in loader] == [(0, 0), (1, 0), (2, 0), (3, 1), (4, 1), (5, 1), (6, 2)]
    assert len(loader) == loader.steps == 7


def test_batch_counts() -> None:
    served = view()
    for batch in Loader(served, batch_size=4, collate="packed", capacity=100, pad_to_multiple_of=16):
        tensors = batch.tensors
        assert batch.counts.tokens + batch.counts.padding == tensors["input_ids"].size
        assert batch.counts.trained == int((tensors["labels"] != -100).sum())
        assert batch.counts.sequences == len(batch.items) == len(batch.rows)
        assert [served.example(int(item)).row for item in batch.items] == list(batch.rows)
        assert set(batch.inputs) == set(tensors) - {"loss_weights"} | {"use_cache"} and batch.ends_step
    assert "loss_weights" not in Loader(served, batch_size=4, loss_weights=False).batch(0).tensors


def test_every_token_once_and_labels_never_cross_sequences() -> None:
    served = view()
    seen: Counter[int] = Counter()
    for batch in Loader(served, batch_size=2, collate="packed", capacity=104, align=8, pad_to_capacity=True, pad_id=0):
        ids, labels, bounds = (batch.tensors[name] for name in ("input_ids", "labels", "cu_seq_lens_q"))
        assert (labels[0, bounds[:-1]] == -100).all() and bounds[-1] == ids.shape[1] == 2 * 104
        assert (np.diff(bounds) % 8 == 0).all()
        assert ((labels == -100) | (labels == ids)).all()
        for item, first in zip(batch.items, bounds, strict=False):
            example = served.example(int(item))
            assert np.array_equal(ids[0, first : first + len(example)], example.input_ids)
        seen.update(ids[ids != 0].tolist())
    assert seen == Counter(
        token for number in range(len(served)) for token in served.example(number).input_ids.tolist()
    )


def test_a_run_resumes_with_another_world_size_and_prefetch_depth() -> None:
    served = view()
    options: dict[str, Any] = {"batch_size": 8, "epochs": 2, "collate": "packed", "capacity": 100}
    whole = list(Loader(served, **options))
    run = Loader(served, rank=1, world_size=2, **options)
    feed = iter(run)
    next(feed), next(feed)
    state = run.state_dict()
    run.close()
    resumed = [Loader(served, rank=rank, world_size=4, prefetch=0, **options) for rank in range(4)]
    for loader in resumed:
        loader.load_state_dict(state)
    ranks = [list(loader) for loader in resumed]
    for at, batch in enumerate(whole[2:]):
        assert step_rows(ranks, at + 2) == Counter(batch.rows)


def test_states_of_other_runs_are_refused() -> None:
    served = view()
    state = Loader(served, batch_size=4).state_dict()
    with pytest.raises(FeedError, match=r"belongs to another dataset \(b3-\w+\)\. Open the loader"):
        Loader(view(36), batch_size=4).load_state_dict(state)
    with pytest.raises(FeedError) as caught:
        Loader(view(max_length=30, train_on="all_tokens"), batch_size=4).load_state_dict(state)
    assert str(caught.value) == (
        "the state belongs to another view: it was saved with train_on='all_assistant_messages', max_length=64, and "
        "this loader has train_on='all_tokens', max_length=30. Open the loader with the settings of the run that saved "
        "it, or start a new run."
    )
    packed = r"collate='padded', capacity=None, and this loader has collate='packed', capacity=50"
    for options, named in (
        ({"batch_size": 5}, "batch_size=4, and this loader has batch_size=5"),
        ({"batch_size": 4, "seed": 1}, "seed=0, and this loader has seed=1"),
        ({"batch_size": 4, "collate": "packed", "capacity": 50}, packed),
    ):
        with pytest.raises(FeedError, match=f"belongs to another plan: it was saved with {named}"):
            Loader(served, **options).load_state_dict(state)  # type: ignore[arg-type]
    older = {name: value for name, value in state.items() if name != "settings"}
    with pytest.raises(FeedError, match=r"belongs to another plan \(collate, batch_size, "):
        Loader(served, batch_size=5).load_state_dict(older)
    Loader(served, batch_size=4).load_state_dict(older)
    with pytest.raises(FeedError, match="not a loader state: dataset"):
        Loader(served, batch_size=4).load_state_dict({"step": 3})
    for wrong in (5, None, "state", [state], b"", 0.5):
        with pytest.raises(
            FeedError, match=r"not a loader state: .* is no mapping. Use what `state_dict\(\)` returned"
        ):
            Loader(served, batch_size=4).load_state_dict(wrong)  # type: ignore[arg-type]
    for damaged in ({"micro": 7}, {"step": "3"}, {"step": -1}, {"micros": "2"}, {"step": None}, {"micro": True}):
        with pytest.raises(FeedError, match="the state is damaged"):
            Loader(served, batch_size=4).load_state_dict({**state, **damaged})
    with pytest.raises(FeedError, match="version 2"):
        Loader(served, batch_size=4).load_state_dict({**state, "version": 2})
    with pytest.raises(FeedError, match="step 11 is beyond this run's 10 steps"):
        Loader(served, batch_size=4).load_state_dict({**state, "step": 11})
    mixed = Loader(mixture(), batch_size=4)
    with pytest.raises(FeedError, match="another dataset"):
        mixed.load_state_dict(state)
    assert set(mixed.state_dict()["dataset"]) == {"left", "right"}


def test_a_state_inside_a_step_needs_the_same_micro_batches() -> None:
    served = view()
    run = Loader(served, batch_size=8, micro_batch=2)
    next(iter(run))
    state = run.state_dict()
    assert (state["step"], state["micro"]) == (0, 1)
    with pytest.raises(FeedError, match="is inside step 0, after 1 of 4 micro-batches on 1 ranks"):
        Loader(served, batch_size=8, micro_batch=4).load_state_dict(state)
    with pytest.raises(FeedError, match="Save states between steps"):
        Loader(served, batch_size=8, micro_batch=2, rank=0, world_size=2).load_state_dict(state)


def test_prefetched_batches_do_not_count_in_a_state() -> None:
    run = Loader(view(), batch_size=4, prefetch=8)
    feed = iter(run)
    assert run.state_dict()["step"] == 0
    next(feed)
    assert run.state_dict()["step"] == 1
    run.close()


def test_each_iteration_restarts_and_seek_applies_to_the_next_one() -> None:
    run = Loader(view(), batch_size=4)
    assert next(iter(run)).step == next(iter(run)).step == 0
    run.seek(6)
    assert [batch.step for batch in run] == [6, 7, 8, 9]
    assert next(batch.step for batch in run) == 0
    run.seek(10)
    assert list(run) == [] and run.state_dict()["step"] == 10
    feed = iter(run)
    next(feed)
    run.seek(3)
    with pytest.raises(FeedError, match="closed"):
        next(feed)


class Broken(Exception):
    """Raised by a producer in a test."""


def break_at(run: Loader, index: int) -> None:
    make = run._assemble.__call__

    def assemble(at: int) -> Batch:
        if at == index:
            raise Broken
        return make(at)

    run._assemble = type("Breaks", (), {"__call__": staticmethod(assemble), "micros": 1, "plan": run.plan})()  # type: ignore[assignment]


@pytest.mark.parametrize("ahead", [0, 2])
def test_an_iterator_shared_by_threads_is_refused(ahead: int) -> None:
    run = Loader(view(), batch_size=4, prefetch=ahead)
    make, begun, go = run._assemble.__call__, threading.Event(), threading.Event()

    def assemble(at: int) -> Batch:
        begun.set()
        assert go.wait(60)
        return make(at)

    run._assemble = type("Waits", (), {"__call__": staticmethod(assemble), "micros": 1, "plan": run.plan})()  # type: ignore[assignment]
    feed, steps = iter(run), []
    other = threading.Thread(target=lambda: steps.append(next(feed).step))
    other.start()
    assert begun.wait(60)
    while not feed._busy.locked():  # with a prefetching thread, the batch is begun before it is asked for
        time.sleep(0.001)
    with pytest.raises(FeedError, match=r"two threads called next\(\) on one iterator.*its own iter\(loader\)"):
        next(feed)
    go.set()
    other.join()
    assert steps == [0] and [batch.step for batch in feed] == list(range(1, len(run)))  # the iterator lost nothing


@pytest.mark.parametrize("ahead", [0, 1, 8])
def test_collate_errors_reach_the_loop_at_their_step(ahead: int) -> None:
    run = Loader(view(), batch_size=4, prefetch=ahead)
    break_at(run, 3)
    steps = []
    with pytest.raises(Broken):
        for batch in run:
            steps.append(batch.step)
    assert steps == [0, 1, 2] and run.state_dict()["step"] == 3


def test_an_error_in_the_loop_takes_precedence() -> None:
    run = Loader(view(), batch_size=4, prefetch=8)
    break_at(run, 1)
    with pytest.raises(ZeroDivisionError), run:
        for batch in run:
            _ = 1 // batch.step


@pytest.mark.parametrize("ahead", [0, 2])
def test_a_batch_of_another_step_is_never_served(ahead: int) -> None:
    run = Loader(view(), batch_size=4, prefetch=ahead)
    make = run._assemble.__call__
    run._assemble = type(
        "Slips", (), {"__call__": staticmethod(lambda at: make(at + (at == 2))), "micros": 1, "plan": run.plan}
    )()  # type: ignore[assignment]
    feed = iter(run)
    assert [next(feed).step, next(feed).step] == [0, 1]
    with pytest.raises(FeedError, match="batch 2 was requested but step 3"):
        next(feed)
    assert threads() == 0, "an error ends the thread at once"
    with pytest.raises(FeedError, match="closed"):
        next(feed)


def test_an_exhausted_iteration_stays_exhausted() -> None:
    feed = iter(Loader(view(4), batch_size=4))
    assert len(list(feed)) == 1
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(feed)
    assert threads() == 0 and feed._prefetcher._shared.produce is None, "and releases the view"


@kinds("padded", "packed mixture", "pairs")
def test_loaders_pickle_with_their_position(make: Callable[[], Served], options: dict[str, Any]) -> None:
    run = Loader(make(), epochs=2, **options)
    run.seek(2)
    copy = pickle.loads(pickle.dumps(run))
    assert isinstance(copy, Loader) and plains(copy) == plains(run)


def test_the_default_capacity_is_the_max_length() -> None:
    assert Loader(view(), batch_size=2, collate="packed").settings.capacity == 64
    with pytest.raises(UsageError, match="packing needs a capacity"):
        Loader(view(max_length=None), batch_size=2, collate="packed")
    with pytest.raises(UsageError, match="packing needs a capacity"):
        Loader(mixture(), batch_size=2, collate="packed")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "needs batch_size"),
        ({"batch_size": 0}, "batch_size=0 is not possible. Use an integer of 1 or more"),
        ({"batch_size": True}, "batch_size=True"),
        ({"batch_size": 2, "batchsize": 3}, "unknown option 'batchsize'. Did you mean 'batch_size'?"),
        ({"batch_size": 2, "collate": "packd"}, "collate='packd' is unknown; did you mean 'packed'?"),
        ({"batch_size": 2, "collate": "pairs"}, "the view serves single examples. Use padded, packed or tree"),
        ({"batch_size": 2, "capacity": 9}, "capacity and align apply to packed rows"),
        ({"batch_size": 2, "epochs": 1, "steps": 2}, "epochs=1 and steps=2 both set the length of the run"),
        ({"batch_size": 2, "rank": 2, "world_size": 2}, "rank=2 of world_size=2"),
        ({"batch_size": 2, "pin_memory": True}, "Add framework='torch'"),
        ({"batch_size": 2, "pad_to_capacity": True}, "pad_to_capacity applies to packed rows"),
        ({"batch_size": 2, "shuffle": 1}, "shuffle=1 is neither True nor False"),
        ({"batch_size": 2, "incomplete_step": "cut"}, "incomplete_step='cut' is unknown. Use one of: fill, drop, wrap"),
        ({"batch_size": 2, "collate": "packed", "capacity": 20}, "more than capacity=20"),
    ],
)
def test_wrong_options(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Loader(view(), **options)
    assert message in str(caught.value)


def test_pairs_are_only_collated_as_pairs() -> None:
    with pytest.raises(UsageError, match=r"the view serves preference pairs\. Use pairs"):
        Loader(pair_view(), batch_size=2, collate="padded")
    assert Loader(pair_view(), batch_size=2).batch(0).tensors["input_ids"].shape[0] == 4
