"""Starts worker processes, sends them tasks, receives their reports, and detects how they died.

A *fork server* loads the engines once and forks the workers, which so share their memory and start within milliseconds.
Where a process can't be forked safely (other systems than Linux, or an engine that has started threads), a server
becomes a worker itself, and each worker has its own.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import subprocess
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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
    "JE_ARROW_MALLOC_CONF": "background_thread:false",  # of pyarrow's allocator
    "MALLOC_ARENA_MAX": "2",
}
STOP_SECONDS = 2.0  # before a process that doesn't end by itself is killed
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


class ForkServer:
    """The process that loads the engines and forks the workers. May be used by several threads."""

    def __init__(self, setup: dict[str, Any]) -> None:
        self._lock = threading.Lock()
        self._setup = orjson.dumps(setup) + b"\n"
        self._forks: bool | None = None  # whether it forks workers or becomes one; None before it is ready
        self._is_worker = False
        self._control, other = socket.socketpair()
        # Ctrl-C reaches the whole process group. The parent handles it; a worker inherits the mask and exits without
        # a traceback when its input ends.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with other:
                self._process = subprocess.Popen(
                    child.command("penstock.build.workers.worker"),
                    stdin=other.fileno(),
                    env=child.environment(ONE_THREAD),
                )
        except BaseException:
            self._control.close()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    @property
    def is_running(self) -> bool:
        """Whether the process is still there."""
        return self._process.poll() is None

    def start_worker(self) -> Worker | None:
        """Starts a worker, once the engines are loaded; None if the server has become one.

        Raises DiedError, or the error that loading the engines raised.
        """
        ours, other = socket.socketpair()
        with contextlib.ExitStack() as undo:
            undo.enter_context(ours)
            with self._lock, other:
                self._load()
                if self._is_worker:
                    return None
                self._is_worker = not self._forks
                pid = int(self._ask(b"start\n", other.fileno())["pid"])
            undo.pop_all()
            return Worker(self, ours, pid)

    def preview(self, rows: Sequence[bytes]) -> str:
        """Compares both modes of turns on these rows. Raises DiedError also if the server has become a worker."""
        with self._lock:
            self._load()
            if self._is_worker:
                raise DiedError("it is a worker")
            request = orjson.dumps({"preview": [row.decode("latin-1") for row in rows]})
            return str(self._ask(request + b"\n")["preview"])

    def _load(self) -> None:
        if self._forks is None:
            self._forks = bool(self._ask(self._setup)["forks"])

    def how_ended(self, pid: int) -> str:
        """How a worker ended; it must have closed its connection."""
        if pid != self._process.pid:
            with self._lock:
                try:
                    return _how(int(self._ask(b"wait %d\n" % pid)["code"]))
                except DiedError:
                    return "it ended, and so did the process that had started it"
        return _how(self._process.wait())

    def close(self) -> None:
        """Stops the process. A healthy one exits by itself when its input is closed."""
        self._control.close()
        try:
            self._process.wait(timeout=STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _ask(self, request: bytes, handle: int | None = None) -> dict[str, Any]:
        try:
            if handle is None:
                self._control.sendall(request)
            else:
                socket.send_fds(self._control, [request], [handle])
            reply = b""
            while not reply.endswith(b"\n"):
                if not (part := self._control.recv(1 << 16)):
                    raise DiedError(_how(self._process.wait()))
                reply += part
        except (BrokenPipeError, ConnectionResetError):
            raise DiedError(_how(self._process.wait())) from None
        return _checked(reply)


class Worker:
    """One worker process and the connection to it."""

    def __init__(self, server: ForkServer, connection: socket.socket, pid: int) -> None:
        self.pending: deque[Task] = deque()  # sent, but not reported yet
        self._server, self._connection, self._pid = server, connection, pid
        self._stream = connection.makefile("rwb")

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
            self._stream.write(request)
            self._stream.flush()
            while "report" in (reply := self._receive()):
                yield self.pending.popleft(), SliceReport(**reply["report"])
        except (BrokenPipeError, ConnectionResetError):
            raise DiedError(self._server.how_ended(self._pid)) from None

    def _receive(self) -> dict[str, Any]:
        line = self._stream.readline()
        if not line.endswith(b"\n"):
            raise DiedError(self._server.how_ended(self._pid))
        return _checked(line)

    def stop(self) -> None:
        """Stops the process. A healthy worker exits by itself when its input ends."""
        with contextlib.suppress(OSError), self._connection, self._stream:  # the other end may be closed already
            self._connection.shutdown(socket.SHUT_WR)
            self._connection.settimeout(STOP_SECONDS)
            try:
                while self._connection.recv(1 << 16):
                    pass
            except TimeoutError:
                os.kill(self._pid, signal.SIGKILL)


def _checked(line: bytes) -> dict[str, Any]:
    """A reply, unless it is an error."""
    reply: dict[str, Any] = orjson.loads(line)
    if "error" in reply:
        raise reported_error(reply)
    return reply


def _how(code: int) -> str:
    if code < 0:
        name = signal.Signals(-code).name
        return f"killed by {name}" + (" (often: out of memory)" if name == "SIGKILL" else "")
    return f"exit code {code}"
