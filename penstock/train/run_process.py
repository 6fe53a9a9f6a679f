"""A lock on the output folder: `OUTPUT/run.lock` names the process that trains there.

A lock left by a dead process on this host is taken over. Whether a process on another host is alive can't be
determined, so its lock must be removed by hand.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from penstock.errors import TrainError
from penstock.store.files import host_id, read_regular, writer_is_dead, writer_name
from penstock.store.local import NO_LINKS

log = logging.getLogger("penstock")
NAME = "run.lock"
ATTEMPTS = 10


@contextlib.contextmanager
def output_lock(output: Path) -> Iterator[None]:
    """Locks the folder, or raises TrainError. In a distributed run the first rank holds the lock for all."""
    if os.environ.get("RANK", "0") != "0":
        yield
        return
    path, own, is_new = output / NAME, writer_name(), not output.exists()
    _take(path, own)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if _owner(path) == own:
                path.unlink()
            if is_new:
                output.rmdir()  # fails unless the run left nothing there


def _take(path: Path, own: str) -> None:
    """Creates the lock by linking a complete draft, which fails if it exists; so it is never half-written."""
    draft = path.with_name(f".{NAME}.{own}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(own)
        for _ in range(ATTEMPTS):
            with contextlib.suppress(FileExistsError):
                _link(draft, path)
                return
            owner = _owner(path)
            if owner is not None and not writer_is_dead(owner):
                raise TrainError(_refusal(path, owner))
            _set_aside(path, owner, own)
    except OSError as error:
        raise TrainError(f"{path}: {error.strerror}. Choose another output folder.") from error
    finally:
        with contextlib.suppress(OSError):
            draft.unlink(missing_ok=True)
    raise TrainError(f"{path}: other processes keep taking the lock. Choose another output folder.")


def _link(draft: Path, path: Path) -> None:
    """Give the draft a second name, or raise FileExistsError. A file system without links gets a new file instead."""
    try:
        os.link(draft, path)
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        with path.open("x") as file:
            file.write(draft.read_text())


def _owner(path: Path) -> str | None:
    """The writer that holds the lock, or None."""
    try:
        return read_regular(path).decode(errors="replace").strip()
    except FileNotFoundError:
        return None


def _set_aside(path: Path, owner: str | None, own: str) -> None:
    """Removes the lock of a dead process by renaming it, which succeeds in only one of several processes."""
    if owner is None:
        return
    aside = path.with_name(f".{NAME}.{own}.old")
    with contextlib.suppress(FileNotFoundError):
        path.rename(aside)
        if _owner(aside) == owner:
            log.warning("%s: taken over from a process that is gone (%s)", path, owner)
            aside.unlink()
        else:  # another process took it over meanwhile: give it back
            with contextlib.suppress(FileExistsError):
                _link(aside, path)
            aside.unlink()


def _refusal(path: Path, owner: str) -> str:
    name, _, rest = owner.partition(".")
    pid = rest.partition(".")[0]
    where = "this host" if name == host_id() else f"host {name.rpartition('-')[0] or name}"
    return (
        f"{path.parent} is in use by process {pid} on {where}. Choose another output folder, or wait. "
        f"If that process is gone, remove {path}."
    )


# ---- signals ---------------------------------------------------------------------------------------------------------
#
# SIGTERM and SIGINT: the current step is finished and saved, then the run exits with 143 or 130.
#
# Within `Signals.deferring()` a signal is only recorded; a second one of the same kind ends the process immediately.
# Outside, while data and model are prepared, there is nothing to save and the first signal ends the process.


KINDS = (signal.SIGTERM, signal.SIGINT)


class Signals:
    """Records that the process was asked to stop."""

    def __init__(self) -> None:
        self.received = 0  # signal number, or 0
        self._deferring = False

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Installs the signal handlers; does nothing outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {kind: signal.signal(kind, self._note) for kind in KINDS}
        try:
            yield
        finally:
            for kind, handler in before.items():
                signal.signal(kind, handler)

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Defers signals until the step ends."""
        self._deferring = True
        try:
            yield
        finally:
            self._deferring = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        del frame
        if not self._deferring or self.received == number:
            raise SystemExit(128 + number)
        self.received = number
