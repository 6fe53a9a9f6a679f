"""A cache in an object store, by the paths of its objects. Errors are StoreErrors.

Objects appear whole or not at all, so nothing is renamed, and `gc` can't hide a shard before it deletes it. Instead it
writes a *collection* that lists what it is about to delete, before it reads the leases; a build writes its lease before
it reads the collections, and waits for the end of one that lists its shards. This needs only listings that show
completed writes, which S3, Google Cloud Storage and Azure guarantee.

Requests that fail in passing are retried by the client. Conditional writes whose answer got lost are retried here: the
caller compares contents when a retried write finds an object, because that may be its own.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.digests import NAME, bytes_digest, validate_name
from penstock.errors import ObjectError, ObjectMissing, StoreError
from penstock.objects import ObjectInfo, open_object_store
from penstock.store.files import fault, writer_is_dead
from penstock.store.storage import COLLECTION_EXPIRY, MARKER, OWN, Entry, Storage, shard_at, temporary_name

T = TypeVar("T")
V = TypeVar("V")

THREADS = 16  # requests at a time, where many objects are read or listed
CLOCK = "clock"  # the object whose modification time shows the store's clock
CONDITIONAL_PAUSES = (0.5, 2.0)  # seconds before a conditional write is tried again
COLLECTION_TIME = 240.0  # seconds that `gc` may take for one collection
SMALL_CACHE = 3000  # objects that are listed at once; a request lists 1000
LISTING_AGE = 60.0  # seconds for which a listing that lacks a shard is used; a builder asks again after its claim

_SUFFIXES = re.compile(rf"(?P<name>{NAME})\.(?P<kind>arrow|index|bad)")


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ObjectError as error:
        raise StoreError(f"{error} Finished slices are kept.") from error


def _bytes(data: Any) -> memoryview:
    """Any buffer as unsigned bytes; those of Arrow are signed."""
    return memoryview(data).cast("B")


class ObjectStorage(Storage):
    """The objects below a URL."""

    is_folder = False
    renewal = 20.0

    def __init__(self, url: str) -> None:
        self.url = url
        with _explained():
            self._store, path = open_object_store(url)
        self._prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        self._offset, self._read_at = 0.0, None
        self._shards = ShardListing(self)
        self._committed: set[str] = set()  # shards that this process has put since their folders were listed

    @property
    def address(self) -> str:
        return self.url

    def address_of(self, path: str) -> str:
        return f"{self.url}/{path}"

    def read(self, path: str) -> bytes | None:
        with _explained(), contextlib.suppress(ObjectMissing):
            return self._store.get(self._prefix + path)
        return None

    def stat(self, path: str) -> Entry | None:
        with _explained(), contextlib.suppress(ObjectMissing):
            return self._entry(self._store.head(self._prefix + path))
        return None

    def entries(self, folder: str) -> list[Entry]:
        with _explained():
            return self._own(self._store.list((self._prefix + folder).rstrip("/")))

    def few_entries(self, folder: str, most: int) -> list[Entry] | None:
        """The objects below a folder, or None if there are more than `most`."""
        with _explained():
            found = self._store.list_some((self._prefix + folder).rstrip("/"), most)
        return None if found is None else self._own(found)

    def shards(self) -> dict[str, Entry]:
        """Those that have an index."""
        found = _by_name(self.entries("shards"))
        return {name: kinds["arrow"] for name, kinds in found.items() if {"arrow", "index"} <= kinds.keys()}

    def names(self, folder: str = "") -> list[str]:
        base = (self._prefix + folder).rstrip("/")
        with _explained():
            objects, folders = self._store.children(base)
        paths = [*(info.path for info in objects), *folders]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def _own(self, found: Iterable[ObjectInfo]) -> list[Entry]:
        return sorted(entry for entry in map(self._entry, found) if OWN.fullmatch(entry.path))

    def _entry(self, info: ObjectInfo) -> Entry:
        modified = info.modified.timestamp() if info.modified is not None else time.time()
        path = info.path.removeprefix(self._prefix)
        return Entry(path, info.size, modified, modified, info.etag, info.version)

    def write(self, path: str, data: Any, point: str, *, durable: bool = True) -> None:
        fault(f"remote.{point}.open")
        with _explained():
            self._store.put(self._prefix + path, _bytes(data))
        fault(f"remote.{point}.put")

    def create(self, path: str, data: Any, point: str) -> bool:
        return self._conditional(lambda: self._store.put(self._prefix + path, _bytes(data), if_absent=True))

    def replace(self, path: str, data: Any, found: Entry, point: str) -> bool:
        etag, version = str(found.version), found.generation
        return self._conditional(lambda: self._store.replace(self._prefix + path, _bytes(data), etag, version))

    def renew(self, path: str, data: bytes, renewed: bytes) -> bytes | None:
        found = self.stat(path)
        is_same = found is not None and self.read(path) == data
        return renewed if found is not None and is_same and self.replace(path, renewed, found, "claim") else None

    def holds(self, path: str, size: int, digest: str) -> bool:
        found = self.stat(path)
        return found is not None and found.size == size

    def _conditional(self, write: Callable[[], bool]) -> bool:
        for pause in CONDITIONAL_PAUSES:
            try:
                return write()
            except ObjectError:  # the client retries only requests that may be repeated
                time.sleep(pause)
        with _explained():
            return write()

    def touch(self, path: str, *, create: bool = False) -> None:
        """Put an empty mark: objects can't be touched."""
        self.write(path, b"", "mark")

    def delete(self, path: str) -> bool:
        with _explained():
            self._store.delete(self._prefix + path)
        return True

    def remove_folder(self, folder: str) -> None:
        pass  # folders end with their last object

    def make_cache(self, marker: bytes) -> None:
        self.create(MARKER, marker, "marker")

    def check_writable(self) -> None:
        self.write(CLOCK, b"", "clock")

    def _server_time(self) -> float:
        with contextlib.suppress(StoreError):  # read-only for us: use our own clock
            self.check_writable()
            found = self.stat(CLOCK)
            if found is not None:
                return found.modified
        return time.time()

    def each(self, act: Callable[[T], V], items: Iterable[T]) -> list[V]:
        given = list(items)
        if len(given) <= 1:
            return [act(item) for item in given]
        with ThreadPoolExecutor(min(THREADS, len(given)), "penstock-remote") as pool:
            futures = [pool.submit(act, item) for item in given]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def has_shard(self, name: str, *, now: bool = False) -> bool:
        if now:
            if self.stat(shard_at(name)) is None:  # a request that is cheaper than a listing
                return False
            self.refresh((name,))
        return name in self._committed or _is_whole(self._shards.find(name))

    def refresh(self, names: Iterable[str]) -> None:
        given = list(names)
        self._committed.difference_update(given)
        self._shards.refresh(given)

    def lists_shards(self, names: Collection[str]) -> bool:
        self.refresh(names)
        return all(_is_whole(self._shards.find(name)) for name in names)

    def put_shard(self, name: str, data: Any, digest: str) -> None:
        """Put a shard whose index is in place. One that exists with the same bytes is kept."""
        path, bad = shard_at(name), shard_at(name, "bad")
        while not self.create(path, data, "shard"):
            found = self.stat(path)
            if found is None:
                continue  # deleted in the meantime
            if found.size == len(data) and bytes_digest(self.read(path) or b"") == digest:
                break
            if self.replace(path, data, found, "shard"):
                break
        fault("remote.shard.put")
        listed = self._shards.known(name)
        if listed is None or "bad" in listed:
            self.delete(bad)
        self._committed.add(name)

    def set_aside(self, paths: Collection[str]) -> ShardCollection:
        return ShardCollection(self, paths)

    def about_to_go(self, names: Collection[str]) -> bool:
        wanted = set(names)
        for entry in self.entries("collections"):
            if writer_is_dead(entry.name) or self.age(entry) > COLLECTION_EXPIRY:
                continue
            if not wanted.isdisjoint((self.read(entry.path) or b"").decode(errors="replace").split("\n")):
                return True
        return False


