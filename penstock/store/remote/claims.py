"""Claims, leases and collections in an object store: how builders and `gc` share a cache without talking to each other.

A *claim* is an object created by a conditional put, so exactly one builder gets it. It names its writer and is renewed
by conditional replacement. A claim of a dead process of this host, or one that was not renewed for `EXPIRY` by the
store's clock, is taken over by conditional replacement of the version that was read: exactly one of many builders
succeeds. Losing a claim only repeats work, since shards don't depend on who builds them.

A *lease* lists the shards that a build is about to put into a manifest, a *collection* those that `gc` is about to
delete. Both are written before the other kind is read: a build writes its lease, reads the collections, lists the
shards, commits the manifest and deletes the lease; `gc` writes a collection, reads leases and manifests, deletes what
neither references, and deletes the collection. Either `gc` sees the lease (or the manifest that replaced it), or
the build sees the collection and waits for its end. This needs no rename, only listings that show completed writes,
which S3, Google Cloud Storage and Azure guarantee.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.errors import StoreError
from penstock.store.claims import LEASE_EXPIRY
from penstock.store.files import fault, writer_is_dead, writer_name
from penstock.store.remote.objects import CacheObjects
from penstock.store.tree import temporary_name

RENEWAL = 20.0  # seconds between renewals of a claim
EXPIRY = 120.0  # seconds without a renewal
LISTING_AGE = 1.0  # seconds for which a listing of the claims is used
COLLECTION_TIME = 240.0  # seconds that `gc` may take for one collection
COLLECTION_EXPIRY = 600.0  # seconds after which a collection is taken for that of a dead `gc`


class _Seen(NamedTuple):
    etag: str
    age: float


class RemoteClaims:
    """The claims that this process holds in an object store."""

    def __init__(self, folder: CacheObjects) -> None:
        self._folder = folder
        self._nonce = temporary_name()
        self._held: dict[str, bytes] = {}  # what we wrote
        self._listed: tuple[float, dict[str, _Seen]] = (float("-inf"), {})
        self._writers: dict[tuple[str, str], str] = {}  # by name and ETag
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def take(self, name: str) -> bool:
        """Claim a slice. False if another process holds it and may still be alive."""
        path, mine = f"claims/{name}", self._signed(0)
        seen = self._listing().get(name)
        if seen is None and not self._folder.create(path, mine):
            found = self._folder.head(path)
            if found is None:
                return False  # released just now: try again later
            seen = _Seen(found.etag, self._folder.age(found))
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
            with contextlib.suppress(StoreError):  # it expires
                self._folder.delete(f"claims/{name}")

    def close(self) -> None:
        """Release all claims."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._held):
            self.release(name)

    def _signed(self, beat: int) -> bytes:
        """What a claim says: its writer, who is one of this object's, and a number that makes renewals differ."""
        return f"{writer_name()}\n{self._nonce}\n{beat}".encode()

    def _listing(self) -> dict[str, _Seen]:
        """The claims of others, as listed a moment ago."""
        with self._lock:
            if time.monotonic() - self._listed[0] > LISTING_AGE:
                found = self._folder.objects("claims")
                ages = {path.rpartition("/")[2]: _Seen(i.etag, self._folder.age(i)) for path, i in found.items()}
                self._listed = time.monotonic(), ages
            return self._listed[1]

    def _take_over(self, name: str, seen: _Seen, mine: bytes) -> bool:
        """Replace a claim if its writer is dead or has not renewed it; exactly one of many processes succeeds."""
        path = f"claims/{name}"
        writer = self._writers.get((name, seen.etag))
        if writer is None:
            content = self._folder.get(path)
            if content is None:
                return self._folder.create(path, mine)  # released in the meantime
            if content.split(b"\n")[1:2] == [self._nonce.encode()]:
                return True  # ours: the answer to our request was lost
            writer = content.split(b"\n")[0].decode(errors="replace")
            self._writers[name, seen.etag] = writer
        if not writer_is_dead(writer) and seen.age <= EXPIRY:
            return False
        found = self._folder.head(path)
        if found is None or found.etag != seen.etag:
            return False  # released, renewed or taken over in the meantime
        return self._folder.replace(path, mine, found) or self._is_ours(path)

    def _is_ours(self, path: str) -> bool:
        content = self._folder.get(path)
        return content is not None and content.split(b"\n")[1:2] == [self._nonce.encode()]

    def _renew(self) -> None:
        beat = 0
        while not self._stop.wait(RENEWAL):
            beat += 1
            with self._lock:
                held = dict(self._held)
            for name, content in held.items():
                with contextlib.suppress(StoreError):  # a lost claim only repeats work
                    self._renew_one(name, content, self._signed(beat))

    def _renew_one(self, name: str, content: bytes, renewed: bytes) -> None:
        path = f"claims/{name}"
        found = self._folder.head(path)
        if found is None or self._folder.get(path) != content or not self._folder.replace(path, renewed, found):
            renewed = b""  # lost: not ours to renew or delete
        with self._lock:
            if name in self._held and renewed:
                self._held[name] = renewed
            elif not renewed:
                self._held.pop(name, None)


@contextlib.contextmanager
def remote_lease(folder: CacheObjects, names: Iterable[str]) -> Iterator[None]:
    """Protect shards and tokenizers from `gc` by name."""
    path = f"leases/{temporary_name()}"
    folder.put(path, "\n".join(names).encode())
    fault("lease.put")
    try:
        yield
    finally:
        with contextlib.suppress(StoreError):
            folder.delete(path)


def remote_leased(folder: CacheObjects) -> set[str]:
    """All names under lease."""
    found: set[str] = set()
    for path, info in folder.objects("leases").items():
        if not writer_is_dead(path.rpartition("/")[2]) and folder.age(info) < LEASE_EXPIRY:
            content = folder.get(path)
            found.update((content or b"").decode(errors="replace").split("\n"))
    return found


def collected(folder: CacheObjects, names: Iterable[str]) -> bool:
    """Whether a `gc` that may still run is about to delete one of these shards."""
    wanted = set(names)
    for path, info in folder.objects("collections").items():
        if writer_is_dead(path.rpartition("/")[2]) or folder.age(info) > COLLECTION_EXPIRY:
            continue
        content = folder.get(path)
        if not wanted.isdisjoint((content or b"").decode(errors="replace").split("\n")):
            return True
    return False


def clean_remote(folder: CacheObjects) -> int:
    """Remove the claims, leases and collections of dead processes; returns how many there were."""
    removed = 0
    for kind, expiry in (("leases", LEASE_EXPIRY), ("collections", COLLECTION_EXPIRY)):
        for path, info in folder.objects(kind).items():
            if writer_is_dead(path.rpartition("/")[2]) or folder.age(info) > expiry:
                folder.delete(path)
                removed += 1

    def clean(path: str) -> int:
        writer = (folder.get(path) or b"").split(b"\n")[0].decode(errors="replace")
        if not writer_is_dead(writer) and folder.age(claims[path]) <= EXPIRY:
            return 0
        folder.delete(path)
        return 1

    claims = folder.objects("claims")
    return removed + sum(folder.each(clean, claims))
