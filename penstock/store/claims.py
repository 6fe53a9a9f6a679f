"""Claims: who works on which slice, so that many processes and hosts share one build without talking to each other.

A claim is a file made with O_EXCL; its maker touches it every few seconds. A claim of a dead process of this host is
taken over at once; one of another host when its file has not been touched for `EXPIRY` by the file server's own clock.
Losing or stealing a claim only repeats work: shards are the same whoever makes them.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from penstock.store.files import explained, make_folder, writer_is_dead, writer_name

HEARTBEAT = 5.0  # seconds between touches
EXPIRY = 120.0  # seconds without a touch; generous, because NFS clients cache attributes for up to a minute


class Claims:
    """The claims this process holds."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        make_folder(folder, like=folder.parent)

    def _path(self, name: str) -> Path:
        return self._folder / name

    def take(self, name: str) -> bool:
        """Claim a slice; False when somebody else, alive as far as we know, has it."""
        path = self._path(name)
        for _ in range(2):
            try:
                with explained(path, "can't be written"):
                    descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
            except Exception as error:
                if not isinstance(error.__cause__, FileExistsError):
                    raise
                if not self._abandoned(path):
                    return False
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()
                continue
            with os.fdopen(descriptor, "w") as file:
                file.write(writer_name())
            with self._lock:
                self._held.add(name)
                self._start()
            return True
        return False

    def release(self, name: str) -> None:
        """Give a claim back; the shard is there, or somebody else shall try."""
        with self._lock:
            self._held.discard(name)
        with contextlib.suppress(OSError):
            self._path(name).unlink(missing_ok=True)

    def close(self) -> None:
        """Give everything back."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
        for name in list(self._held):
            self.release(name)

    def _abandoned(self, path: Path) -> bool:
        try:
            owner = path.read_text()
            if owner and writer_is_dead(owner):
                return True
            return self._server_now() - path.stat().st_mtime > EXPIRY
        except FileNotFoundError:
            return True

    def _server_now(self) -> float:
        """The file server's clock: the time it gives to a file touched right now."""
        probe = self._folder / f".clock.{writer_name()}"
        probe.touch()
        now = probe.stat().st_mtime
        with contextlib.suppress(OSError):
            probe.unlink()
        return now

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
                    os.utime(self._path(name))