class ShardCollection:
    """Objects that `gc` has announced to delete.

    A `gc` that is suspended for longer than `COLLECTION_TIME` gives up: builders wait for it no longer than
    `COLLECTION_EXPIRY`.
    """

    refused = 0

    def __init__(self, storage: ObjectStorage, paths: Iterable[str]) -> None:
        self._storage, self._path, self._began = storage, f"collections/{temporary_name()}", time.monotonic()
        names = dict.fromkeys(path.rpartition("/")[2].partition(".")[0] for path in paths)
        storage.write(self._path, "\n".join(names).encode(), "collection")

    def holds(self, paths: Iterable[str]) -> bool:
        return True

    def delete(self, paths: Iterable[str]) -> None:
        for path in paths:
            if time.monotonic() - self._began > COLLECTION_TIME:
                raise StoreError("gc was suspended while it deleted shards, and gave up. Run it again.")
            self._storage.delete(path)

    def restore(self, paths: Iterable[str]) -> None:
        pass  # they are still there

    def close(self) -> None:
        self._storage.delete(self._path)


Kinds = dict[str, Entry]  # by kind: arrow, index, bad


class ShardListing:
    """Which shards an object store has, as listed a moment ago.

    A small cache is listed as a whole, in one to three requests; of a large one, only the folders (two digits of the
    name) of the shards in question, many at a time.
    """

    def __init__(self, storage: ObjectStorage) -> None:
        self._storage = storage
        self._listed: dict[str, tuple[float, dict[str, Kinds]]] = {}  # by the two digits of a folder
        self._is_large = False  # whether all shards are too many to list at once

    def refresh(self, names: Iterable[str]) -> None:
        """List the folders of these shards now."""
        wanted = sorted({validate_name(name)[3:5] for name in names})
        if wanted and not self._list_all():
            self._storage.each(self._list, wanted)

    def find(self, name: str) -> Kinds:
        """The objects of a shard; a folder in which it is missing is listed again after a while."""
        digits = validate_name(name)[3:5]
        listed = self._listed.get(digits)
        if listed is None or (name not in listed[1] and time.monotonic() - listed[0] > LISTING_AGE):
            self.refresh((name,))
        return self.known(name) or {}

    def known(self, name: str) -> Kinds | None:
        """The objects of a shard, as listed before; None if its folder was not listed."""
        listed = self._listed.get(name[3:5])
        return None if listed is None else listed[1].get(name, {})

    def _list_all(self) -> bool:
        """List all shards in one or a few requests; False if there are too many."""
        if self._is_large:
            return False
        listed = self._storage.few_entries("shards", SMALL_CACHE)
        if listed is None:
            self._is_large = True
            return False
        folders: dict[str, dict[str, Kinds]] = {f"{number:02x}": {} for number in range(256)}
        for name, kinds in _by_name(listed).items():
            folders[name[3:5]][name] = kinds
        self._listed = {digits: (time.monotonic(), entries) for digits, entries in folders.items()}
        return True

    def _list(self, digits: str) -> None:
        self._listed[digits] = time.monotonic(), _by_name(self._storage.entries(f"shards/{digits}"))


def _is_whole(kinds: Kinds) -> bool:
    return {"arrow", "index"} <= kinds.keys() and "bad" not in kinds


def _by_name(entries: Iterable[Entry]) -> dict[str, Kinds]:
    """The objects of shards, by name and kind; others are left out."""
    found: dict[str, Kinds] = {}
    for entry in entries:
        if parts := _SUFFIXES.fullmatch(entry.name):
            found.setdefault(parts["name"], {})[parts["kind"]] = entry
    return found
