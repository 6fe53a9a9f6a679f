"""The runners of one machine: slices run one by one in this process, or in worker processes driven by threads.

An error in one worker stops the others after their current slice; a worker that dies is replaced, and its slices are
retried once. Workers return only counts. A shard is written while the next slice is being prepared.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from functools import cached_property, partial
from itertools import chain
from types import TracebackType
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from penstock.build.progress import SliceReport
from penstock.build.workers.process import DiedError, ForkServer, Task, Worker, died_twice
from penstock.build.workers.runner import OnReport, OnRetry, Setup

if TYPE_CHECKING:
    from penstock.build.slice_job import SliceJob


# ---- overlap ---------------------------------------------------------------------------------------------------------
#
# Overlaps two-step tasks: the second step of each runs in a thread while the first step of the next runs.
#
# A build writes each shard this way while it prepares the next slice.


T = TypeVar("T")
OnResult = Callable[[T], None]


class Overlap(Generic[T]):
    """Runs tasks in order. Results are delivered on the calling thread, each before the next second step starts."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "penstock-overlap")
        self._pending: tuple[Future[T], OnResult[T]] | None = None

    def run(self, begin: Callable[[], Callable[[], T]], on_result: OnResult[T]) -> None:
        """Runs `begin` and submits the function it returns. The previous result is delivered even if `begin` fails."""
        try:
            end = begin()
        finally:
            self.flush()
        self._pending = self._thread.submit(end), on_result

    def flush(self) -> None:
        """Waits for the pending task, and delivers its result or raises its error."""
        pending, self._pending = self._pending, None
        if pending is not None:
            result, on_result = pending
            on_result(result.result())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with self._thread:
            self.flush()


# ---- pool ------------------------------------------------------------------------------------------------------------


class InProcess:
    """Runs slices one by one in this process. The engines are imported and created with the first slice."""

    workers, nodes = 1, 0

    def __init__(self, setup: Setup) -> None:
        self._setup = setup

    @cached_property
    def _job(self) -> SliceJob:
        from penstock.build.slice_job import SliceJob

        setup = self._setup
        return SliceJob(setup.recipe, setup.tokenizer_json, setup.cache, fast=setup.fast, size=setup.size)

    def run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        """Runs all tasks."""
        with Overlap[SliceReport]() as commits:
            for task in tasks:
                reported = replace(task, slice=task.slice.without_data())
                commits.run(partial(self._prepare, task), partial(on_report, reported))

    def _prepare(self, task: Task) -> Callable[[], SliceReport]:
        return self._job.prepare(task.name, task.slice, task.path, task.slice.data)

    def preview(self, rows: Sequence[bytes]) -> str:
        """What to say about both modes of turns, from these rows."""
        return self._job.preview(rows)

    def close(self) -> None:
        """Nothing is left running."""


class WorkerProcesses:
    """Runs slices in worker processes of this machine, each driven by a thread."""

    nodes = 0

    def __init__(self, setup: Setup, workers: int) -> None:
        self._setup = setup
        self.workers = workers
        self._lock = threading.Lock()
        self._servers: list[ForkServer] = []  # the last one is shared by all workers

    def _shared(self) -> ForkServer:
        with self._lock:
            if not self._servers or not self._servers[-1].is_running:
                self._servers.append(ForkServer(self._setup.to_json()))
            return self._servers[-1]

    def _start_worker(self) -> Worker:
        if (worker := self._shared().start_worker()) is not None:
            return worker
        own = ForkServer(self._setup.to_json())
        with self._lock:
            self._servers.insert(0, own)
        worker = own.start_worker()
        assert worker is not None
        return worker

    def run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        """Runs all tasks; the callbacks and the iterator are used under one lock."""
        lock = threading.Lock()
        failures: list[BaseException] = []

        def next_task() -> Task | None:
            with lock:
                return None if failures else next(tasks, None)

        def report(task: Task, found: SliceReport) -> None:
            with lock:
                on_report(task, found)

        def retry(lost: Sequence[Task], how: str) -> None:
            with lock:
                on_retry(lost, how)

        def drive() -> None:
            try:
                with closing(_WorkerSlot(self._start_worker, report, retry)) as slot:
                    while (task := next_task()) is not None:
                        slot.run(task)
                    slot.flush()
            except BaseException as error:
                failures.append(error)

        names = [f"penstock-worker-{number}" for number in range(self.workers)]
        threads = [threading.Thread(target=drive, name=name, daemon=True) for name in names]
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

    def preview(self, rows: Sequence[bytes]) -> str:
        """What to say about both modes of turns, from these rows."""
        with contextlib.suppress(DiedError):
            return self._shared().preview(rows)
        return InProcess(replace(self._setup, size=0)).preview(rows)

    def close(self) -> None:
        """Stops the servers; the workers end with each run."""
        for server in self._servers:
            server.close()


class _WorkerSlot:
    """A worker process that is replaced when it dies; the replacement retries the unfinished slices once."""

    def __init__(self, start: Callable[[], Worker], on_report: OnReport, on_retry: OnRetry) -> None:
        self._start, self._on_report, self._on_retry = start, on_report, on_retry
        self._worker: Worker | None = None

    def run(self, task: Task) -> None:
        """Runs a task. Its report may arrive only with the next task."""
        try:
            self._worker = self._worker or self._start()
            self._report(self._worker.submit(task))
        except DiedError as death:
            self._retry(death, [task] if self._worker is None else list(self._worker.pending))

    def flush(self) -> None:
        """Collects all outstanding reports."""
        if self._worker is not None:
            try:
                self._report(self._worker.flush())
            except DiedError as death:
                self._retry(death, list(self._worker.pending))

    def close(self) -> None:
        """Stops the worker."""
        if self._worker is not None:
            self._worker.stop()
            self._worker = None

    def _report(self, reports: Iterable[tuple[Task, SliceReport]]) -> None:
        for task, report in reports:
            self._on_report(task, report)

    def _retry(self, death: DiedError, pending: Sequence[Task]) -> None:
        """Retries the slices of a dead worker, none if it died after its last report."""
        self.close()
        if pending:
            self._on_retry(pending, str(death))
        for task in pending:  # one by one, to identify the slice that kills the worker
            try:
                self._worker = self._worker or self._start()
                self._report(chain(self._worker.submit(task), self._worker.flush()))
            except DiedError as again:
                raise died_twice(task, str(again)) from None
