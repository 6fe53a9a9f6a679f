"""The processes that prepare slices: `python -m penstock.build.workers.worker`, and the workers that it forks.

The process reads requests from a socket, its standard input: a line of JSON with the recipe and the cache, to load the
engines; `start` with another socket, to start a worker on it; `wait PID`, for how a worker ended; and rows, to compare
both modes of turns on them. It answers each with a line of JSON.

A worker reads for each slice a line of JSON and, for streamed sources, the slice's bytes; an empty object requests all
outstanding reports. It replies a line of JSON for each finished slice, and one after each request when it is ready for
the next. A shard is written, and then reported, while the next slice is being prepared. Workers are not multiprocessing
children, so a user's script needs no `__main__` guard and notebooks work. All exit when their input ends, so they can't
outlive the process that builds.
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import socket
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from penstock.build.progress import SliceReport
from penstock.build.slice_job import SliceJob
from penstock.build.workers.local import Overlap
from penstock.build.workers.process import failure
from penstock.prepare.encode.process_memory import map_large_blocks
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.remote import path_from_json
from penstock.prepare.sources.slices import Slice, TextRows
from penstock.store.cache import Cache, open_cache


def main() -> None:
    """Loads the engines and starts workers until the input ends."""
    control = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # keeps what libraries print out of the command's output
    map_large_blocks()
    job: SliceJob | None = None
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # the process that builds is gone
        while (request := _request(control))[0]:
            line, handles = request
            if handles:
                assert job is not None
                _start(job, control, socket.socket(fileno=handles[0]))
            elif line.startswith(b"wait"):
                _, status = os.waitpid(int(line.split()[1]), 0)
                _answer(control, {"code": os.waitstatus_to_exitcode(status)})
            elif job is not None:
                rows = [row.encode("latin-1") for row in orjson.loads(line)["preview"]]
                _answer(control, {"preview": job.preview(rows)})
            else:
                try:
                    job = open_job(orjson.loads(line))
                    gc.collect()
                    gc.freeze()  # or the collector of each worker would write to the pages they share
                    _answer(control, {"forks": _can_fork()})
                except Exception as error:
                    _answer(control, failure(error))
    with contextlib.suppress(ChildProcessError):
        while True:  # waits for the workers, whose input has ended as well, so that their time is counted
            os.wait()


def _can_fork() -> bool:
    """Whether this process can be forked safely: a thread of an engine would be missing in the workers."""
    return sys.platform == "linux" and len(list(Path("/proc/self/task").iterdir())) == 1


def _start(job: SliceJob, control: socket.socket, connection: socket.socket) -> None:
    """Starts a worker: forks it, or becomes one."""
    forks = _can_fork()
    pid = os.fork() if forks else os.getpid()
    if pid:
        _answer(control, {"pid": pid})
    if pid and forks:
        connection.close()
        return
    control.close()
    try:
        with connection.makefile("rwb") as stream:
            _work(job, stream)
        os._exit(0)  # everything is written; tearing down the engines would only keep the parent waiting
    except (BrokenPipeError, ConnectionResetError):
        os._exit(0)  # the parent is gone, before it read the last answer
    except BaseException:
        traceback.print_exc()
        os._exit(1)


def _work(job: SliceJob, stream: io.BufferedRWPair[Any, Any]) -> None:
    """Prepares slices until the input ends."""
    try:
        with Overlap[SliceReport]() as commits:
            while (task := _read(stream)) is not None:
                if task:
                    data = TextRows(stream.read(task["bytes"]).split(b"\n")) if task["bytes"] else None
                    slice_, path = Slice.from_json(task["slice"]), path_from_json(task["path"])
                    commits.run(
                        partial(job.prepare, task["name"], slice_, path, data),
                        lambda report: _reply(stream, {"report": report.as_json()}),
                    )
                else:
                    commits.flush()
                _reply(stream, {"ready": True})
    except (BrokenPipeError, ConnectionResetError):
        return  # the parent is gone
    except Exception as error:
        with contextlib.suppress(OSError):  # the parent is gone, or stops after another worker's error
            _reply(stream, failure(error))


def cache_of(setup: dict[str, Any]) -> Cache:
    """Opens the cache of a build in a worker, which `Setup.to_json` describes."""
    return open_cache(*setup["cache"])


def open_job(setup: dict[str, Any]) -> SliceJob:
    """Creates the engines of a worker from its settings."""
    cache = cache_of(setup)
    tokenizer_json = cache.tokenizer_json(setup["recipe"]["tokenizer"])
    return SliceJob(Recipe.from_json(setup["recipe"]), tokenizer_json, cache, fast=setup["fast"], size=setup["size"])


def _read(stream: io.BufferedRWPair[Any, Any]) -> dict[str, Any] | None:
    line = stream.readline()
    return orjson.loads(line) if line else None


def _reply(stream: io.BufferedRWPair[Any, Any], value: dict[str, Any]) -> None:
    stream.write(orjson.dumps(value) + b"\n")
    stream.flush()


def _request(control: socket.socket) -> tuple[bytes, list[int]]:
    """The next request and the sockets sent with it; nothing at the end of the input."""
    request, handles = b"", list[int]()
    while not request.endswith(b"\n"):
        part, found, _, _ = socket.recv_fds(control, 1 << 16, 1)
        if not part:
            return b"", handles
        request += part
        handles += found
    return request, handles


def _answer(control: socket.socket, value: dict[str, Any]) -> None:
    control.sendall(orjson.dumps(value) + b"\n")


if __name__ == "__main__":
    main()
    os._exit(0)
