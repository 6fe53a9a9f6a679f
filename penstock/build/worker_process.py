"""The near end of a worker process: tasks in, reports out, and how it died."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

import penstock
from penstock import errors
from penstock.build.progress import SliceReport
from penstock.errors import PenstockError, WorkerError
from penstock.sources import Slice


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


class DiedError(Exception):
    """The process is gone; the text says how."""


def environment() -> dict[str, str]:
    """For processes of ours: this checkout's code, and one thread each."""
    root = str(Path(penstock.__file__).parent.parent)
    path = os.pathsep.join(p for p in (root, os.environ.get("PYTHONPATH", "")) if p)
    one = dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
    return {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "MALLOC_ARENA_MAX": "2", **one}


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.left: deque[Task] = deque()  # sent, and not yet reported
        # Ctrl-C reaches the whole process group. The parent answers it; a worker, which inherits the mask, goes when
        # its input ends, without a traceback.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "penstock.build.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment(),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._first = orjson.dumps(setup) + b"\n"

    def do(self, task: Task) -> Iterator[tuple[Task, SliceReport]]:
        """Send a task. Gives what is reported until the worker is ready for the next one: usually the one before."""
        self.left.append(task)
        data = b"\n".join(task.slice.data.rows if task.slice.data else ())
        header = {"slice": task.slice.to_json(), "path": str(task.path), "bytes": len(data)}
        yield from self._ask(orjson.dumps(header) + b"\n" + data)

    def settle(self) -> Iterator[tuple[Task, SliceReport]]:
        """Have it report all that is left."""
        if self.left:
            yield from self._ask(b"{}\n")

    def _ask(self, request: bytes) -> Iterator[tuple[Task, SliceReport]]:
        try:
            self._send(self._first + request)
            self._first = b""
            while "report" in (reply := self._receive()):
                yield self.left.popleft(), SliceReport(**reply["report"])
        except (BrokenPipeError, ConnectionResetError):
            raise DiedError(self._how()) from None

    def _send(self, data: bytes) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(data)
        self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise DiedError(self._how())
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
