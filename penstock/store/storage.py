"""What a cache needs of the place where its files are: a local folder or an object store.

Claims, leases, garbage collection and listings are written once, in terms of `Storage`. Paths are relative to the
cache, with slashes. A file that is missing is None or False; another failure is an OSError (of a folder) or a
StoreError. Times are those of the server's clock.
"""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import orjson

from penstock.digests import FORMAT_VERSION, NAME, check_format, validate_name
from penstock.errors import CorruptError, StoreError
from penstock.store.files import explain_os_errors, writer_name

T = TypeVar("T")
V = TypeVar("V")

CLOCK_INTERVAL = 30.0  # seconds between readings of the server's clock
COLLECTION_EXPIRY = 600.0  # seconds after which what an object store's `gc` set aside is taken for that of a dead one

MARKER = "penstock-cache.json"
FOLDERS = {"claims", "clock", "collections", "datasets", "leases", "memo", "retired", "shards", "tmp", "tokenizers"}
FILE_SYSTEM_ENTRIES = {"lost+found", ".snapshot"}  # created by file systems themselves
_RECHECK_PAUSES = (0.05, 0.2, 0.5)  # seconds; an NFS client may see another host's new files with a delay
WRITER = r"\w+-[0-9a-f]{8}\.\d+\.(?:\d+|unknown)"
TEMPORARY = re.compile(rf"{WRITER}\.[0-9a-f]{{12}}")
ASIDE = re.compile(rf"{WRITER}\.aside\.(?P<name>{NAME})(?P<suffix>\.arrow|\.json|\.bad|\.index)")  # by `gc`
OWN = re.compile(  # the paths at which Penstock creates files
    "|".join(
        (
            TEMPORARY.pattern,  # the marker while it is written
            rf"tmp/{TEMPORARY.pattern}",
            rf"tmp/{WRITER}\.aside\.{NAME}\.(?:arrow|json|bad|index)",
            rf"claims/{NAME}",
            rf"(?:leases|collections)/{TEMPORARY.pattern}",
            rf"retired/{NAME}\.[0-9a-f]{{12}}\.arrow",
            r"shards/(?P<shard>[0-9a-f]{2})/b3-(?P=shard)[0-9a-f]{62}\.(?:arrow|json|bad|index)",
            rf"datasets/{NAME}/(?:manifest\.json|notes\.json|quarantine\.jsonl|used)",
            rf"datasets/{NAME}/reference/{NAME}\.npy",
            rf"tokenizers/{NAME}\.json",
            r"inputs/(?P<input>[0-9a-f]{2})/b3-(?P=input)[0-9a-f]{62}\.(?:jsonl|arrow|data)",
            r"memo/(?P<memo>[0-9a-f]{2})/b3-(?P=memo)[0-9a-f]{62}\.json",
            rf"memo/dates/{NAME}",
            rf"checked/{NAME}",  # in the user's state folder, see `store.trust`
        )
    )
)


class Entry(NamedTuple):
    """A file as its server describes it."""

    path: str
    size: int
    modified: float  # seconds
    changed: float  # when it was last written or renamed
    version: object  # changes when the file is written again; the same whether listed or asked for
    generation: str = ""  # of an object, where its store has one; only from `stat`

    @property
    def name(self) -> str:
        """The file's name without its folder."""
        return self.path.rpartition("/")[2]


class SetAside(Protocol):
    """Files that `gc` is about to delete. A build that leases one of their shards sees it missing, or waits."""

    refused: int  # files that could not be set aside

    def holds(self, paths: Iterable[str]) -> bool:
        """Whether any of these files is set aside."""
        ...

    def delete(self, paths: Iterable[str]) -> None:
        """Delete files that were set aside."""
        ...

    def restore(self, paths: Iterable[str]) -> None:
        """Put files back; a file that was written in the meantime stays."""
        ...

    def close(self) -> None:
        """Ends the collection."""
        ...


