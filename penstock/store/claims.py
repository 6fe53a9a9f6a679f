"""Claims and leases: how processes and hosts share one cache without talking to each other.

A *claim* says who works on a slice. It is a file created with O_EXCL, whose owner touches it every few seconds. A claim
left by a dead process of this host is taken over at once; one of another host expires when it has not been touched for
`EXPIRY`, by the file server's clock. Losing or stealing a claim only repeats work: shards don't depend on who builds
them.

A *lease* lists the shards that a build is about to put into a manifest, so that `gc` leaves them alone. The order of
steps makes it safe between hosts. A build writes its lease, lists the shards' folders, commits the manifest, and
releases the lease. `gc` sets shards aside, reads the leases, then the manifests, and deletes. Either `gc` sees the
lease (or the manifest that replaced it), or the build sees that shards are missing and rebuilds them.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Protocol

from penstock.store.files import explain_os_errors, fault, writer_is_dead, writer_name
from penstock.store.tree import Tree, temporary_name

HEARTBEAT = 5.0  # seconds between touches
EXPIRY = 120.0  # seconds without a touch; generous, because NFS clients cache attributes for up to a minute
UNSIGNED_EXPIRY = 5.0  # for a claim whose owner apparently died before writing its name
LEASE_EXPIRY = 86400.0  # seconds; a lease left by a build that died on a host we can't query
CLOCK_INTERVAL = 30.0  # seconds between readings of the file server's clock


class SliceClaims(Protocol):
    """The claims that one build holds."""

    def take(self, name: str) -> bool:
        """Claim a slice. False if another process holds it and may still be alive."""
        ...

    def release(self, name: str) -> None:
        """Release a claim, after the shard is committed or the attempt was given up."""
        ...

    def close(self) -> None:
        """Release all claims."""
        ...


class Claims:
    """The claims this process holds in a cache folder."""

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
        """Claim a slice. False if another process holds it and may still be alive."""
        path = self._path(name)
        if not self._create(path):
            if not self._is_abandoned(path):
                return False
            try:
                self._tree.remove(path)
            except OSError:
                return True  # a dead claim that we can't remove: work without one
            if not self._create(path):
                return False  # another process was faster
        with self._lock:
            self._held.add(name)
            self._start()
        return True

    def _create(self, path: Path) -> bool:
        return self._tree.create(path, writer_name().encode(), "claim")

    def release(self, name: str) -> None:
        """Release a claim, after the shard is committed or the attempt was given up."""
        fault("claim.release")
        with self._lock:
            held = name in self._held
            self._held.discard(name)
        if held:
            with contextlib.suppress(OSError):
                self._tree.remove(self._path(name))

    def close(self) -> None:
        """Release all claims."""
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
        except OSError:  # gone, or not a file of Penstock's
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
    """The file server's clock, read from the mtime of a file touched now. The host's own clock may differ."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._offset = 0.0  # server time minus our monotonic clock
        self._read_at: float | None = None

    def now(self) -> float:
        """The server's current time, in seconds."""
        ours = time.monotonic()
        if self._read_at is None or ours - self._read_at > CLOCK_INTERVAL:
            self._offset, self._read_at = self._server_time() - ours, ours
        return ours + self._offset

    def age(self, path: Path) -> float:
        """Seconds since a file was last touched; FileNotFoundError if it is gone.

        A time in the future counts as far in the past: NFS 3 creates a file exclusively by giving it a random time,
        which stays if the client dies before it sets the right one.
        """
        return abs(self.now() - path.lstat().st_mtime)

    def _server_time(self) -> float:
        try:
            return self._tree.server_time()
        except OSError:
            return time.time()  # the cache is read-only for us: fall back to our own clock


def clean_claims(tree: Tree) -> None:
    """Remove the claims of dead processes. Costs one listing."""
    clock = ServerClock(tree)
    for path in tree.files(tree.root / "claims"):
        with contextlib.suppress(OSError):  # already gone, or owned by another user
            owner = _owner(tree, path)
            if (owner and writer_is_dead(owner)) or clock.age(path) > EXPIRY:
                tree.remove(path)


def _owner(tree: Tree, path: Path) -> str | None:
    """The writer of a claim: empty if not written yet, None if we may not read it."""
    try:
        return tree.read(path).decode(errors="replace")
    except PermissionError:
        return None


@contextlib.contextmanager
def lease(tree: Tree, names: Iterable[str]) -> Iterator[None]:
    """Protect shards and tokenizers from `gc` by name."""
    path = tree.root / "leases" / temporary_name()
    tree.write(path, "\n".join(names).encode(), "lease")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            tree.remove(path)


def leased_names(tree: Tree) -> set[str]:
    """All names under lease. Raises if a lease can't be read, because what it protects must not be deleted."""
    clock, folder = ServerClock(tree), tree.root / "leases"
    found: set[str] = set()
    with (
        explain_os_errors(folder, "can't be read"),
        contextlib.suppress(FileNotFoundError),
    ):  # no build ever came this far
        for path in map(folder.joinpath, tree.names(folder)):
            if not tree.owns(path) or writer_is_dead(path.name):
                continue
            with contextlib.suppress(FileNotFoundError):  # released in the meantime
                if clock.age(path) < LEASE_EXPIRY:
                    found.update(tree.read(path).decode(errors="replace").split("\n"))
    return found


def clean_leases(tree: Tree) -> None:
    """Remove the leases of dead builds."""
    clock = ServerClock(tree)
    for path in tree.files(tree.root / "leases"):
        with contextlib.suppress(OSError):
            if writer_is_dead(path.name) or clock.age(path) > LEASE_EXPIRY:
                tree.remove(path)
