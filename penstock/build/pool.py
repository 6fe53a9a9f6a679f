"""Workers that take slices one by one: in this process, or separate ones driven by a thread each.

Whatever goes wrong in one of them stops the others after their slice; a worker that dies is replaced and its slice
tried once more. Nothing is returned but counts.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

import penstock
from penstock import errors
from penstock.build.progress import SliceReport
from penstock.build.recipe import Recipe
from penstock.errors import PenstockError, WorkerError
from penstock.sources import Slice
from penstock.store.cache import Cache

if TYPE_CHECKING:
    from penstock.build.slice_job import SliceJob


@dataclass(frozen=True, slots=True)
class Task:
    """A slice to do, and where it is."""

    name: str  # of its shard
    slice: Slice
    path: Path

    @property
    def place(self) -> str:
        """Where the slice is, for people."""
        return f"{self.path}, rows {self.slice.first_row} to {self.slice.first_row + self.slice.rows - 1}"


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
    """Do all tasks in this process, with one job that is made when it is first needed.

    A shard is written, and waited for, while the next slice is being prepared.
    """
    with ThreadPoolExecutor(1, "penstock-commit") as committing:
        pending: tuple[Task, Future[SliceReport]] | None = None
        for task in tasks:
            made = job().make(task.slice, task.path, task.slice.data)
            if pending is not None:
                on_report(pending[0], pending[1].result())
            pending = task, committing.submit(made)
        if pending is not None:
            on_report(pending[0], pending[1].result())


def job_here(setup: Setup) -> Callable[[], SliceJob]:
    """Makes the job of `run_here`, once. Imports the engines only then: a hit does without them."""

    @cache
    def job() -> SliceJob:
        from penstock.build.slice_job import SliceJob

        return SliceJob(setup.recipe, setup.tokenizer_json, setup.cache, fast=setup.fast)

    return job


def run_workers(setup: Setup, tasks: Iterator[Task], count: int, on_report: OnReport, on_retry: OnRetry) -> None:
    """Do all tasks with worker processes; the callbacks and the iterator are used under one lock."""
    lock = threading.Lock()
    failures: list[BaseException] = []

    def next_task() -> Task | None:
        with lock:
            return None if failures else next(tasks, None)

    def drive() -> None:
        worker: _Worker | None = None
        try:
            while (task := next_task()) is not None:
                worker = worker or _Worker(setup)
                try:
                    report = worker.do(task)
                except _DiedError as death:
                    with lock:
                        on_retry(task, str(death))
                    worker.stop()
                    worker = _Worker(setup)
                    report = _second_try(worker, task)
                with lock:
                    on_report(task, report)
        except BaseException as error:
            failures.append(error)
        finally:
            if worker is not None:
                worker.stop()

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


def _second_try(worker: _Worker, task: Task) -> SliceReport:
    try:
        return worker.do(task)
    except _DiedError as death:
        raise WorkerError(
            f"a worker died twice on the same slice ({task.place}): {death}. Finished slices stay. "
            "If it ran out of memory, use fewer --workers or a lower --max-row-bytes."
        ) from None


class _DiedError(Exception):
    """The process is gone; the text says how."""


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, setup: Setup) -> None:
        root = str(Path(penstock.__file__).parent.parent)
        path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1"}
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "penstock.build.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        message = {"recipe": setup.recipe.as_json(), "cache": str(setup.cache.root), "fast": setup.fast}
        self._first = orjson.dumps(message) + b"\n"

    def do(self, task: Task) -> SliceReport:
        """Send a slice and wait for its report."""
        data = task.slice.data or b""
        header = {"slice": task.slice.to_json(), "path": str(task.path), "bytes": len(data)}
        try:
            if self._first:
                self._send(self._first)
                self._first = b""
                self._receive()
            self._send(orjson.dumps(header) + b"\n" + data)
            return SliceReport(**self._receive()["report"])
        except (BrokenPipeError, ConnectionResetError):
            raise _DiedError(self._how()) from None

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise _DiedError(self._how())
        reply: dict[str, Any] = orjson.loads(line)
        if "error" in reply:
            kind = getattr(errors, reply["kind"], None)
            known = isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not errors.RowError
            raise (kind if known and kind is not None else WorkerError)(reply["error"])
        return reply

    def _how(self) -> str:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
        return f"exit code {code}"

    def stop(self) -> None:
        """End the process; its input ends, so a healthy one goes by itself."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # the other end is gone already
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
