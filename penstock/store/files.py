"""File primitives of the cache: writer names, durable folders, crash-test faults and clear errors."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import socket
import stat
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from penstock.digests import digest
from penstock.errors import StoreError
from penstock.transient import retry_transient

FAULT_VARIABLE = "PENSTOCK_FAULT"  # "point:n": crash tests die by SIGKILL at the n-th pass of a commit step
READ_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK  # never follow a link, never block on a pipe


_passages: dict[str, int] = {}


def fault(point: str) -> None:
    """Mark a commit step at which a crash test may kill the process group."""
    chosen = os.environ.get(FAULT_VARIABLE)
    if not chosen:
        return
    name, _, count = chosen.partition(":")
    _passages[point] = _passages.get(point, 0) + 1
    if name == point and _passages[point] == int(count or 1):
        os.killpg(os.getpgrp(), signal.SIGKILL)


@cache
def host_id() -> str:
    """Identifies the scope in which process ids are unique: host, boot and PID namespace. Safe in file names.

    The host name alone is not enough: hosts may share one, and so may containers.
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
    """When a process of this host started, in ticks since boot; None if there is no such process."""
    try:
        line = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or not visible to us
        return "unknown" if _is_running(pid) else None
    fields = line.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else fields[19]  # a zombie is dead, even if not reaped yet


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True


def writer_name() -> str:
    """Identifies this process as `host.pid.start`, for use in file names."""
    pid = os.getpid()
    return f"{host_id()}.{pid}.{process_start(pid)}"


def writer_is_dead(name: str) -> bool:
    """Whether a writer of this host is gone. Writers on other hosts are never reported dead."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != host_id() or not parts[1].isdigit():
        return False
    start = process_start(int(parts[1]))
    return start is None or ("unknown" not in (start, parts[2]) and start != parts[2])


def is_readable_file(path: Path) -> bool:
    """Whether a path is a regular, readable file. Lists the folder on a miss: NFS clients cache negative lookups."""
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
    """The bytes of a regular file; OSError for a link or a pipe."""
    return read_opened(os.open(path, READ_FLAGS), path)


def read_opened(descriptor: int, path: Path) -> bytes:
    """Read and close a descriptor opened with `READ_FLAGS`; OSError unless it is a regular file."""
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        return file.read()


def make_folder(path: Path) -> None:
    """Create a folder and its parents."""
    with explain_os_errors(path, "can't be created"):
        retry_transient(path.mkdir)(parents=True, exist_ok=True)


def sync_folder(path: Path) -> None:
    """Make renames in a folder durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        sync_descriptor(descriptor)
    finally:
        os.close(descriptor)


def sync_descriptor(folder: int) -> None:
    """Make renames in an open folder durable. Ignored on file systems that can't sync folders."""
    try:
        os.fsync(folder)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise


@contextlib.contextmanager
def explain_os_errors(path: Path, what: str) -> Iterator[None]:
    """Raise OSErrors as StoreErrors that state the remedy."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                why, remedy = (
                    "the disk is full",
                    "Free some space and run the same command again: finished slices are kept",
                )
            case errno.EACCES | errno.EPERM | errno.EROFS:
                why = "the file system is read-only" if error.errno == errno.EROFS else "permission denied"
                remedy = "Choose a folder you can write to with --cache or PENSTOCK_CACHE"
            case errno.ENOTDIR | errno.EEXIST:
                why = error.strerror or str(error)
                remedy = "Remove what is in the way, or choose another folder with --cache or PENSTOCK_CACHE"
            case errno.ENOENT:
                why = "its folder is gone"
                remedy = (
                    "Was the cache renamed or deleted meanwhile? Put it back and run the same command again: finished "
                    "slices are kept"
                )
            case errno.ESTALE | errno.EIO | errno.ETIMEDOUT:
                why = f"{error.strerror}, after several retries"
                remedy = "Check the disk or file server, then run the same command again: finished slices are kept"
            case _:
                why = error.strerror or str(error)
                remedy = "Run the same command again: finished slices are kept"
        raise StoreError(f"{path} {what}: {why}. {remedy}.") from error