class Storage(Protocol):
    """The files of a cache, in a folder or in an object store."""

    is_folder: bool  # else an object store, where nothing can be renamed, and files are touched by writing them again
    renewal: float  # seconds between renewals of a claim
    _offset: float  # the server's time minus our monotonic clock
    _read_at: float | None

    @property
    def address(self) -> str:
        """The folder or URL."""

    def address_of(self, path: str) -> str:
        """The path or URL of a file, for messages."""

    def read(self, path: str) -> bytes | None:
        """The bytes of a file."""

    def stat(self, path: str) -> Entry | None:
        """What the server says of a file."""

    def entries(self, folder: str) -> list[Entry]:
        """Penstock's files below a folder as of now, sorted; StoreError if they can't be listed completely."""

    def shards(self) -> dict[str, Entry]:
        """The shards that are there, marked as damaged or not, by name."""

    def names(self, folder: str = "") -> Sequence[str]:
        """All names directly in a folder, also of other files."""

    def write(self, path: str, data: Any, point: str, *, durable: bool = True) -> None:
        """Write a file; readers see the old or the new bytes, never a mixture. `point` names it for crash tests.

        Disposable files need not be `durable`: after a power failure they may be empty, which readers detect.
        """

    def create(self, path: str, data: bytes, point: str) -> bool:
        """Write a file unless it exists; at most one of many callers gets True. A lost answer may give False."""

    def replace(self, path: str, data: bytes, found: Entry, point: str) -> bool:
        """Write a file if it still is what `stat` found. A lost answer may give False."""

    def renew(self, path: str, data: bytes, renewed: bytes) -> bytes | None:
        """Make a file with these bytes young, where that takes a write with others; None if it has others already."""

    def holds(self, path: str, size: int, digest: str) -> bool:
        """Whether a file is there with this digest. Of an object, only its size is compared."""

    def touch(self, path: str, *, create: bool = False) -> None:
        """Set a file's modification time to now."""

    def delete(self, path: str) -> bool:
        """Delete one of Penstock's files; False if it is known to be gone already."""

    def remove_folder(self, folder: str) -> None:
        """Remove a folder if it is empty, where folders exist."""

    def set_aside(self, paths: Collection[str]) -> SetAside:
        """Keep builds from relying on files that are about to be deleted."""

    def about_to_go(self, names: Collection[str]) -> bool:
        """Whether a `gc` that may still run has set one of these shards aside without hiding it."""

    def has_shard(self, name: str, *, now: bool = False) -> bool:
        """Whether a shard is there, readable and not marked as damaged; unless `now`, perhaps as of a moment ago."""

    def refresh(self, names: Iterable[str]) -> None:
        """Bring up to date what `has_shard` knows of these shards."""

    def lists_shards(self, names: Collection[str]) -> bool:
        """Whether all shards are there at this moment, by listing their folders."""

    def put_shard(self, name: str, data: Any, digest: str) -> None:
        """Commit a shard and remove its mark of damage. One with the same bytes may stay; readers keep another."""

    def make_cache(self, marker: bytes) -> None:
        """Make an empty folder or URL a cache. Safe to run concurrently: every process writes the same bytes."""

    def check_writable(self) -> None:
        """Raise StoreError if no files can be created."""

    def each(self, act: Callable[[T], V], items: Iterable[T]) -> list[V]:
        """Apply a function to many items, at the same time if that is quicker; results are in order."""

    def _server_time(self) -> float:
        """The server's current time, or ours if it can't be read."""

    def now(self) -> float:
        """The server's current time in seconds; the host's own clock may differ."""
        ours = time.monotonic()
        if self._read_at is None or ours - self._read_at > CLOCK_INTERVAL:
            self._offset, self._read_at = self._server_time() - ours, ours
        return ours + self._offset

    def age(self, entry: Entry) -> float:
        """Seconds since a file was written or touched.

        A time in the future counts as far in the past: NFS 3 creates a file exclusively by giving it a random time,
        which stays if the client dies before it sets the right one.
        """
        return abs(self.now() - entry.modified)


def temporary_name() -> str:
    """A unique name that identifies its writer."""
    return f"{writer_name()}.{secrets.token_hex(6)}"


def shard_at(name: str, kind: str = "arrow") -> str:
    """The path of a shard, or of what is beside it: its record (`json` or `index`) or its mark of damage (`bad`)."""
    return f"shards/{validate_name(name)[3:5]}/{name}.{kind}"


def is_cache(storage: Storage) -> bool:
    """Whether a folder or URL is a cache. False if it is missing or empty; StoreError if it holds anything else."""
    for pause in (*_RECHECK_PAUSES, None):
        if has_marker(storage):
            return True
        names = _content(storage)
        if not names:
            return False
        if pause is None or names - FOLDERS - {MARKER}:
            break
        time.sleep(pause)  # looks like a cache that another process is just creating
    if has_marker(storage):
        return True
    others = "files" if storage.is_folder else f"objects ({min(names - {MARKER}, default='')}, …)"
    raise StoreError(
        f"{storage.address} is not a Penstock cache: it holds other {others} and no {MARKER}. Nothing was changed. "
        f"Choose {'a new or empty folder' if storage.is_folder else 'an empty prefix'} with --cache or PENSTOCK_CACHE."
    )


def has_marker(storage: Storage) -> bool:
    """Whether there is a marker of the format version that this Penstock reads."""
    place = storage.address_of(MARKER)
    with explain_os_errors(Path(place), "can't be read"):
        try:
            data = storage.read(MARKER)
        except NotADirectoryError:
            return False
    if data is None:
        return False
    try:
        value = orjson.loads(data)
    except orjson.JSONDecodeError:
        value = None
    if not isinstance(value, dict):
        written = f"""{{"format":{FORMAT_VERSION}}}"""
        command = f"echo '{written}' > {place}" if storage.is_folder else written
        raise CorruptError(f"{place}: the marker is damaged. If it is that of a Penstock cache, put it back: {command}")
    check_format(value.get("format"), place)
    return True


def _content(storage: Storage) -> set[str]:
    with explain_os_errors(Path(storage.address), "can't be read"):
        try:
            names = set(storage.names())
        except (FileNotFoundError, NotADirectoryError):
            return set()
    return {name for name in names - FILE_SYSTEM_ENTRIES if not TEMPORARY.fullmatch(name)}
