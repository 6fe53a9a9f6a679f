"""A bounded folder of pieces of objects, which the coordinating process reads once and its workers read again.

Finding slices takes every byte of an object; the workers that prepare them would otherwise request these bytes a second
time. The spool only saves requests: a piece that is missing (evicted, another host, a full disk) is read from its
store. It lies in the temporary folder, and is removed when the process ends, or by a later one if it was killed.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
import threading
from collections import deque
from pathlib import Path

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
