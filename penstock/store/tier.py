"""The local tier of a cache in an object store: a cache folder that holds copies of what was used last.

The store alone decides what exists. A shard is downloaded once per machine, however many processes want it at the same
time; its bytes are compared with the digest in the manifest before they get their name. When the tier outgrows its
size, the shards that were used longest ago are deleted, except those that this process has mapped. Deleting a file that
another process has mapped is harmless on a local file system: the process keeps its pages, and the space is freed when
it lets go.

Manifests and notes are copied before they are read, with the modification times of the objects, which say when a
dataset was prepared and used. So everything that reads manifests works on an object store as on a folder.

Of objects no owner is known. What this user wrote is recognised by a key in the index; a manifest names its shards'
digests, so one that was checked vouches for all of them. A memo is used if it was signed with the key.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.digests import FORMAT_VERSION, bytes_digest, canonical, digest, seal
from penstock.errors import CorruptError, StoreError, UsageError
from penstock.store.claims import Claims
from penstock.store.files import is_readable_file, make_folder, read_regular
from penstock.store.local import LocalStorage
from penstock.store.storage import MARKER, Entry, Storage, is_cache, shard_at
from penstock.store.trust import (
    LOCAL_VARIABLE,
    ShardWriter,
    Trust,
    host_name,
    is_keyed,
    keyed_digest,
    read_record,
    user_cache_folder,
)

if TYPE_CHECKING:
    from penstock.prepare.encode.columns import Columns
    from penstock.store.shard import ShardIndex, ShardMeta

BYTES_VARIABLE = "PENSTOCK_LOCAL_CACHE_BYTES"
RESERVE = 0.05  # of the disk stays free, whatever the size of the tier
TRIM_TO = 0.9  # of its size, so that not every download deletes something
POLL = 0.02  # seconds between looks at a download of another process
FRESH = 300.0  # seconds since its last use for which a shard is kept although the disk is full
SCAN_INTERVAL = 30.0  # seconds after which the tier is measured again, since other processes fill it too
COPIED = ("notes.json", "manifest.json")
REPAIR = "Run `penstock cache verify`, then the same prepare again: it rebuilds what is damaged."


def tier_folder(url: str, local: str | os.PathLike[str] | None) -> Path:
    """The local tier of a cache: a folder of its own below the given one, or `penstock-remote` in the user's cache."""
    base = local or os.environ.get(LOCAL_VARIABLE) or user_cache_folder() / "penstock-remote"
    folder = Path(base).expanduser().absolute()
    name = f"{re.sub(r'[^A-Za-z0-9]+', '-', url.partition('://')[2]).strip('-')[:40]}-{digest(url.encode())[3:11]}"
    return folder if folder.name == name else folder / name


def _tier_bytes() -> int | None:
    given = os.environ.get(BYTES_VARIABLE)
    if given and not given.isdigit():
        raise UsageError(f"{BYTES_VARIABLE}={given!r} is not a number of bytes.")
    return int(given) if given else None


class _Kept(NamedTuple):
    used: float
    bytes: int
    shard: str
    files: tuple[str, ...]  # the shard, its record and its index, as far as they are here


