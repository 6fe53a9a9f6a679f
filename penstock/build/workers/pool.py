"""Runs slices one by one in this process, or in worker processes that are each driven by a thread.

An error in one worker stops the others after their current slice; a worker that dies is replaced, and its slices are
retried once. Workers return only counts. A shard is written while the next slice is being prepared.
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
from penstock.build.workers.overlap import Overlap
from penstock.build.workers.process import DiedError, Task, Worker
from penstock.errors import WorkerError
from penstock.store.cache import Cache

if TYPE_CHECKING:
    from penstock.build.slices.job import SliceJob


@dataclass(frozen=True, slots=True)
class Setup:
    """The settings that all workers of a build share."""

    recipe: Recipe
    cache: Cache
    tokenizer_json: bytes
    fast: bool


OnReport = Callable[[Task, SliceReport], None]
OnRetry = Callable[[Task, str], None]


def run_in_process(job: Callable[[], SliceJob], tasks: Iterator[Task], on_report: OnReport) -> None:
    """Runs all tasks in this process, with a job that is created on first use."""
    with Overlap[SliceReport]() as commits:
        for task in tasks:
            reported = replace(task, slice=task.slice.without_data())
            commits.run(partial(_prepare, job, task), partial(on_report, reported))


def _prepare(job: Callable[[], SliceJob], task: Task) -> Callable[[], SliceReport]:
    return job().prepare(task.slice, task.path, task.slice.data)


def lazy_job(setup: Setup) -> Callable[[], SliceJob]:
    """Returns a function that creates the job of `run_in_process` once. The engines are imported only then."""

    @cache
    def job() -> SliceJob:
        from penstock.build.slices.job import SliceJob

        return SliceJob(setup.recipe, setup.tokenizer_json, setup.cache, fast=setup.fast)

    return job


def run_workers(setup: Setup, tasks: Iterator[Task], count: int, on_report: OnReport, on_retry: OnRetry) -> None:
    """Runs all tasks in worker processes; the callbacks and the iterator are used under one lock."""
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
            with closing(_WorkerSlot(setup, report, retry)) as slot:
                while (task := next_task()) is not None:
                    slot.run(task)
                slot.flush()
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=drive, name=f"penstock-worker-{n}", daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    try:
        for thread in threads:
            thread.join()
    except BaseException as error:  # an interrupt: stop all workers
        failures.append(error)
        raise
    if failures:
        raise failures[0]


class _WorkerSlot:
    """A worker process that is replaced when it dies; the replacement retries the unfinished slices once."""

    def __init__(self, setup: Setup, on_report: OnReport, on_retry: OnRetry) -> None:
        self._setup, self._on_report, self._on_retry = setup, on_report, on_retry
        self._worker: Worker | None = None

    def run(self, task: Task) -> None:
        """Runs a task. Its report may arrive only with the next task."""
        self._worker = self._worker or self._start()
        self._collect(self._worker.submit(task))

    def flush(self) -> None:
        """Collects all outstanding reports."""
        if self._worker is not None:
            self._collect(self._worker.flush())

    def close(self) -> None:
        if self._worker is not None:
            self._worker.stop()

    def _start(self) -> Worker:
        setup = self._setup
        return Worker({"recipe": setup.recipe.as_json(), "cache": list(setup.cache.place), "fast": setup.fast})

    def _collect(self, reports: Iterable[tuple[Task, SliceReport]]) -> None:
        try:
            for task, report in reports:
                self._on_report(task, report)
        except DiedError as death:
            self._retry(death)

    def _retry(self, death: DiedError) -> None:
        assert self._worker is not None
        pending = self._worker.pending  # empty if it died after its last report
        self._worker.stop()
        self._worker = None
        if pending:
            self._on_retry(pending[-1], str(death))
        for task in pending:  # one by one, to identify the slice that kills the worker
            self._worker = self._worker or self._start()
            try:
                for _, report in chain(self._worker.submit(task), self._worker.flush()):
                    self._on_report(task, report)
            except DiedError as again:
                raise WorkerError(
                    f"a worker died twice on the same slice ({task.location}): {again}. Finished slices are kept. "
                    "If it ran out of memory, use fewer --workers or a lower --max-row-bytes."
                ) from None
