"""An object named by a URL, with the part of `Path` that the readers of sources use.

The size and ETag are those found at the start of the build, and every request names the ETag: bytes of two versions are
never mixed, and a worker reads the version that was planned. `open` reads ahead in pieces and keeps them in the spool;
`open_range` and `read_at` request exactly the bytes asked for, unless the spool has them.
"""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote_from_bytes, unquote_to_bytes

from blake3 import blake3

from penstock.addresses import scheme_of
from penstock.errors import ObjectError, RangesUnsupported
from penstock.objects import PIECE_BYTES, PIECES_AHEAD, ObjectInfo, open_object_store
from penstock.prepare.sources.joined import JoinedPath

# ---- spool -----------------------------------------------------------------------------------------------------------
# A bounded folder of pieces of objects, which the coordinating process reads once and its workers read again.
#
# Finding slices takes every byte of an object; the workers that prepare them would otherwise request these bytes a
# second time. The spool only saves requests: a piece that is missing (evicted, another host, a full disk) is read from
# its store. It lies in the temporary folder, and is removed when the process ends, or by a later one if it was killed.


SPOOL_BYTES = 1 << 30
PREFIX = "penstock-spool-"
_spools: dict[int, Spool] = {}  # by process
_creating = threading.Lock()


class Spool:
    """Pieces by name. The oldest are removed once all together exceed the limit."""

    def __init__(self, folder: Path, limit: int = SPOOL_BYTES) -> None:
        self.folder = folder
        self._limit = limit
        self._pieces: deque[tuple[str, int]] = deque()
        self._size = 0

    def reserve(self, size: int) -> None:
        """Raise the limit, so that this much remains after it was written."""
        self._limit = max(self._limit, 2 * size)

    def clear(self) -> None:
        """Remove all pieces."""
        while self._pieces:
            (self.folder / self._pieces.popleft()[0]).unlink(missing_ok=True)
        self._size, self._limit = 0, SPOOL_BYTES

    def put(self, name: str, data: bytes) -> None:
        """Keep a piece, if the disk allows it."""
        path = self.folder / name
        temporary = path.with_name(f"{name}.new")
        try:
            temporary.write_bytes(data)
            temporary.rename(path)
        except OSError:  # a full disk: the piece will be read from its store
            with contextlib.suppress(OSError):
                temporary.unlink()
            return
        self._pieces.append((name, len(data)))
        self._size += len(data)
        while self._size > self._limit:
            oldest, size = self._pieces.popleft()
            self._size -= size
            (self.folder / oldest).unlink(missing_ok=True)


def read_piece(folder: str, name: str) -> bytes | None:
    """A piece from a folder of another process, or from this process's own; None if it is in neither."""
    own = _spools.get(os.getpid())
    for place in (folder, own and own.folder):
        with contextlib.suppress(OSError):
            if place:
                return Path(place, name).read_bytes()
    return None


def own_spool() -> Spool:
    """The spool of this process, created on first use."""
    process = os.getpid()
    with _creating:
        if process not in _spools:  # also in a fork
            _sweep()
            folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{process}-"))
            atexit.register(_remove, folder, process)
            _spools[process] = Spool(folder)
    return _spools[process]


def clear_spool() -> None:
    """Remove what this process has spooled, once no worker needs it."""
    if os.getpid() in _spools:
        own_spool().clear()


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a fork
        shutil.rmtree(folder, ignore_errors=True)


