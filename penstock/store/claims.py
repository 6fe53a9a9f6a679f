"""Claims: who works on which slice, so that many processes and hosts share one build without talking to each other.

A claim is a file made with O_EXCL; its maker touches it every few seconds. A claim of a dead process of this host is
taken over at once; one of another host when its file has not been touched for `EXPIRY` by the file server's own clock.
Losing or stealing a claim only repeats work: shards are the same whoever makes them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.store.files import explain_os_errors, fault, writer_is_dead, writer_name
from penstock.store.tree import Tree, temporary_name

HEARTBEAT = 5.0  # seconds between touches
EXPIRY = 120.0  # seconds without a touch; generous, because NFS clients cache attributes for up to a minute
UNSIGNED_EXPIRY = 5.0  # of a claim whose maker died, or so it seems, before it wrote its name
LEASE_EXPIRY = 86400.0  # seconds; a lease left by a build that died on a host we can't query
CLOCK_INTERVAL = 30.0  # seconds between looks at the file server's clock


class Claims:
    """The claims this process holds."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._clock = ServerClock(tree)

    def _path(self, name: str) -> Path:
        return self._tree.root / "claims" / name

    def take(self, name: str) -> bool:
        """Claim a slice; False when somebody else, alive as far as we know, has it."""
        path = self._path(name)
        if not self._create(path):
            if not self._is_abandoned(path):
                return False
            try:
                self._tree.remove(path)
            except OSError:
                return True  # a dead claim that we may not remove, or no claim at all: work without one
            if not self._create(path):
                return False  # another process was faster
        with self._lock:
            self._held.add(name)
            self._start()
        return True

    def _create(self, path: Path) -> bool:
        return self._tree.create(path, writer_name().encode(), "claim")

    def release(self, name: str) -> None:
        """Give a claim back; the shard is there, or somebody else shall try."""
        fault("claim.release")
        with self._lock:
            held = name in self._held
            self._held.discard(name)
        if held:
            with contextlib.suppress(OSError):
                self._tree.remove(self._path(name))

    def close(self) -> None:
        """Give everything back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._held):
            self.release(name)

    def _is_abandoned(self, path: Path) -> bool:
        try:
            owner = _owner(self._tree, path)
            if owner and writer_is_dead(owner):
                return True
            expiry = UNSIGNED_EXPIRY if owner == "" else EXPIRY
            return self._clock.age(path) > expiry
        except OSError:  # gone, or no file that Penstock made
            return True

    def _start(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="penstock-claims", daemon=True)
            self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(HEARTBEAT):
            with self._lock:
                held = list(self._held)
            for name in held:
                with contextlib.suppress(OSError):  # a lost claim only repeats work
                    self._tree.touch(self._path(name))


class ServerClock:
    """The file server's clock: the time it gives to a file touched right now. Hosts' own clocks may differ from it."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._offset = 0.0  # what to add to our monotonic clock
        self._read_at: float | None = None

    def now(self) -> float:
        """The time now, in seconds."""
        ours = time.monotonic()
        if self._read_at is None or ours - self._read_at > CLOCK_INTERVAL:
            self._offset, self._read_at = self._look() - ours, ours
        return ours + self._offset

    def age(self, path: Path) -> float:
        """Seconds since a file was last touched; FileNotFoundError when it is gone."""
        return self.now() - path.lstat().st_mtime

    def _look(self) -> float:
        try:
            return self._tree.server_time()
        except OSError:
            return time.time()  # we may not write here: our own clock has to do


def clean_claims(tree: Tree) -> None:
    """Remove what dead processes have left. Costs a listing; claims are few."""
    clock = ServerClock(tree)
    for path in tree.files(tree.root / "claims"):
        with contextlib.suppress(OSError):  # gone by now, or not ours to remove
            owner = _owner(tree, path)
            if (owner and writer_is_dead(owner)) or clock.age(path) > EXPIRY:
                tree.remove(path)


def _owner(tree: Tree, path: Path) -> str | None:
    """Who made a claim: empty where that is not written yet, None where we may not read it."""
    try:
        return tree.read(path).decode(errors="replace")
    except PermissionError:
        return None


@contextlib.contextmanager
def lease(tree: Tree, names: Iterable[str]) -> Iterator[None]:
    """Keep shards and tokenizers, given by their names, from `gc`."""
    path = tree.root / "leases" / temporary_name()
    tree.write(path, "\n".join(names).encode(), "lease")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            tree.remove(path)


def leased_names(tree: Tree) -> set[str]:
    """All names under lease. Raises where a lease can't be read: what it keeps must not be deleted."""
    clock, folder = ServerClock(tree), tree.root / "leases"
    found: set[str] = set()
    with (
        explain_os_errors(folder, "can't be read"),
        contextlib.suppress(FileNotFoundError),
    ):  # no build ever came this far
        for path in map(folder.joinpath, tree.names(folder)):
            if not tree.owns(path) or writer_is_dead(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # released meanwhile
                if clock.age(path) < LEASE_EXPIRY:
                    found.update(tree.read(path).decode(errors="replace").split("\n"))
    return found


def clean_leases(tree: Tree) -> None:
    """Remove what dead builds have left."""
    clock = ServerClock(tree)
    for path in tree.files(tree.root / "leases"):
        with contextlib.suppress(OSError):
            if writer_is_dead(path.name) or clock.age(path) > LEASE_EXPIRY:
                tree.remove(path)
