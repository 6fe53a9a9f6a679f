"""A worker of the Ray engine: an actor that owns its engines and prepares slices until it is killed.

It takes two slices at a time, so that a shard is written while the next slice is being prepared. Replies are small: the
report of a slice or an error, and the messages that were logged meanwhile. Before the first slice, the worker checks
that its node has the build's cache folder and versions: a wrong node ends the build, before it can write anything.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from penstock.build.recipe import Recipe
from penstock.build.workers.process import ONE_THREAD, failure
from penstock.encode.memory import limit_arenas, map_large_blocks
from penstock.errors import StoreError, WorkerError
from penstock.sources import Slice, TextRows, path_from_json
from penstock.store.beacon import sees_beacon

if TYPE_CHECKING:
    from penstock.build.slices.job import SliceJob

CONCURRENCY = 2  # slices that a worker holds: one is prepared while the previous one is committed
Reply = dict[str, Any]


def versions(recipe: Recipe) -> dict[str, str]:
    """Returns what must be equal on all nodes for a slice to give the same shard everywhere."""
    return {"penstock": version("penstock"), "recipe": recipe.digest}


class RaySlot:
    """The actor. Its methods never raise, so that the driver can tell an error from a lost worker."""

    def __init__(self, setup: dict[str, Any], expected: dict[str, str], beacon: str) -> None:
        self._setup, self._expected, self._beacon = setup, expected, beacon
        self._job: SliceJob | None = None
        self._preparing = threading.Lock()
        self._messages = _Messages()

    def start(self) -> Reply:
        """Checks the node and creates the engines. Replies with the node's id."""
        return self._reply(self._start)

    def prepare(self, slice_: dict[str, Any], path: Any, rows: bytes | None) -> Reply:
        """Prepares and commits a slice; `rows` are its lines if the source is streamed. Replies with its report."""
        return self._reply(lambda: self._prepare(slice_, path, rows))

    def _reply(self, act: Callable[[], Reply]) -> Reply:
        try:
            reply = act()
        except Exception as error:
            reply = failure(error)
        return reply | {"host": socket.gethostname(), "log": self._messages.take()}

    def _start(self) -> Reply:
        os.environ.update(ONE_THREAD)  # before the engines are imported
        map_large_blocks()
        limit_arenas(int(ONE_THREAD["MALLOC_ARENA_MAX"]))  # read from the variable only when a process starts
        from penstock.build.worker import cache_of, open_job

        recipe, cache = Recipe.from_json(self._setup["recipe"]), cache_of(self._setup)
        if (found := versions(recipe)) != self._expected:
            wrong = "Penstock" if found["penstock"] != self._expected["penstock"] else "jinja2 or tokenizers"
            raise WorkerError(f"another version of {wrong} is installed here. Install the same on all nodes.")
        if not cache.is_remote and not sees_beacon(cache.tree, self._beacon):
            raise StoreError(
                f"{cache.root} is not the cache folder of the build here. Choose a folder with --cache that all nodes "
                "mount at the same path."
            )
        self._job = open_job(self._setup)
        import ray

        return {"node": ray.get_runtime_context().get_node_id()}

    def _prepare(self, slice_: dict[str, Any], path: Any, rows: bytes | None) -> Reply:
        assert self._job is not None
        data = None if rows is None else TextRows(rows.split(b"\n"))
        with self._preparing:
            commit = self._job.prepare(Slice.from_json(slice_), path_from_json(path), data)
        return {"report": commit().as_json()}


class _Messages(logging.Handler):
    """Keeps warnings and errors until the next reply takes them to the driver."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._kept: list[tuple[int, str]] = []
        logging.getLogger().addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keeps a message."""
        self._kept.append((record.levelno, record.getMessage()))

    def take(self) -> list[tuple[int, str]]:
        """Returns and forgets the messages."""
        kept, self._kept = self._kept, []
        return kept