def _sweep() -> None:
    """Remove the spools of our processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        process = folder.name.removeprefix(PREFIX).partition("-")[0]
        with contextlib.suppress(OSError):
            if process.isdigit() and folder.stat().st_uid == os.getuid() and not _is_alive(int(process)):
                shutil.rmtree(folder, ignore_errors=True)


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


# ---- path ------------------------------------------------------------------------------------------------------------


HEAD_BYTES = 1 << 16  # the first piece is small, since it is all that detecting the kind of a file takes
FILE_URL = "file://"
PRELOAD_BYTES = 64 << 20  # a range up to this size is requested as a whole


class ByteStore(Protocol):
    """What reading sources takes of a store."""

    def url(self, path: str) -> str: ...

    def head(self, path: str) -> ObjectInfo: ...

    def get_range(self, path: str, start: int, end: int, etag: str = "") -> bytes: ...

    def get_stream(self, path: str) -> Iterator[bytes]: ...


class ObjectIdentity(NamedTuple):
    """Distinguishes two versions of an object without reading it."""

    url: str
    size: int
    etag: str
    version: str


@dataclass(frozen=True, slots=True)
class ObjectPath:
    """An object in the version that was found. `spool` is the folder with pieces that were read already."""

    url: str
    size: int
    etag: str = ""
    version: str = ""
    modified: float = 0.0
    spool: str = ""

    @classmethod
    def found(cls, url: str, info: ObjectInfo) -> ObjectPath:
        """An object, as its store describes it."""
        modified = info.modified.timestamp() if info.modified else 0.0
        return cls(url, info.size, info.etag, info.version, modified, str(own_spool().folder))

    def __str__(self) -> str:
        store, path = store_of(self.url)
        return store.url(path)

    @property
    def name(self) -> str:
        """The last part of the path."""
        return PurePosixPath(store_of(self.url)[1]).name

    @property
    def is_vouched(self) -> bool:
        """Whether the store vouches, by a strong ETag, that equal identities mean equal bytes."""
        return bool(self.etag) and not self.etag.startswith("W/")

    def identity(self) -> ObjectIdentity:
        """The identity of the version that was found."""
        return ObjectIdentity(self.url, self.size, self.etag or str(self.modified), self.version)

    def current(self) -> ObjectIdentity:
        """The identity that the object has now."""
        store, path = store_of(self.url)
        info = store.head(path)
        modified = info.modified.timestamp() if info.modified else 0.0
        return ObjectIdentity(self.url, info.size, info.etag or str(modified), info.version)

    def to_json(self) -> dict[str, Any]:
        """The path as JSON values, for a worker."""
        return asdict(self)

    # -- reading ----------------------------------------------------------------------------------------------------

    def open(self, mode: str = "rb", buffering: int = -1) -> PieceReader:
        """Open the object to read all of it, in pieces that are requested ahead and kept in the spool."""
        return PieceReader(self)

    def open_range(self, start: int = 0, end: int = 0) -> RangeReader:
        """Open the object to read a part of it. Bytes start:end are requested at once, if they fit in memory."""
        return RangeReader(self, start, end)

    def read_at(self, start: int, end: int) -> bytes:
        """Bytes start:end, from the spool if all of them are there, else by a range request."""
        indices = range(_piece_at(start), _piece_at(max(start, end - 1)) + 1)
        found = [piece for piece in map(self._spooled, indices) if piece is not None]
        if len(found) < len(indices):
            store, path = store_of(self.url)
            try:
                return store.get_range(path, start, min(end, self.size), self.etag)
            except RangesUnsupported:
                found = [self.piece(index) for index in indices]
        first = _piece_start(indices[0])
        return (found[0] if len(found) == 1 else b"".join(found))[start - first : end - first]

    def piece(self, index: int) -> bytes:
        """A piece of the object, which is kept in the spool."""
        found = self._spooled(index)
        if found is not None:
            return found
        start, end = _piece_start(index), min(_piece_start(index + 1), self.size)
        store, path = store_of(self.url)
        try:
            data = store.get_range(path, start, end, self.etag)
        except RangesUnsupported:
            with _SPOOLING:
                return self._spooled(index) or self._downloaded(index)
        with _SPOOLING:
            own_spool().put(self._piece_name(index), data)
        return data

    def prefetch(self, start: int, end: int) -> None:
        """Read bytes start:end into the spool, for several workers to share."""
        own_spool().reserve(end - start)
        with ThreadPoolExecutor(PIECES_AHEAD) as threads:
            list(threads.map(self.piece, range(_piece_at(start), _piece_at(end - 1) + 1)))

    def _spooled(self, index: int) -> bytes | None:
        """A piece that the coordinating process or this one has read."""
        return read_piece(self.spool, self._piece_name(index))

    def _piece_name(self, index: int) -> str:
        bounds = f"{_piece_start(index)}-{_piece_start(index + 1)}"  # should another version cut pieces differently
        return f"{blake3(repr(self.identity()).encode()).hexdigest()[:24]}.{bounds}"

    def _downloaded(self, wanted: int) -> bytes:
        """Download the whole object into the spool, since the server serves no ranges; returns one piece of it."""
        spool = own_spool()
        spool.reserve(self.size)
        store, path = store_of(self.url)
        held, index, kept = bytearray(), 0, b""
        for chunk in store.get_stream(path):
            held += chunk
            while len(held) >= (size := min(_piece_start(index + 1), self.size) - _piece_start(index)) > 0:
                piece = bytes(held[:size])
                del held[:size]
                kept = piece if index == wanted else kept
                spool.put(self._piece_name(index), piece)
                index += 1
        if _piece_start(index) < self.size or held:
            raise ObjectError(f"{self}: its size changed while it was read. Run again once nothing writes to it.")
        return kept


SourcePath = Path | ObjectPath | JoinedPath
_SPOOLING = threading.Lock()


def store_of(url: str) -> tuple[ByteStore, str]:
    """The store of a URL, and the path in it."""
    if scheme_of(url) == "hf":
        from penstock.prepare.sources.hub import open_hub_store

        return open_hub_store(url)
    return open_object_store(url)


def is_local(path: SourcePath) -> bool:
    """Whether a file, or a run of files, is on this machine."""
    return isinstance(path.members[0] if isinstance(path, JoinedPath) else path, Path)


def path_to_json(path: SourcePath) -> Any:
    """A path as JSON values; of a run of files its name, since its slices carry their data."""
    if isinstance(path, JoinedPath):
        return path.name
    return path.to_json() if isinstance(path, ObjectPath) else text_of_path(path)


def path_from_json(value: Any) -> SourcePath:
    """The path that `path_to_json` wrote."""
    return _local_path(value) if isinstance(value, str) else ObjectPath(**value)


def text_of_path(path: Path) -> str:
    """A path as text that JSON can hold: one with bytes that are not UTF-8 becomes a file:// URL."""
    text = str(path)
    return text if is_utf8(text) else FILE_URL + quote_from_bytes(os.fsencode(path.absolute()))