class Tier:
    """Copies of a store's files in a folder. `mapped` names the files that this process has mapped."""

    stamped = "index"  # each commit writes another

    def __init__(
        self, storage: Storage, folder: Path, trust: Trust, max_bytes: int | None, mapped: Callable[[], Iterable[Path]]
    ) -> None:
        self.files, self._storage, self.trust = LocalStorage(folder), storage, trust
        self.max_bytes = _tier_bytes() if max_bytes is None else max_bytes
        self._mapped = mapped
        self._lock = threading.Lock()
        self._running: dict[str, Future[None]] = {}
        self._claims: Claims | None = None
        self._bytes = 0  # as far as this process knows
        self._measured = float("-inf")
        self.downloaded = 0  # bytes
        make_folder(folder)
        if not is_cache(self.files):  # its marker names the URL, so that paths in the tier open the cache
            marker = canonical({"format": FORMAT_VERSION, "remote": storage.address})
            self.files.write(MARKER, marker, "marker", in_root=True, durable=False)
        self.files.check_writable()

    def object(self, path: str) -> bytes:
        """The bytes of an object that a dataset needs."""
        data = self._storage.read(path)
        if data is None:
            raise CorruptError(
                f"{self._storage.address_of(path)}: the object is missing, although a dataset needs it. "
                "Run the same prepare again: it rebuilds only this slice."
            )
        return data

    def update(self, key: str | None = None) -> None:
        if key is not None:
            for name in COPIED:
                self._copy(f"datasets/{key}/{name}")
            return
        found, here = self._storage.entries("datasets"), self.files.entries("datasets")
        self._storage.each(self._copy, sorted({entry.path for entry in (*found, *here) if entry.name in COPIED}))
        for entry in found:
            self._date(entry)

    def _copy(self, path: str) -> None:
        """Make a file of the tier equal to its object."""
        data, copy = self._storage.read(path), self.files.root / path
        if data is None:
            self.files.delete(path)
        elif not is_readable_file(copy) or read_regular(copy) != data:
            self.files.write(path, data, "copy", durable=False)

    def _date(self, entry: Entry) -> None:
        with contextlib.suppress(OSError):  # dropped in the meantime
            if entry.name == "used":
                self.files.touch(entry.path, create=True)
            if entry.name in ("used", "manifest.json"):
                os.utime(self.files.root / entry.path, (entry.modified, entry.modified))

    def find_memo(self, path: str) -> None:
        name = path.rpartition("/")[2].encode()
        if is_readable_file(self.files.root / path):
            return
        mac, _, data = (self._storage.read(path) or b"").partition(b"\n")
        if data and (self.trust is Trust.ALL or is_keyed(name + data, mac.decode(errors="replace"))):
            self.files.write(path, data, "memo", durable=False)

    def share_memo(self, path: str, data: bytes) -> None:
        name = path.rpartition("/")[2].encode()
        self._storage.write(path, keyed_digest(name + data).encode() + b"\n" + data, "memo")

    def index(self, name: str) -> ShardIndex:
        """A shard's index, from the tier or the store; CorruptError if it is missing or damaged."""
        from penstock.store.shard import parse_index  # needs pyarrow, which a cache hit does not load

        path = shard_at(name, "index")
        if is_readable_file(self.files.root / path):
            try:
                return parse_index(name, read_regular(self.files.root / path))
            except (CorruptError, OSError):
                self.files.delete(path)
        data = self.object(path)
        try:
            found = parse_index(name, data)
        except CorruptError as error:
            raise CorruptError(f"{self._storage.address_of(path)}: {error}. {REPAIR}") from error
        self.files.write(path, data, "index", durable=False)
        return found

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        return self.index(name).read()

    def record(self, name: str) -> dict[str, Any]:
        return self.index(name).record

    def fetch(self, names: Iterable[str]) -> None:
        paths = {name: self.files.root / shard_at(name, "index") for name in names}
        self._storage.each(self.index, [name for name, path in paths.items() if not is_readable_file(path)])

    def commit(self, name: str, data: Any, record: dict[str, Any], *, keep_copy: bool) -> None:
        from penstock.store.shard import encode_index  # needs pyarrow

        record["put"] = time.time_ns()
        path, index = shard_at(name, "index"), encode_index(name, data, record)
        self._storage.write(path, index, "index")
        self.files.write(path, index, "index", durable=False)
        self._storage.put_shard(name, data, record["digest"])
        if keep_copy:
            self._write(name, data, record)
            self._grown(len(data))

    def has_copy(self, name: str, expected: str) -> bool:
        """Whether the tier has a shard with this digest."""
        record = read_record(self.files, name)
        try:
            size = (self.files.root / shard_at(name)).stat().st_size
        except OSError:
            return False
        return record is not None and record["digest"] == expected and record["bytes"] == size

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        """A shard's file, downloaded if it is not there with this digest (default: that in its index)."""
        wanted = digest or str(self.record(name)["digest"])
        if not self.has_copy(name, wanted):
            self._obtain(name, wanted)
        path = self.files.root / shard_at(name)
        with contextlib.suppress(OSError):  # another user's
            os.utime(path)  # it is used now
        return path

    def _fetch_shard(self, name: str, expected: str) -> int:
        """Download a shard and check it. A wrong digest is tried once more: the object may just have been replaced."""
        path = shard_at(name)
        data = self.object(path)
        if bytes_digest(data) != expected and bytes_digest(data := self.object(path)) != expected:
            place = self._storage.address_of(path)
            raise CorruptError(
                f"{place}: its bytes ({len(data):,}) are not those that the dataset was committed with. {REPAIR}"
            )
        index = self.index(name)
        if not index.describes(data):
            self.files.delete(shard_at(name, "index"))
            raise CorruptError(f"{self._storage.address_of(path)}: its index does not describe it. {REPAIR}")
        self._write(name, data, {**index.record, "digest": expected, "bytes": len(data)})
        return len(data)

    def shard_data(self, name: str, digest: str) -> bytes:
        """Straight from the store, unless there is a copy; keeps none."""
        is_here = self.has_copy(name, digest)
        return read_regular(self.files.root / shard_at(name)) if is_here else self.object(shard_at(name))

    def _write(self, name: str, data: Any, record: dict[str, Any]) -> None:
        """Write a copy, and then the record that says which digest it was compared with."""
        self.files.write(shard_at(name), data, "copy", durable=False)
        self.files.write(shard_at(name, "json"), seal(b"note", record), "note", durable=False)

    def forget(self, name: str) -> None:
        for kind in ("arrow", "json", "index"):
            self.files.delete(shard_at(name, kind))

    def reread(self, name: str) -> tuple[bytes | None, str | None]:
        self.forget(name)
        data = self._storage.read(shard_at(name))
        if data is None:
            return None, None
        try:
            index = self.index(name)
        except CorruptError as error:
            return data, str(error)
        if not index.describes(data) or index.record["digest"] != bytes_digest(data):
            return data, "its index does not describe it"
        self._write(name, data, index.record)
        self._grown(len(data))
        return data, None

    def writer(self, name: str) -> ShardWriter:
        """This user, or one of whom only the host is known."""
        try:
            index = self.index(name)
        except CorruptError:
            return ShardWriter(-1, "an unknown user", "")
        host = host_name(index.record.get("host"))
        return ShardWriter(os.geteuid(), "you", host) if index.is_own else ShardWriter(-1, "another user", host)

    def is_own(self, name: str) -> bool:
        try:
            return self.index(name).is_own
        except CorruptError:
            return False

    def is_own_manifest(self, key: str) -> bool:
        return False

    def unchecked(self, names: list[str], *, manifest_checked: bool) -> list[str]:
        if manifest_checked:
            return []
        self.fetch(names)
        return [name for name in names if not self.is_own(name)]

    def keep_checked(self, name: str, data: bytes) -> None:
        pass  # the tier has them

    def _obtain(self, name: str, expected: str) -> None:
        """Download a shard with this digest. Concurrent calls, also of other processes, share one download."""
        while True:
            with self._lock:
                running = self._running.get(name)
                if running is None:
                    mine = self._running[name] = Future[None]()
            if running is None:
                break
            running.exception()  # waits; what it raised is raised by our own attempt below, if it fails too
        try:
            self._download(name, expected)
        finally:
            with self._lock:
                del self._running[name]
            mine.set_result(None)

    def _download(self, name: str, expected: str) -> None:
        with self._lock:
            self._claims = self._claims or Claims(self.files)
        while not self.has_copy(name, expected):
            if self._claims.take(name):
                try:
                    if not self.has_copy(name, expected):  # else another process was faster
                        size = self._fetch_shard(name, expected)
                        with self._lock:
                            self.downloaded += size
                        self._grown(size)
                finally:
                    self._claims.release(name)
                return
            time.sleep(POLL)

    def _grown(self, size: int) -> None:
        """Account for a new file, and delete old ones if there is too little room."""
        with self._lock:
            self._bytes += size
            if time.monotonic() - self._measured <= SCAN_INTERVAL and not self._is_full():
                return
            kept = self._scan()
            if self._is_full():
                self._trim(kept)

    def _is_full(self) -> bool:
        return (self.max_bytes is not None and self._bytes > self.max_bytes) or _shortage(self.files.root) > 0

    def _scan(self) -> list[_Kept]:
        groups: dict[str, list[Entry]] = {}
        with contextlib.suppress(StoreError):
            for entry in self.files.entries("shards"):
                groups.setdefault(entry.name.partition(".")[0], []).append(entry)
        kept = [
            _Kept(max(e.modified for e in found), sum(e.size for e in found), name, tuple(e.path for e in found))
            for name, found in groups.items()
        ]
        self._bytes, self._measured = sum(entry.bytes for entry in kept), time.monotonic()
        return kept

    def _trim(self, kept: list[_Kept]) -> None:
        above = self._bytes - int(self.max_bytes * TRIM_TO) if self.max_bytes is not None else 0
        short = _shortage(self.files.root)
        mapped = {path.stem for path in self._mapped()}
        for entry in sorted(kept):
            fresh = time.time() - entry.used < FRESH  # fetched ahead: if others fill the disk, keep it until its use
            if above <= 0 and (short <= 0 or fresh):
                break
            if entry.shard in mapped or entry.shard in self._running:
                continue
            with contextlib.suppress(OSError):
                for path in entry.files:
                    self.files.delete(path)
                above, short, self._bytes = above - entry.bytes, short - entry.bytes, self._bytes - entry.bytes


def _shortage(folder: Path) -> int:
    """Bytes missing to the part of the disk that should stay free."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return 0
    return int(disk.total * RESERVE) - disk.free
