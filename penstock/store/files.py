"""Files that appear whole or not at all, on local disks and on NFS.

A file is written under a name of its own in the cache's `tmp/` folder, synced, renamed to its place, and the folder
synced. The temporary name tells its writer (host, process, start time), so that orphans of dead writers can be told
from work in progress. Nothing here deletes a file before its replacement is in place; no locks are used.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import signal
import socket
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import blake3

from penstock.errors import StoreError

FAULT_VARIABLE = "PENSTOCK_FAULT"  # "point:n": die by SIGKILL at the n-th passage of a commit step; for crash tests


def digest(*parts: bytes) -> str:
    """A content digest that names its algorithm."""
    hasher = blake3.blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return f"b3-{hasher.hexdigest()}"


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
def host() -> str:
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
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:  # gone, or hidden from us
        return "unknown" if _is_running(pid) else None
    fields = stat.rpartition(")")[2].split()
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
    return f"{host()}.{pid}.{process_start(pid)}"


def writer_is_dead(name: str) -> bool:
    """Is the writer in a name of this host, and gone? Writers of other hosts are never said to be dead."""
    parts = name.split(".")
    if len(parts) < 3 or parts[0] != host() or not parts[1].isdigit():
        return False
    start = process_start(int(parts[1]))
    return start is None or ("unknown" not in (start, parts[2]) and start != parts[2])


def is_there(path: Path) -> bool:
    """Can we read the file? NFS clients remember what was not there; listing the folder makes them look again."""
    if os.access(path, os.R_OK):
        return True
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        next(entries, None)
    return os.access(path, os.R_OK)


def listed(folder: Path) -> list[Path]:
    """The entries of a folder, in order; none where it is not there or not ours to read."""
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def make_folder(path: Path, like: Path | None = None) -> None:
    """Make a folder with the permissions of the one it stands in, so that users who share that one share this one."""
    if path.is_dir():
        return
    with explained(path, "can't be created"):
        make_folder(path.parent, like)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            if like is not None and like.is_dir():
                with contextlib.suppress(OSError):
                    path.chmod(like.stat().st_mode & 0o7777)


def write_whole(path: Path, data: Any, tmp: Path, point: str, *, durable: bool = True) -> None:
    """Write `data` under a temporary name in `tmp`, then rename it to `path`.

    What is only a convenience need not be `durable`: after a power failure it may be empty, which its reader notices.
    """
    make_folder(path.parent, like=tmp.parent)
    make_folder(tmp, like=tmp.parent)
    temporary = tmp / f"{writer_name()}.{secrets.token_hex(6)}"
    with explained(path, "can't be written"):
        try:
            fault(f"{point}.open")
            with temporary.open("xb") as file:
                file.write(data)
                fault(f"{point}.write")
                file.flush()
                if durable:
                    os.fsync(file.fileno())
            fault(f"{point}.sync")
            rename(temporary, path)
            fault(f"{point}.rename")
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        if durable:
            sync_folder(path.parent)


def rename(source: Path, target: Path) -> None:
    """Rename; where the answer got lost on the way (NFS retries), look at what is there."""
    size = source.stat().st_size
    try:
        source.replace(target)
    except FileNotFoundError:
        if source.exists() or not target.exists() or target.stat().st_size != size:
            raise


def sync_folder(path: Path) -> None:
    """Make a rename durable; some file systems can't sync folders, and need not."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF):
            raise
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def explained(path: Path, what: str) -> Iterator[None]:
    """Turn the system's errors into ours, with the remedy."""
    try:
        yield
    except OSError as error:
        match error.errno:
            case errno.ENOSPC | errno.EDQUOT:
                why, remedy = "the disk is full", "Free some space and run the same command again: finished slices stay"
            case errno.EACCES | errno.EPERM | errno.EROFS:
                why, remedy = "permission denied", "Choose a folder you can write to with --cache or PENSTOCK_CACHE"
            case _:
                why, remedy = error.strerror or str(error), "Finished slices stay; the same command goes on from there"
        raise StoreError(f"{path} {what}: {why}. {remedy}.") from error
