"""The objects of a cache in an object store, by their paths in the cache. Errors are StoreErrors.

Requests that fail in passing are retried by the client. Conditional writes whose answer got lost are retried here: the
caller compares contents when a retried write finds an object, because that may be its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from penstock.errors import ObjectError, ObjectMissing, StoreError
from penstock.objects import ObjectInfo, open_object_store

T = TypeVar("T")
V = TypeVar("V")

THREADS = 16  # requests at a time, where many objects are read or listed
CLOCK = "clock"  # the object whose modification time shows the store's clock
CLOCK_INTERVAL = 30.0  # seconds between readings of it
CONDITIONAL_PAUSES = (0.5, 2.0)  # seconds before a conditional write is tried again


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    try:
        yield
    except ObjectError as error:
        raise StoreError(f"{error} Finished slices are kept.") from error


def _bytes(data: Any) -> memoryview:
    """Any buffer as unsigned bytes; those of Arrow are signed."""
    return memoryview(data).cast("B")


class CacheObjects:
    """The objects below a URL."""

    def __init__(self, url: str) -> None:
        self.url = url
        with _explained():
            self._store, path = open_object_store(url)
        self._prefix = f"{path.strip('/')}/" if path.strip("/") else ""
        self._offset = 0.0  # the store's time minus our monotonic clock
        self._read_at: float | None = None

    def address(self, path: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{path}"

    def head(self, path: str) -> ObjectInfo | None:
        """What the store says of an object; None if there is none."""
        with _explained():
            try:
                return self._store.head(self._prefix + path)
            except ObjectMissing:
                return None

    def get(self, path: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        with _explained():
            try:
                return self._store.get(self._prefix + path)
            except ObjectMissing:
                return None

    def put(self, path: str, data: Any) -> None:
        """Write an object, whether or not it exists."""
        with _explained():
            self._store.put(self._prefix + path, _bytes(data))

    def create(self, path: str, data: Any) -> bool:
        """Write an object unless it exists; False if it does, also if an earlier try of this call has written it."""
        return self._conditional(lambda: self._store.put(self._prefix + path, _bytes(data), if_absent=True))

    def replace(self, path: str, data: Any, found: ObjectInfo) -> bool:
        """Write an object if it is still what `head` found; False if not, also if an earlier try has written it."""
        etag, version = found.etag, found.version
        return self._conditional(lambda: self._store.replace(self._prefix + path, _bytes(data), etag, version))

    def delete(self, path: str) -> None:
        """Delete an object, if it exists."""
        with _explained():
            self._store.delete(self._prefix + path)

    def objects(self, folder: str) -> dict[str, ObjectInfo]:
        """The objects below a folder, by their paths in the cache."""
        with _explained():
            found = list(self._store.list((self._prefix + folder).rstrip("/")))
        return {info.path.removeprefix(self._prefix): info for info in found}

    def few_objects(self, folder: str, most: int) -> dict[str, ObjectInfo] | None:
        """The objects below a folder, or None if there are more than `most`."""
        with _explained():
            found = self._store.list_some((self._prefix + folder).rstrip("/"), most)
        return None if found is None else {info.path.removeprefix(self._prefix): info for info in found}

    def names(self, folder: str = "") -> list[str]:
        """The names of objects and subfolders directly in a folder."""
        base = (self._prefix + folder).rstrip("/")
        with _explained():
            objects, folders = self._store.children(base)
        paths = [*(info.path for info in objects), *folders]
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def each(self, act: Callable[[T], V], items: Iterable[T], threads: int = THREADS) -> list[V]:
        """Apply a function to many items at a time; results are in order, and the first error is raised."""
        given = list(items)
        if len(given) <= 1:
            return [act(item) for item in given]
        with ThreadPoolExecutor(min(threads, len(given)), "penstock-remote") as pool:
            futures = [pool.submit(act, item) for item in given]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    # -- time -----------------------------------------------------------------------------------------------------

    def now(self) -> float:
        """The store's current time in seconds, to compare with modification times of objects."""
        ours = time.monotonic()
        if self._read_at is None or ours - self._read_at > CLOCK_INTERVAL:
            self._offset, self._read_at = self._store_time() - ours, ours
        return ours + self._offset

    def age(self, info: ObjectInfo) -> float:
        """Seconds since an object was written, by the store's clock."""
        return self.now() - info.modified.timestamp() if info.modified is not None else 0.0

    def _store_time(self) -> float:
        with contextlib.suppress(StoreError):  # read-only for us: use our own clock
            self.put(CLOCK, b"")
            found = self.head(CLOCK)
            if found is not None and found.modified is not None:
                return found.modified.timestamp()
        return time.time()

    def _conditional(self, write: Callable[[], bool]) -> bool:
        for pause in CONDITIONAL_PAUSES:
            try:
                return write()
            except ObjectError:  # the client retries only requests that may be repeated
                time.sleep(pause)
        with _explained():
            return write()