def _local_path(text: str) -> Path:
    is_url = text.startswith(FILE_URL)
    return Path(os.fsdecode(unquote_to_bytes(text.removeprefix(FILE_URL)))) if is_url else Path(text)


def recorded_source(entry: Mapping[str, Any]) -> SourcePath:
    """The path of a source noted beside a dataset."""
    if (members := entry.get("members")) is None:
        return recorded_path(entry["path"])
    return JoinedPath(_Recorded(members["paths"]), members["names"], members["rows"])


class _Recorded(Sequence[Any]):
    """Paths noted beside a dataset, of which only those are looked up that are read."""

    def __init__(self, texts: list[str]) -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, place: int | slice) -> Any:
        found = self._texts[place]
        return recorded_path(found) if isinstance(found, str) else _Recorded(found)


def recorded_path(text: str) -> Path | ObjectPath:
    """The path noted beside a dataset; an object is looked up as it is now."""
    if not scheme_of(text) or text.startswith(FILE_URL):
        return _local_path(text)
    store, path = store_of(text)
    return ObjectPath.found(text, store.head(path))


def is_utf8(name: str) -> bool:
    """Whether a name from the file system is UTF-8 text. Python keeps other bytes as surrogates."""
    return name.isascii() or not any("\udc80" <= c <= "\udcff" for c in name)


