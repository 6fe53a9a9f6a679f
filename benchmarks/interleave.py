"""Interleaves jobs: each runs for a moment while all others are stopped, so that all see the same noise.

    python -m benchmarks.interleave prepare FILE TOKENIZER CACHE WORKERS WARM | loop COUNT

A job is one or more processes (with their children). Each prints its progress twice: once warm, and at the end. The
progress in between, divided by the job's running time in between, is its rate.
"""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
MOMENT = 0.25  # seconds

Command = Sequence[str]


class InterleavedJob:
    """Processes that are stopped unless it is their turn."""

    def __init__(self, commands: Sequence[Command]) -> None:
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.interleave", *command],
                stdout=subprocess.PIPE, cwd=ROOT, start_new_session=True,
            )
            for command in commands
        ]  # fmt: skip
        self._signal(signal.SIGSTOP)
        self._selector = selectors.DefaultSelector()
        self._seen: dict[int, list[tuple[float, float]]] = {}  # by process: its running time and progress
        for process in self._processes:
            assert process.stdout is not None
            self._selector.register(process.stdout, selectors.EVENT_READ, process)
            self._seen[process.pid] = []
        self._time = 0.0

    @property
    def is_done(self) -> bool:
        return all(len(seen) == 2 for seen in self._seen.values())

    def advance(self) -> None:
        """Runs for a moment."""
        begin = time.perf_counter()
        self._signal(signal.SIGCONT)
        end = begin + MOMENT
        while (left := end - time.perf_counter()) > 0 and not self.is_done:
            for key, _ in self._selector.select(left):
                line = key.fileobj.readline()  # type: ignore[union-attr]
                if not line:
                    raise RuntimeError(f"a job ended with exit code {key.data.wait()}")
                self._seen[key.data.pid].append((self._time + time.perf_counter() - begin, float(line)))
                if len(self._seen[key.data.pid]) == 2:
                    self._selector.unregister(key.fileobj)
        self._signal(signal.SIGSTOP)
        self._time += time.perf_counter() - begin

    @property
    def rate(self) -> float:
        """Progress per second of all processes, from when all were warm until all were done."""
        first, last = zip(*self._seen.values(), strict=True)
        return sum(b[1] - a[1] for a, b in zip(first, last, strict=True)) / (
            max(time for time, _ in last) - max(time for time, _ in first)
        )

    def close(self) -> None:
        self._signal(signal.SIGKILL)
        for process in self._processes:
            process.communicate()

    def _signal(self, number: int) -> None:
        for process in self._processes:
            if process.poll() is None:
                os.killpg(process.pid, number)


def rates(commands: Mapping[str, Sequence[Command]]) -> dict[str, float]:
    """The rates of jobs, by name."""
    jobs = {name: InterleavedJob(own) for name, own in commands.items()}
    try:
        while not all(job.is_done for job in jobs.values()):
            for job in jobs.values():
                if not job.is_done:
                    job.advance()
        return {name: job.rate for name, job in jobs.items()}
    finally:  # never leave stopped processes behind
        for job in jobs.values():
            job.close()


def report_progress(how_far: float) -> None:
    print(how_far, flush=True)


def prepare(file: str, tokenizer: str, cache: str, workers: str, warm: str) -> None:
    """Prepares a file; warm after `warm` bytes."""
    import penstock as ps

    seen: list[int] = []

    def on_progress(progress: Any) -> None:
        if progress.bytes_seen >= float(warm):
            if not seen:
                report_progress(progress.bytes_seen)
            seen[:] = [progress.bytes_seen]

    ps.prepare(
        file, tokenizer=tokenizer, cache=cache, workers=workers, dropped_tool_calls="keep", on_bad_row="quarantine",
        on_progress=on_progress,
    )  # fmt: skip
    report_progress(seen[0])


def loop(count: str) -> None:
    """Runs a pure CPU loop."""
    report_progress(0)
    total = 0
    for number in range(int(count)):
        total += number & 7
    report_progress(float(count))


def main() -> None:
    {"prepare": prepare, "loop": loop}[sys.argv[1]](*sys.argv[2:])


if __name__ == "__main__":
    main()
