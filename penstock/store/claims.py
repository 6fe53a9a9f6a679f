"""Claims and leases: how processes and hosts share one cache without talking to each other.

A *claim* says who works on a slice. It is created exclusively and kept young by its owner: a file is touched, an object
is replaced. A claim left by a dead process of this host is taken over at once; one of another host expires when it has
not been renewed for `EXPIRY`, by the server's clock. In an object store, exactly one of many builders takes it over.
Losing or stealing a claim only repeats work: shards don't depend on who builds them.

A *lease* lists the shards that a build is about to put into a manifest, so that `gc` leaves them alone. The order of
steps makes it safe between hosts. A build writes its lease, lists the shards, commits the manifest, and releases the
lease. `gc` sets shards aside, reads the leases, then the manifests, and deletes. Either `gc` sees the lease (or the
manifest that replaced it), or the build sees what was set aside, and rebuilds it or waits.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.files import explain_os_errors, fault, writer_is_dead, writer_name
from penstock.store.storage import COLLECTION_EXPIRY, Entry, Storage, temporary_name

EXPIRY = 120.0  # seconds without renewal; generous, because NFS clients cache attributes for up to a minute
UNSIGNED_EXPIRY = 5.0  # for a claim whose owner apparently died before writing its name
LISTING_AGE = 1.0  # seconds for which a listing of the claims is used
LEASE_EXPIRY = 86400.0  # seconds; a lease left by a build that died on a host we can't query


class Claims:
    """The claims that this object holds in a cache, for one build."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._nonce = temporary_name()
        self._held: dict[str, bytes] = {}  # what we wrote
        self._listed: tuple[float, dict[str, Entry]] = (float("-inf"), {})
        self._owners: dict[tuple[object, ...], str] = {}  # by name and version
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, name: str) -> bool:
        """Claim a slice. False if another process holds it and may still be alive."""
        path, mine = f"claims/{name}", self._signed(0)
        seen = self._listing().get(name)
        if seen is None and not self._storage.create(path, mine, "claim"):
            try:
                seen = self._storage.stat(path)
            except OSError:
                return True  # not a file of Penstock's: work without a claim
            if seen is None:
                return False  # released just now: try again later
        if seen is not None and not self._take_over(name, seen, mine):
            return False
        fault("claim.create")
        with self._lock:
            self._held[name] = mine
            if self._thread is None:
                self._thread = threading.Thread(target=self._renew, name="penstock-claims", daemon=True)
                self._thread.start()
        return True

    def release(self, name: str) -> None:
        """Release a claim, after the shard is committed or the attempt was given up."""
        fault("claim.release")
        with self._lock:
            held = self._held.pop(name, None)
        if held is not None:
            with contextlib.suppress(OSError, StoreError):  # it expires
                self._storage.delete(f"claims/{name}")

    def close(self) -> None:
        """Release all claims."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._held):
            self.release(name)

    def _signed(self, beat: int) -> bytes:
        """What a claim says: its writer, which of its builds, and how often it was renewed by replacing it."""
        return f"{writer_name()}\n{self._nonce}\n{beat}".encode()

    def _listing(self) -> dict[str, Entry]:
        """The claims of others, as listed a moment ago; of a folder none, since asking for one costs no more."""
        if self._storage.is_folder:
            return {}
        with self._lock:
            if time.monotonic() - self._listed[0] > LISTING_AGE:
                found = {entry.name: entry for entry in self._storage.entries("claims")}
                self._listed = time.monotonic(), found
            return self._listed[1]

    def _take_over(self, name: str, seen: Entry, mine: bytes) -> bool:
        """Replace a claim if its writer is dead or has not renewed it."""
        path = f"claims/{name}"
        owner: str | None = self._owners.get((name, seen.version))
        try:
            if owner is None:
                content = self._storage.read(path)
                if content is None:
                    return self._storage.create(path, mine, "claim")  # released in the meantime
                if self._is_ours(content):
                    return True  # the answer to our request was lost
                owner = _owner(content)
                if owner:
                    self._owners[name, seen.version] = owner
            expiry = UNSIGNED_EXPIRY if owner == "" else EXPIRY
            if not (owner and writer_is_dead(owner)) and self._storage.age(seen) <= expiry:
                return False
        except PermissionError:  # another user's
            if self._storage.age(seen) <= EXPIRY:
                return False
        except OSError:
            pass  # gone, or not a file of Penstock's
        try:
            found = self._storage.stat(path)
            if found is None or found.version != seen.version:
                return False  # released, renewed or taken over in the meantime
            return self._storage.replace(path, mine, found, "claim") or self._is_ours(self._storage.read(path))
        except OSError:
            return True  # a dead claim that we can't remove: work without one

    def _is_ours(self, content: bytes | None) -> bool:
        return content is not None and content.split(b"\n")[1:2] == [self._nonce.encode()]

    def _renew(self) -> None:
        beat = 0
        while not self._stop.wait(self._storage.renewal):
            beat += 1
            with self._lock:
                held = dict(self._held)
            for name, content in held.items():
                with contextlib.suppress(OSError, StoreError):  # a lost claim only repeats work
                    self._renew_one(name, content, self._signed(beat))

    def _renew_one(self, name: str, content: bytes, renewed: bytes) -> None:
        kept = self._storage.renew(f"claims/{name}", content, renewed)
        with self._lock:
            if kept is None:  # lost: not ours to renew or delete
                self._held.pop(name, None)
            elif name in self._held:
                self._held[name] = kept


def _owner(content: bytes) -> str:
    """The writer of a claim; empty if its name is not written yet."""
    return content.split(b"\n")[0].decode(errors="replace")


@contextlib.contextmanager
def lease(storage: Storage, names: Iterable[str]) -> Iterator[None]:
    """Protect shards and tokenizers from `gc` by name."""
    path = f"leases/{temporary_name()}"
    storage.write(path, "\n".join(names).encode(), "lease")
    fault("lease.put")
    try:
        yield
    finally:
        with contextlib.suppress(OSError, StoreError):
            storage.delete(path)


def leased_names(storage: Storage) -> set[str]:
    """All names under lease. Raises if a lease can't be read, because what it protects must not be deleted."""
    found: set[str] = set()
    for entry in storage.entries("leases"):
        if not writer_is_dead(entry.name) and storage.age(entry) < LEASE_EXPIRY:
            with explain_os_errors(Path(storage.address_of(entry.path)), "can't be read"):
                content = storage.read(entry.path) or b""  # empty: released in the meantime
            found.update(content.decode(errors="replace").split("\n"))
    return found


def clean_shared(storage: Storage) -> int:
    """Remove the claims, leases and collections of dead processes; returns how many. Costs three listings."""
    expiries = {"claims": EXPIRY, "leases": LEASE_EXPIRY, "collections": COLLECTION_EXPIRY}

    def clean(entry: Entry) -> bool:
        kind = entry.path.partition("/")[0]
        try:
            writer = _owner(storage.read(entry.path) or b"") if kind == "claims" else entry.name
        except PermissionError:
            writer = ""
        except OSError:
            return False
        with contextlib.suppress(OSError):  # already gone, or owned by another user
            if (writer and writer_is_dead(writer)) or storage.age(entry) > expiries[kind]:
                return storage.delete(entry.path)
        return False

    return sum(storage.each(clean, [entry for kind in expiries for entry in storage.entries(kind)]))