def printable_name(name: str) -> str:
    """A name from the file system as text: bytes that are not UTF-8 become escapes such as `\\xe9`."""
    return name if is_utf8(name) else os.fsencode(name).decode(errors="backslashreplace")


def _piece_at(offset: int) -> int:
    return 0 if offset < HEAD_BYTES else 1 + (offset - HEAD_BYTES) // PIECE_BYTES


def _piece_start(index: int) -> int:
    return 0 if index == 0 else HEAD_BYTES + (index - 1) * PIECE_BYTES


class _Reader(io.RawIOBase):
    """A file-like view of an object; reads are complete, as pyarrow expects them."""

    def __init__(self, path: ObjectPath) -> None:
        super().__init__()
        self._path = path
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._path.size}[whence]
        return self._position

    def read(self, size: int | None = -1) -> bytes:
        left = max(0, self._path.size - self._position)
        count = left if size is None or size < 0 else min(size, left)
        data = self._read(self._position, self._position + count) if count else b""
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        data = self.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def _read(self, start: int, end: int) -> bytes:
        raise NotImplementedError


class PieceReader(_Reader):
    """Reads an object from the start, or most of it, requesting ahead while it is read in order."""

    def __init__(self, path: ObjectPath) -> None:
        super().__init__(path)
        self._last = -1
        self._data = b""
        self._ahead: dict[int, Future[bytes]] = {}
        self._window = 0
        self._threads: ThreadPoolExecutor | None = None

    def reserve(self, size: int) -> None:
        """Let the spool keep this much of what is read from now on."""
        own_spool().reserve(size)

    def _read(self, start: int, end: int) -> bytes:
        parts = []
        while start < end:
            index = _piece_at(start)
            piece = self._piece(index)
            first = _piece_start(index)
            parts.append(piece[start - first : end - first])
            start = first + len(piece)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _piece(self, index: int) -> bytes:
        if index != self._last:
            in_order = index == self._last + 1 and index > 0
            self._window = min(max(1, 2 * self._window), PIECES_AHEAD) if in_order else 0
            waiting = self._ahead.pop(index, None)
            self._request(range(index + 1, index + 1 + self._window))
            self._data = self._path.piece(index) if waiting is None else waiting.result()
            self._last = index
        return self._data

    def _request(self, pieces: range) -> None:
        for index in pieces:
            if index not in self._ahead and _piece_start(index) < self._path.size:
                self._threads = self._threads or ThreadPoolExecutor(PIECES_AHEAD, "penstock-objects")
                self._ahead[index] = self._threads.submit(self._path.piece, index)

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
        super().close()


class RangeReader(_Reader):
    """Reads parts of an object, each by a request of its own, besides ranges that are requested at once."""

    def __init__(self, path: ObjectPath, start: int, end: int) -> None:
        super().__init__(path)
        self._loaded: list[tuple[int, bytes]] = []
        self.preload([(start, end)])

    def preload(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Request ranges now and in parallel, in place of the earlier ones, unless they are too large to be kept."""
        self._loaded.clear()
        if not 0 < sum(end - start for start, end in ranges) <= PRELOAD_BYTES:
            return
        with ThreadPoolExecutor(PIECES_AHEAD, "penstock-objects") as threads:
            requests = [
                [
                    threads.submit(self._path.read_at, first, min(first + PIECE_BYTES, end))
                    for first in range(start, end, PIECE_BYTES)
                ]
                for start, end in ranges
            ]
            for (start, _), parts in zip(ranges, requests, strict=True):
                self._loaded.append((start, b"".join(part.result() for part in parts)))

    def _read(self, start: int, end: int) -> bytes:
        for first, data in self._loaded:
            if first <= start and end <= first + len(data):
                return data[start - first : end - first]
        return self._path.read_at(start, end)
