"""Starts a worker process, sends it tasks, receives its reports, and detects how it died."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import traceback
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from penstock import child, errors
from penstock.build.progress import SliceReport
from penstock.errors import PenstockError, WorkerError
from penstock.prepare.sources.remote import SourcePath, path_to_json, printable_name
from penstock.prepare.sources.slices import Slice

ONE_THREAD = {  # variables that keep the engines of a worker to one thread
    **dict.fromkeys(("RAYON_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"),
    "TOKENIZERS_PARALLELISM": "false",
    "MALLOC_ARENA_MAX": "2",
}
OUT_OF_MEMORY = "out of memory, or of processes: use fewer --workers, or raise the limits (ulimit -v, ulimit -u)"


@dataclass(frozen=True, slots=True)
class Task:
    """A slice to prepare, and the file it is in."""

    name: str  # of its shard
    slice: Slice
    path: SourcePath

    @property
    def location(self) -> str:
        """File and rows of the slice, for messages."""
        return f"{self.path}, rows {self.slice.first_row} to {self.slice.first_row + self.slice.rows - 1}"


class DiedError(Exception):
    """The worker process died; the message says how."""


def died_twice(task: Task, how: str) -> WorkerError:
    """The error if the second worker dies on a slice."""
    return WorkerError(
        f"a worker died twice on the same slice ({task.location}): {how}. Finished slices are kept. "
        "If it ran out of memory, use fewer --workers or a lower --max-row-bytes."
    )


def system_failure(error: Exception) -> str | None:
    """Returns what failed and what to check if the system refused a request; None for any other error."""
    match error:
        case MemoryError():
            return f"{OUT_OF_MEMORY}."
        case OSError():
            return _failed_call(error)
        case RuntimeError() if "can't start new thread" in str(error):
            return f"no thread can be started: {OUT_OF_MEMORY}."
        case _:
            return None


def _failed_call(error: OSError) -> str:
    """Only an error that names a file is one of the disk."""
    said = error.strerror or str(error)
    if error.filename is not None:
        is_gone = (
            "Was it renamed or deleted meanwhile?" if error.errno == errno.ENOENT else "Check the disk or file server."
        )
        return f"{printable_name(os.fsdecode(error.filename))}: {said}. {is_gone}"
    match error.errno:
        case errno.ENOMEM | errno.EAGAIN:
            return f"{OUT_OF_MEMORY} ({said})."
        case errno.EMFILE | errno.ENFILE:
            return f"too many files are open ({said}). Raise the limit, for example with ulimit -n 4096."
        case errno.ENOSPC | errno.EDQUOT | errno.EIO | errno.ESTALE:
            return f"a disk or file server failed ({said}). Check it."
        case _:
            return f"the operating system refused a request ({said})."


def failure(error: Exception) -> dict[str, Any]:
    """Returns an error as a worker replies it; `reported_error` is its counterpart."""
    text = str(error) if isinstance(error, PenstockError) else system_failure(error)
    if text is None:
        text = f"{error!r}\n{''.join(traceback.format_exception(error))}"
    return {"error": text, "kind": type(error).__name__}


def reported_error(reply: Mapping[str, Any], where: str = "") -> PenstockError:
    """Returns the error that a worker replied with, as the class it had there. `where` is added to the message."""
    kind = getattr(errors, reply["kind"], None)
    known = isinstance(kind, type) and issubclass(kind, PenstockError) and kind is not errors.RowError
    return (kind if known and kind is not None else WorkerError)(f"{where}{reply['error']}")


class Worker:
    """One worker process and the pipe to it."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self.pending: deque[Task] = deque()  # sent, but not reported yet
        # Ctrl-C reaches the whole process group. The parent handles it; a worker inherits the mask and exits without
        # a traceback when its input ends.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._process = subprocess.Popen(
                child.command("penstock.build.workers.worker"),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=child.environment(ONE_THREAD),
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._first = orjson.dumps(setup) + b"\n"

    def submit(self, task: Task) -> Iterator[tuple[Task, SliceReport]]:
        """Sends a task. Yields reports until the worker is ready for the next task: usually the previous one's."""
        self.pending.append(task)
        data = b"\n".join(task.slice.data.rows if task.slice.data else ())
        header = {"name": task.name, "slice": task.slice.to_json(), "path": path_to_json(task.path), "bytes": len(data)}
        yield from self._request(orjson.dumps(header) + b"\n" + data)

    def flush(self) -> Iterator[tuple[Task, SliceReport]]:
        """Requests all outstanding reports."""
        if self.pending:
            yield from self._request(b"{}\n")

    def _request(self, request: bytes) -> Iterator[tuple[Task, SliceReport]]:
        try:
            self._send(self._first + request)
            self._first = b""
            while "report" in (reply := self._receive()):
                yield self.pending.popleft(), SliceReport(**reply["report"])
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
            raise reported_error(reply)
        return reply

    def _how(self) -> str:
        code = self._process.wait()
        if code < 0:
            name = signal.Signals(-code).name
            return f"killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
        return f"exit code {code}"

    def stop(self) -> None:
        """Stops the process. A healthy worker exits by itself when its input is closed."""
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                try:
                    stream.close()
                except OSError:
                    continue  # the other end is closed already
        try:
            self._process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
