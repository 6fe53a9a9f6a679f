"""The runner of a cluster: slices run in Ray actors, one for each slot.

The driver finds and claims slices, hands each to the next worker with room, and counts. Only counts come back; with a
task goes the slice's place in its file, or its rows if the source is streamed. A worker holds at most two slices, so
the driver's memory doesn't depend on the number of slices, and a slow node gets few of them.

A lost worker's slices go to the others at once. Its replacement starts working when the cluster has room for it, and
nothing waits for that. A slice whose worker dies is retried alone on a worker, once; losing a node is no fault of
the slices on it. Actors end with the driver. If the driver dies, its claims expire and the same command resumes.
"""

from __future__ import annotations

import contextlib
import logging
import re
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.build.progress import SliceReport
from penstock.build.workers.local import InProcess
from penstock.build.workers.process import ONE_THREAD, Task, died_twice, failure, reported_error
from penstock.build.workers.ray_cluster import RayCluster, require_ray
from penstock.build.workers.runner import WORKER_BYTES, OnReport, OnRetry, Setup
from penstock.errors import PenstockError, StoreError, WorkerError
from penstock.prepare.encode.process_memory import map_large_blocks
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.remote import path_from_json, path_to_json
from penstock.prepare.sources.slices import Slice, TextRows
from penstock.store.local import LocalStorage
from penstock.store.storage import temporary_name

if TYPE_CHECKING:
    from penstock.build.slice_job import SliceJob


WAIT = 5.0  # seconds between looks at the cluster while nothing happens
GROW_EVERY = 10.0  # seconds between looks for nodes that have joined
SAY_AFTER, GIVE_UP_AFTER = 15.0, 600.0  # seconds without any worker
STARTS = 3  # attempts to start a worker on nodes that stay alive, in a row
# Slices are prepared in threads of Ray's, which would have arenas of their own. Those return large blocks to the system
# after every slice, and get them again page by page.
VARIABLES = {**ONE_THREAD, "MALLOC_ARENA_MAX": "1"}
BEACON_PAUSES = (0.0, 0.5, 2.0, 5.0)  # seconds; an NFS client may see another host's new files with a delay

log = logging.getLogger("penstock")


class _Work(NamedTuple):
    """A slice for a worker."""

    task: Task  # without data
    rows: Any  # reference of its lines in Ray's object store, if the source is streamed


@dataclass(slots=True, eq=False)
class _Slot:
    """An actor and the work it holds, by the reference of the reply."""

    actor: Any
    node: str = ""  # its id; '' until the worker has started
    host: str = ""
    held: dict[Any, _Work] = field(default_factory=dict)
    is_alone: bool = False  # holds a slice whose previous worker died

    @property
    def has_room(self) -> bool:
        return bool(self.node) and not self.is_alone and len(self.held) < 2


