"""What all files of a cache have in common: digests, the name of their writer, faults for crash tests, clear errors."""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import blake3

from penstock.errors import StoreError

FAULT_VARIABLE = "PENSTOCK_FAULT"  # "point:n": die by SIGKILL at the n-th passage of a commit step; for crash tests
TRANSIENT = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EINTR)  # ESTALE: another host has removed or replaced it
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # neither follows a link nor waits for a pipe's other end
RETRY_PAUSES = (0.05, 0.25, 1.0)  # seconds

P = ParamSpec("P")
T = TypeVar("T")


def retry_transient(act: Callable[P, T]) -> Callable[P, T]:
    """Repeat an operation a few times where a network file system fails for the moment."""

    @functools.wraps(act)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        for pause in RETRY_PAUSES:
            try:
                return act(*args, **kwargs)
            except OSError as error:
                if error.errno not in TRANSIENT:
                    raise
            time.sleep(pause)
        return act(*args, **kwargs)

    return run


def digest(*parts: bytes) -> str:
    """A content digest that names its algorithm."""
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return f"b3-{hasher.hexdigest()}"


@retry_transient
def file_digest(path: Path) -> str:
    """The digest of a file's bytes, read in pieces."""
    hasher = blake3.blake3()
    hasher.update_mmap(path)
    return f"b3-{hasher.hexdigest()}"


def bytes_digest(data: Any) -> str:
    """The digest of bytes in memory, equal to `file_digest` of a file that holds them."""
    return f"b3-{blake3.blake3(data).hexdigest()}"


_passages: dict[str, int] = {}


def fault(point: str) -> None:
    """A commit step passes here; crash tests choose one of them to die at."""
    chosen = os.environ.get(FAULT_VARIABLE)
    if not chosen:
        return
    name, _, count = chosen.partition(":")
    _passages[point] = _passages.get(point, 0) + 1
    if name == point and _passages[point] == int(count or 1):
        os.killpg(os.getpgrp(), signal.SIGKILL)


@cache
def host_id() -> str:
    """Where process numbers mean the same: this host, since it booted, in this container; safe in file names.

    Hosts may share a name, and containers a host's name; neither may be taken for the other.
    """
    name = "".join(c if c.isalnum() else "_" for c in socket.gethostname()) or "host"
    return f"{name}-{digest(_boot(), _process_space())[3:11]}"


def _boot() -> bytes:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return b""


def _process_space() -> bytes:
    try:
        return os.fsencode(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return b""


def process_start(pid: int) -> str | None:
    """When a process of this host started (ticks since boot), or None when there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or hidden from us
        return "unknown" if _is_running(pid) else None
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # a zombie is dead, though nobody has asked for its exit code


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def writer_name() -> str:
    """Who writes: host, process and its start, fit for a file name."""
    pid = os.getpid()
    return f"{host_id()}.{pid}.{process_start(pid)}"


def writer_is_dead(name: str) -> bool:
    """Is the writer in a name of this host, and gone? Writers of other hosts are never said to be dead."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != host_id() or not parts[1].isdigit():
        return False
    start = process_start(int(parts[1]))
    return start is None or ("unknown" not in (start, parts[2]) and start != parts[2])


def is_readable_file(path: Path) -> bool:
    """Is it a regular file that we can read? NFS clients cache absence; listing the folder makes them look again."""
    if _is_readable(path):
        return True
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        next(entries, None)
    return _is_readable(path)


def _is_readable(path: Path) -> bool:
    try:
        return stat.S_ISREG(os.lstat(path).st_mode) and os.access(path, os.R_OK)
    except OSError:
        return False


@retry_transient
def read_regular(path: Path) -> bytes:
    """The bytes of a regular file; a link or a pipe is an OSError."""
    return read_opened(os.open(path, READ_FLAGS), path)


def read_opened(descriptor: int, path: Path) -> bytes:
    """The bytes of a file that was opened with `READ_FLAGS`, if it is a regular one; closes it."""
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def make_folder(path: Path) -> None:
    """Make a folder, and those above it."""
    with explain_os_errors(path, "can't be created"):
        path.mkdir(parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(folder: int) -> None:
    """Make renames in an open folder durable; some file systems can't sync folders, and need not."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


@contextlib.contextmanager
def explain_os_errors(path: Path, what: str) -> Iterator[None]:
    """Turn the system's errors into ours, with the remedy."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                why, remedy = "the disk is full", "Free some space and run the same command again: finished slices stay"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                why, remedy = "permission denied", "Choose a folder you can write to with --cache or PENSTOCK_CACHE"
            case errno.ENOTDIR | errno.EEXIST:
                why = error.strerror or str(error)
                remedy = "Remove what is in the way, or choose another folder with --cache or PENSTOCK_CACHE"
            case errno.ESTALE | errno.EIO | errno.ETIMEDOUT:
                why = f"{error.strerror}, again and again"
                remedy = "Look after the disk or file server; finished slices stay, the same command goes on from there"
            case _:
                why, remedy = error.strerror or str(error), "Finished slices stay; the same command goes on from there"
        raise StoreError(f"{path} {what}: {why}. {remedy}.") from error
