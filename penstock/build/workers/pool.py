"""Workers that take slices one by one: in this process, or separate ones driven by a thread each.

Whatever goes wrong in one of them stops the others after their slice; a worker that dies is replaced and its slices
are tried once more. Nothing is returned but counts. A shard is written while the next slice is being prepared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import chain
from typing import TYPE_CHECKING

from penstock.build.progress import SliceReport
from penstock.build.recipe import Recipe
from penstock.build.workers.overlap import Behind
from penstock.build.workers.process import DiedError, Task, Worker
from penstock.errors import WorkerError
from penstock.store.cache import Cache

if TYPE_CHECKING:
    from penstock.build.slices.job import SliceJob


@dataclass(frozen=True, slots=True)
class Setup:
    """What every worker of a build needs."""

    recipe: Recipe
    cache: Cache
    tokenizer_json: bytes
    fast: bool


OnReport = Callable[[Task, SliceReport], None]
OnRetry = Callable[[Task, str], None]


def run_here(job: Callable[[], SliceJob], tasks: Iterator[Task], on_report: OnReport) -> None:
    """Do all tasks in this process, with one job that is made when it is first needed."""
    with Behind[SliceReport]() as behind:
        for task in tasks:
            kept = replace(task, slice=task.slice.without_data())
            behind.do(partial(_make, job, task), partial(on_report, kept))


def _make(job: Callable[[], SliceJob], task: Task) -> Callable[[], SliceReport]:
    return job().make(task.slice, task.path, task.slice.data)


def job_here(setup: Setup) -> Callable[[], SliceJob]:
    """Makes the job of `run_here`, once. Imports the engines only then: a hit does without them."""

    @cache
    def job() -> SliceJob:
        from penstock.build.slices.job import SliceJob

        return SliceJob(setup.recipe, setup.tokenizer_json, setup.cache, fast=setup.fast)

    return job


def run_workers(setup: Setup, tasks: Iterator[Task], count: int, on_report: OnReport, on_retry: OnRetry) -> None:
    """Do all tasks with worker processes; the callbacks and the iterator are used under one lock."""
    lock = threading.Lock()
    failures: list[BaseException] = []

    def next_task() -> Task | None:
        with lock:
            return None if failures else next(tasks, None)

    def report(task: Task, found: SliceReport) -> None:
        with lock:
            on_report(task, found)

    def retry(task: Task, how: str) -> None:
        with lock:
            on_retry(task, how)

    def drive() -> None:
        try:
            with closing(_Seat(setup, report, retry)) as seat:
                while (task := next_task()) is not None:
                    seat.do(task)
                seat.settle()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, name=f"penstock-worker-{n}", daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: let no worker go on
        failures.append(error)
        raise
    if failures:
        raise failures[0]


class _Seat:
    """A worker process, and another in its place when it dies, which does once more what that one left undone."""

    def __init__(self, setup: Setup, on_report: OnReport, on_retry: OnRetry) -> None:
        self._setup, self._on_report, self._on_retry = setup, on_report, on_retry
        self._worker: Worker | None = None

    def do(self, task: Task) -> None:
        """Have a task done; it may be reported only with the next one."""
        self._worker = self._worker or self._new()
        self._have(self._worker.do(task))

    def settle(self) -> None:
        """Have all tasks reported."""
        if self._worker is not None:
            self._have(self._worker.settle())

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _new(self) -> Worker:
        setup, cache = self._setup, self._setup.cache
        where = {"cache": str(cache.root), "trust": cache.trust.value}
        return Worker({"recipe": setup.recipe.as_json(), **where, "fast": setup.fast})

    def _have(self, reports: Iterable[tuple[Task, SliceReport]]) -> None:
        try:
            for task, report in reports:
                self._on_report(task, report)
        except DiedError as death:
            self._begin_again(death)

    def _begin_again(self, death: DiedError) -> None:
        assert self._worker is not None
        left = self._worker.left  # nothing, if it died with its last word
        self._worker.stop()
        self._worker = None
        if left:
            self._on_retry(left[-1], str(death))
        for task in left:  # one by one, so that it is clear of what a worker dies
            self._worker = self._worker or self._new()
            try:
                for _, report in chain(self._worker.do(task), self._worker.settle()):
                    self._on_report(task, report)
            except DiedError as again:
                raise WorkerError(
                    f"a worker died twice on the same slice ({task.place}): {again}. Finished slices stay. "
                    "If it ran out of memory, use fewer --workers or a lower --max-row-bytes."
                ) from None