class RayRunner:
    """Runs slices on a Ray cluster, which is found or started with the first task."""

    def __init__(self, setup: Setup, workers: str, address: str | None) -> None:
        """`workers` is a number, or 'auto' for as many as fit on the cluster."""
        require_ray()
        self._setup, self._asked, self._address = setup, workers, address
        self._cluster: RayCluster | None = None
        self._beacon = Beacon(setup.cache.files)
        self._slots: list[_Slot] = []
        self._starting: dict[Any, _Slot] = {}
        self._failed_starts = 0
        self._lost: deque[_Work] = deque()
        self._deaths: Counter[str] = Counter()  # of workers, by the shard they were working on
        self._idle_since = self._grown_at = time.monotonic()

    @property
    def workers(self) -> int:
        """Number of workers that have started and are alive."""
        return sum(bool(slot.node) for slot in self._slots)

    @property
    def nodes(self) -> int:
        """Number of nodes they are on."""
        return len({slot.node for slot in self._slots if slot.node})

    # -- running --------------------------------------------------------------------------------------------------

    def run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        """Runs all tasks. An error of a worker is raised at once."""
        try:
            self._run(tasks, on_report, on_retry)
        except PenstockError:
            raise
        except Exception as error:  # of Ray, which has a class for each request that fails
            if self._cluster is None or self._cluster.is_reachable:
                raise
            raise self._without_head() from error

    def _run(self, tasks: Iterator[Task], on_report: OnReport, on_retry: OnRetry) -> None:
        first = next(tasks, None)
        if first is None:
            return
        self._start()
        left = chain((first,), tasks)
        del first  # frees its data
        while self._hand_out(left) or self._is_busy:
            self._grow()
            for ref in self._wait():
                if ref in self._starting:
                    self._started(ref)
                else:
                    self._finished(ref, on_report, on_retry)

    def _hand_out(self, tasks: Iterator[Task]) -> bool:
        """Gives slices to workers with room, the idlest first. False if there is no slice left to give."""
        while room := [slot for slot in self._slots if slot.has_room]:
            slot = min(room, key=lambda slot: len(slot.held))
            if self._lost and not slot.held:
                work = self._lost.popleft()
                slot.is_alone = self._deaths[work.task.name] > 0
            elif (task := next(tasks, None)) is not None:
                work = self._work(task)
            else:
                return bool(self._lost)
            path = work.task.path.absolute() if isinstance(work.task.path, Path) else work.task.path
            ref = slot.actor.prepare.remote(work.task.name, work.task.slice.to_json(), path_to_json(path), work.rows)
            slot.held[ref] = work
        return True

    def _work(self, task: Task) -> _Work:
        assert self._cluster is not None
        data, bare = task.slice.data, replace(task, slice=task.slice.without_data())
        return _Work(bare, None if data is None else self._cluster.ray.put(b"\n".join(data.rows)))

    @property
    def _is_busy(self) -> bool:
        return bool(self._lost) or any(slot.held for slot in self._slots)

    def _wait(self) -> list[Any]:
        """Waits for replies. Warns, and finally fails, if the cluster has no worker for us."""
        assert self._cluster is not None
        refs = [*self._starting, *(ref for slot in self._slots for ref in slot.held)]
        ready, _ = self._cluster.ray.wait(refs, num_returns=1, timeout=WAIT)
        if ready or self.workers:
            self._idle_since = time.monotonic()
            return list(ready)
        if not self._cluster.is_reachable:
            raise self._without_head()
        idle = time.monotonic() - self._idle_since
        if idle > GIVE_UP_AFTER:
            raise WorkerError(
                f"the Ray cluster has started no worker for {idle:.0f} seconds ({self._cluster.state()}). Finished "
                "slices are kept: run the same command again when there is room."
            )
        if idle > SAY_AFTER:
            log.warning("no worker has started yet: %s", self._cluster.state())
        return []

    def _without_head(self) -> WorkerError:
        assert self._cluster is not None
        return WorkerError(
            f"the head of the Ray cluster ({self._cluster.head}) does not answer any more. Finished slices are kept: "
            "start the cluster again, then run the same command."
        )

    def _finished(self, ref: Any, on_report: OnReport, on_retry: OnRetry) -> None:
        slot = next((slot for slot in self._slots if ref in slot.held), None)
        if slot is None:  # already lost with its worker
            return
        reply = self._reply(ref)
        if isinstance(reply, str):
            self._replace(slot, reply, on_retry)
            return
        work = slot.held.pop(ref)
        slot.is_alone = False
        on_report(work.task, SliceReport(**self._checked(reply)["report"]))

    def _reply(self, ref: Any) -> dict[str, Any] | str:
        """Returns a worker's reply, or how it died."""
        assert self._cluster is not None
        exceptions = self._cluster.ray.exceptions
        try:
            reply: dict[str, Any] = self._cluster.ray.get(ref)
            return reply
        except exceptions.RayTaskError as error:  # a worker catches its errors, so this is one of Ray's or ours
            raise WorkerError(f"a Ray worker failed: {error}") from error
        except exceptions.RayError as error:
            if getattr(error, "actor_init_failed", False):  # Ray couldn't import the actor's module
                raise _not_importable(str(error)) from error
            return _cause(str(error))

    def _checked(self, reply: dict[str, Any]) -> dict[str, Any]:
        """Repeats the messages of a worker here, and raises its error."""
        for level, message in reply["log"]:
            log.log(level, "%s: %s", reply["host"], message)
        if "error" in reply:
            raise reported_error(reply, f"Ray node {reply['host']}: ")
        return reply

    # -- workers --------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        if self._cluster is None:
            self._cluster = RayCluster(self._address, self._asked)
            self._beacon.light()
            for _ in range(self._cluster.slots):
                self._add_worker()
        self._idle_since = time.monotonic()

    def _grow(self) -> None:
        """Adds workers for nodes that have joined, unless their number was given."""
        assert self._cluster is not None
        if self._asked == "auto" and time.monotonic() - self._grown_at > GROW_EVERY:
            self._grown_at = time.monotonic()
            if self._cluster.is_shared:
                for _ in range(self._cluster.room() - len(self._slots)):
                    self._add_worker()

    def _add_worker(self) -> None:

        assert self._cluster is not None
        options = {
            "num_cpus": 1,
            "memory": WORKER_BYTES,
            "max_concurrency": CONCURRENCY,
            "scheduling_strategy": "SPREAD",
            "runtime_env": {"env_vars": VARIABLES},
        }
        actor_class = self._cluster.ray.remote(RaySlot).options(**options)
        slot = _Slot(actor_class.remote(self._setup.to_json(), versions(self._setup.recipe), self._beacon.name))
        self._slots.append(slot)
        self._starting[slot.actor.start.remote()] = slot

    def _started(self, ref: Any) -> None:
        slot = self._starting.pop(ref)
        reply = self._reply(ref)
        if isinstance(reply, str):
            self._failed_starts += "node has died" not in reply  # as Ray says; the node of this worker is unknown here
            if self._failed_starts >= STARTS:
                raise WorkerError(
                    f"{STARTS} Ray workers in a row died before their first slice: {reply} Is Penstock installed on "
                    "all nodes, in the same version?"
                )
            self._slots.remove(slot)
            self._add_worker()
            return
        reply = self._checked(reply)
        slot.node, slot.host = reply["node"], reply["host"]
        self._failed_starts = 0

    def _replace(self, slot: _Slot, how: str, on_retry: OnRetry) -> None:
        """Takes the slices of a dead worker back and asks for another worker."""
        assert self._cluster is not None
        self._slots.remove(slot)
        self._cluster.ray.kill(slot.actor)  # if it is only unreachable
        lost = list(slot.held.values())
        if slot.node in self._cluster.nodes():
            for task, _ in lost:
                self._deaths[task.name] += 1
                if self._deaths[task.name] > 1:
                    raise died_twice(task, f"on {slot.host}, {how}")
        else:
            how = "its node was lost"
        self._lost += lost
        on_retry([work.task for work in lost], f"on {slot.host}, {how}")
        self._add_worker()

    def preview(self, rows: Sequence[bytes]) -> str:
        """What to say about both modes of turns, from these rows."""
        return InProcess(replace(self._setup, size=0)).preview(rows)

    def close(self) -> None:
        """Kills all workers and leaves the cluster."""
        cluster, self._cluster = self._cluster, None
        self._beacon.close()
        if cluster is None:
            return
        try:
            for slot in self._slots if cluster.is_reachable else ():  # otherwise Ray would wait for the head
                cluster.ray.kill(slot.actor)
        finally:
            self._slots, self._starting = [], {}
            cluster.close()


