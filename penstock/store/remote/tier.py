"""The local tier of a cache in an object store: a cache folder that holds the shards used last.

A shard is downloaded once per machine, however many processes want it at the same time; its bytes are compared with the
digest in the manifest before they get their name. When the tier outgrows its size, the shards that were used longest
ago are deleted, except those that this process has mapped. Deleting a file that another process has mapped is harmless
on a local file system: the process keeps its pages, and the space is freed when it lets go.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import NamedTuple

from penstock.store.claims import Claims
from penstock.store.tree import Tree

RESERVE = 0.05  # of the disk stays free, whatever the size of the tier
TRIM_TO = 0.9  # of its size, so that not every download deletes something
POLL = 0.02  # seconds between looks at a download of another process
FRESH = 300.0  # seconds since its last use for which a shard is kept although the disk is full
SCAN_INTERVAL = 30.0  # seconds after which the tier is measured again, since other processes fill it too


class _Kept(NamedTuple):
    used: float
    bytes: int
    path: Path  # of the shard
    files: tuple[Path, ...]  # the shard, its note and its index, as far as they are here


class Tier:
    """Downloads to a cache folder, and keeps its size."""

    def __init__(self, tree: Tree, max_bytes: int | None) -> None:
        self._tree = tree
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._running: dict[Path, Future[None]] = {}
        self._claims: Claims | None = None
        self._bytes = 0  # as far as this process knows
        self._measured = float("-inf")
        self.mapped: list[Callable[[], Iterable[Path]]] = []  # functions that name the files mapped by this process
        self.downloaded = 0  # bytes

    def obtain(self, path: Path, is_there: Callable[[], bool], download: Callable[[], int]) -> None:
        """Download a file unless it is there. Concurrent calls, also of other processes, share one download."""
        while True:
            with self._lock:
                running = self._running.get(path)
                if running is None:
                    mine = self._running[path] = Future[None]()
            if running is None:
                break
            running.exception()  # waits; what it raised is raised by our own attempt below, if it fails too
        try:
            self._download(path, is_there, download)
        finally:
            with self._lock:
                del self._running[path]
            mine.set_result(None)

    def _download(self, path: Path, is_there: Callable[[], bool], download: Callable[[], int]) -> None:
        with self._lock:
            self._claims = self._claims or Claims(self._tree)
        while not is_there():
            if self._claims.take(path.stem):
                try:
                    if not is_there():  # another process was faster
                        size = download()
                        with self._lock:
                            self.downloaded += size
                        self.grown(size)
                finally:
                    self._claims.release(path.stem)
                return
            time.sleep(POLL)

    def used(self, path: Path) -> None:
        """Record that a file is used now."""
        with contextlib.suppress(OSError):  # another user's
            os.utime(path)

    def grown(self, size: int) -> None:
        """Account for a new file, and delete old ones if there is too little room."""
        with self._lock:
            self._bytes += size
            if time.monotonic() - self._measured <= SCAN_INTERVAL and not self._is_full():
                return
            kept = self._scan()
            if not self._is_full():
                return
            self._trim(kept)

    def _is_full(self) -> bool:
        return (self.max_bytes is not None and self._bytes > self.max_bytes) or _shortage(self._tree.root) > 0

    def _scan(self) -> list[_Kept]:
        kept: list[_Kept] = []
        for folder in self._tree.folders(self._tree.root / "shards"):
            groups: dict[Path, list[Path]] = {}
            for path in self._tree.files(folder):
                groups.setdefault(path.with_suffix(".arrow"), []).append(path)
            for path, files in groups.items():
                with contextlib.suppress(OSError):
                    found = [file.lstat() for file in files]
                    used, size = max(entry.st_mtime for entry in found), sum(entry.st_size for entry in found)
                    kept.append(_Kept(used, size, path, tuple(files)))
        self._bytes, self._measured = sum(entry.bytes for entry in kept), time.monotonic()
        return kept

    def _trim(self, kept: list[_Kept]) -> None:
        above = self._bytes - int(self.max_bytes * TRIM_TO) if self.max_bytes is not None else 0
        short = _shortage(self._tree.root)
        mapped = {path for name in self.mapped for path in name()}
        for entry in sorted(kept):
            fresh = time.time() - entry.used < FRESH  # fetched ahead: if others fill the disk, keep it until its use
            if above <= 0 and (short <= 0 or fresh):
                break
            if entry.path in mapped or entry.path in self._running:
                continue
            with contextlib.suppress(OSError):
                for path in entry.files:
                    self._tree.remove(path)
                above, short, self._bytes = above - entry.bytes, short - entry.bytes, self._bytes - entry.bytes


def _shortage(folder: Path) -> int:
    """Bytes missing to the part of the disk that should stay free."""
    try:
        disk = shutil.disk_usage(folder)
    except OSError:
        return 0
    return int(disk.total * RESERVE) - disk.free