def _not_importable(text: str) -> WorkerError:
    where = re.search(r"ip=([^,)]+)", text)
    reason = text.strip().rpartition("\n")[2].strip()
    return WorkerError(
        f"Ray node {where[1] if where else 'unknown'}: Penstock can't be imported ({reason}). Install the same version "
        "of penstock[ray] on all nodes."
    )


def _cause(text: str) -> str:
    """Shortens Ray's account of a death to the sentence that says how."""
    detail = text.partition("Worker exit detail: ")[2] or text
    return detail.strip().partition(". ")[0].replace("\n", " ").rstrip(".") + "."


# ---- ray slot --------------------------------------------------------------------------------------------------------
# A worker of the Ray runner: an actor that owns its engines and prepares slices until it is killed.
#
# It takes two slices at a time, so that a shard is written while the next slice is being prepared. Replies are small:
# the report of a slice or an error, and the messages that were logged meanwhile. Before the first slice, the worker
# checks that its node has the build's cache folder and versions: a wrong node ends the build, before it can write
# anything.


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

    def prepare(self, name: str, slice_: dict[str, Any], path: Any, rows: bytes | None) -> Reply:
        """Prepares and commits a slice; `rows` are its lines if the source is streamed. Replies with its report."""
        return self._reply(lambda: self._prepare(name, slice_, path, rows))

    def _reply(self, act: Callable[[], Reply]) -> Reply:
        try:
            reply = act()
        except Exception as error:
            reply = failure(error)
        return reply | {"host": socket.gethostname(), "log": self._messages.take()}

    def _start(self) -> Reply:
        map_large_blocks()
        from penstock.build.workers.worker import cache_of, open_job

        recipe, cache = Recipe.from_json(self._setup["recipe"]), cache_of(self._setup)
        if (found := versions(recipe)) != self._expected:
            wrong = "Penstock" if found["penstock"] != self._expected["penstock"] else "jinja2 or tokenizers"
            raise WorkerError(f"another version of {wrong} is installed here. Install the same on all nodes.")
        if not cache.is_remote and not sees_beacon(cache.files, self._beacon):
            raise StoreError(
                f"{cache.root} is not the cache folder of the build here. Choose a folder with --cache that all nodes "
                "mount at the same path."
            )
        self._job = open_job(self._setup)
        import ray

        return {"node": ray.get_runtime_context().get_node_id()}

    def _prepare(self, name: str, slice_: dict[str, Any], path: Any, rows: bytes | None) -> Reply:
        assert self._job is not None
        data = None if rows is None else TextRows(rows.split(b"\n"))
        with self._preparing:
            commit = self._job.prepare(name, Slice.from_json(slice_), path_from_json(path), data)
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


class Beacon:
    """A file by which workers on other hosts can tell that they see the same cache folder.

    Every cache has the same marker, so a marker at the right path proves nothing: each host may have a folder of its
    own there. The beacon's name is random and never used twice. A build that is killed leaves it behind as a temporary
    file of a dead writer, which is cleaned up with the others.
    """

    def __init__(self, storage: LocalStorage) -> None:
        self._storage, self.name = storage, temporary_name()

    def light(self) -> None:
        """Create the file, unless it exists."""
        self._storage.touch(f"tmp/{self.name}", create=True)

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self._storage.delete(f"tmp/{self.name}")


def sees_beacon(storage: LocalStorage, name: str) -> bool:
    """Whether the beacon of another process is in this folder. Lists it, to bypass a network file system's cache."""
    for pause in BEACON_PAUSES:
        time.sleep(pause)
        with contextlib.suppress(OSError):  # there is no such folder here
            if name in storage.names("tmp"):
                return True
    return False
