"""The only way to write, move and remove files of a cache, and the list of paths that belong to Penstock.

Other users may be able to write to a cache, so nothing outside it is ever touched: every folder on the way to a file is
opened relative to the cache's root without following links, and only regular files at paths that Penstock itself
creates are removed. Listings show nothing else, so a user's own files are neither counted nor deleted.

Writes are atomic on local disks and on NFS: a file is written under a unique name in `tmp/`, synced and renamed into
place, then the folder is synced. The temporary name identifies the writer, so that files of dead writers can be
removed. Opening a folder makes an NFS client revalidate it with the server (unless mounted with `nocto`).
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.store.files import (
    READ_FLAGS,
    explain_os_errors,
    fault,
    read_opened,
    sync_descriptor,
    writer_name,
)
from penstock.transient import retry_transient

NAME = r"b3-[0-9a-f]{64}"
WRITER = r"\w+-[0-9a-f]{8}\.\d+\.(?:\d+|unknown)"
TEMPORARY = re.compile(rf"{WRITER}\.[0-9a-f]{{12}}")
ASIDE = re.compile(rf"{WRITER}\.aside\.(?P<name>{NAME})(?P<suffix>\.arrow|\.json|\.bad|\.index)")  # by `gc`
OWN = re.compile(
    "|".join(
        (
            TEMPORARY.pattern,  # the marker while it is written
            rf"tmp/{TEMPORARY.pattern}",
            rf"tmp/{WRITER}\.aside\.{NAME}\.(?:arrow|json|bad|index)",
            rf"claims/{NAME}",
            rf"leases/{TEMPORARY.pattern}",
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
NO_LINKS = (
    errno.EPERM,
    errno.ENOTSUP,
    errno.ENOSYS,
    errno.EMLINK,
)  # no hard links, or another user's file
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FILE_MODE = 0o644  # less the umask: a group that may write to its members' files could change what others rely on


class Tree:
    """Penstock's files below one folder. Only the path to the folder itself may contain links."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tmp = root / "tmp"

    def owns(self, path: Path) -> bool:
        """Whether this is a path that Penstock creates files at."""
        return OWN.fullmatch(path.relative_to(self.root).as_posix()) is not None

    @retry_transient
    def is_foreign(self, path: Path) -> bool:
        """Whether another user owns a file, allowing for file servers that map users."""
        try:
            uid = path.lstat().st_uid
        except FileNotFoundError:
            return False
        return uid != os.geteuid() and uid != self._mapped_user

    @cached_property
    def _mapped_user(self) -> int:
        try:
            return self._probe().st_uid
        except OSError:  # read-only for us
            return os.geteuid()

    # -- reading --------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def folder(self, path: Path, *, create: bool = False) -> Iterator[int]:
        """Open a folder. New folders get the root's permissions, so that everyone who shares the cache can use them."""
        descriptor = os.open(self.root, _FOLDER)
        try:
            mode = os.fstat(descriptor).st_mode & 0o7777
            for part in path.relative_to(self.root).parts:
                outer, descriptor = descriptor, _open_folder(descriptor, part, mode if create else None)
                _close(outer)
            yield descriptor
        finally:
            _close(descriptor)

    @retry_transient
    def make_folder(self, path: Path) -> None:
        """Create a folder unless it exists."""
        with self.folder(path, create=True):
            pass

    @retry_transient
    def names(self, path: Path) -> list[str]:
        """All names in a folder; OSError if it can't be listed."""
        with self.folder(path) as folder, os.scandir(folder) as entries:
            return sorted(entry.name for entry in entries)

    def files(self, path: Path) -> list[Path]:
        """Penstock's files in a folder, sorted; empty if it is missing or unreadable."""
        return [found for found in self._entries(path, stat.S_ISREG) if self.owns(found)]

    def folders(self, path: Path) -> list[Path]:
        """The subfolders of a folder, sorted, without links."""
        return self._entries(path, stat.S_ISDIR)

    def _entries(self, path: Path, wanted: Callable[[int], bool]) -> list[Path]:
        try:
            return self._listed(path, wanted)
        except OSError:
            return []

    @retry_transient
    def _listed(self, path: Path, wanted: Callable[[int], bool]) -> list[Path]:
        found: list[Path] = []
        with self.folder(path) as folder, os.scandir(folder) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    if wanted(entry.stat(follow_symlinks=False).st_mode):
                        found.append(path / entry.name)
        return sorted(found)

    @retry_transient
    def read(self, path: Path) -> bytes:
        """The bytes of a regular file."""
        with self.folder(path.parent) as folder:
            return read_opened(os.open(path.name, READ_FLAGS, dir_fd=folder), path)

    # -- writing --------------------------------------------------------------------------------------------------

    def write(
        self,
        path: Path,
        data: Any,
        point: str,
        *,
        durable: bool = True,
        keep_existing: bool = False,
        in_root: bool = False,
        mode: int | None = None,
    ) -> None:
        """Write a file atomically. With `keep_existing`, a file that already exists wins.

        Disposable files need not be `durable`: after a power failure they may be empty, which readers detect. With
        `in_root` the temporary file is created in the root instead of `tmp/`. `mode` overrides the umask.
        """
        with explain_os_errors(path, "can't be written"):
            self._write(path, data, point, durable, keep_existing, self.root if in_root else self.tmp, mode)

    @retry_transient
    def _write(
        self, path: Path, data: Any, point: str, durable: bool, keep_existing: bool, temporaries: Path, mode: int | None
    ) -> None:
        with self.folder(path.parent, create=True) as folder, self.folder(temporaries, create=True) as tmp:
            temporary = temporary_name()
            try:
                fault(f"{point}.open")
                with os.fdopen(os.open(temporary, _NEW_FILE, FILE_MODE, dir_fd=tmp), "wb") as file:
                    file.write(data)
                    fault(f"{point}.write")
                    file.flush()
                    if mode is not None:
                        os.fchmod(file.fileno(), mode)
                    if durable:
                        os.fsync(file.fileno())
                fault(f"{point}.sync")
                _rename(tmp, temporary, folder, path.name, keep_existing=keep_existing)
                fault(f"{point}.rename")
            except BaseException:
                with contextlib.suppress(OSError):
                    _unlink(tmp, temporary)
                raise
            if durable:
                sync_descriptor(folder)

    def create(self, path: Path, data: bytes, point: str) -> bool:
        """Create a small file exclusively; False if it already exists."""
        with explain_os_errors(path, "can't be written"):
            try:
                self._create(path, data, point)
            except FileExistsError:
                return False
        return True

    @retry_transient
    def _create(self, path: Path, data: bytes, point: str) -> None:
        with self.folder(path.parent, create=True) as folder:
            descriptor = os.open(path.name, _NEW_FILE, 0o666, dir_fd=folder)
            fault(f"{point}.open")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError:  # disk full: leave no empty file behind
                _unlink(folder, path.name)
                raise
            fault(f"{point}.write")

    @retry_transient
    def touch(self, path: Path, *, create: bool = False) -> None:
        """Set a file's modification time to now, by the file server's clock."""
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        with self.folder(path.parent) as folder:
            descriptor = os.open(path.name, flags, 0o666, dir_fd=folder)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)

    def server_time(self) -> float:
        """The file server's current time: the mtime of a new file."""
        return self._probe().st_mtime

    @retry_transient
    def _probe(self) -> os.stat_result:
        """The owner and mtime that the file server gives to a new file."""
        with self.folder(self.tmp) as folder:
            name = temporary_name()
            try:
                descriptor = os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
                try:
                    os.utime(descriptor)
                    return os.fstat(descriptor)
                finally:
                    os.close(descriptor)
            finally:
                _unlink(folder, name)

    # -- moving and removing --------------------------------------------------------------------------------------

    @retry_transient
    def move(self, source: Path, target: Path, *, keep_existing: bool = False) -> bool:
        """Rename one of Penstock's files.

        With `keep_existing`, an existing target wins: the source is removed and the result is False.
        """
        with self.folder(source.parent) as from_, self.folder(target.parent, create=True) as to:
            self._check(source, from_)
            if not self.owns(target):
                raise _not_ours(target)
            return _rename(from_, source.name, to, target.name, keep_existing=keep_existing)

    @retry_transient
    def remove(self, path: Path) -> bool:
        """Remove one of Penstock's files; False if it is already gone. FileExistsError for any other file."""
        try:
            with self.folder(path.parent) as folder:
                self._check(path, folder)
                os.unlink(path.name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self, path: Path) -> None:
        """Remove a folder if it is empty."""
        with contextlib.suppress(OSError), self.folder(path.parent) as folder:
            os.rmdir(path.name, dir_fd=folder)

    def _check(self, path: Path, folder: int) -> None:
        if not self.owns(path) or not stat.S_ISREG(os.stat(path.name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _not_ours(path)


def _not_ours(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "not a file that Penstock created", str(path))


def temporary_name() -> str:
    """A unique name that identifies its writer."""
    return f"{writer_name()}.{secrets.token_hex(6)}"


def _close(folder: int) -> None:
    """Close a folder, once: its descriptor is gone even if that fails, and nothing was written through it."""
    with contextlib.suppress(OSError):
        os.close(folder)


def _open_folder(parent: int, name: str, create_mode: int | None) -> int:
    """Open a subfolder; create it if permissions for it are given."""
    try:
        return os.open(name, _FOLDER | os.O_NOFOLLOW, dir_fd=parent)
    except NotADirectoryError:
        raise NotADirectoryError(errno.ENOTDIR, f"{name!r} is a link or not a folder") from None
    except FileNotFoundError:
        if create_mode is None:
            raise
    try:
        os.mkdir(name, dir_fd=parent)
    except FileExistsError:  # created concurrently
        return _open_folder(parent, name, None)
    made = _open_folder(parent, name, None)
    with contextlib.suppress(OSError):
        os.fchmod(made, create_mode)
    return made


def _rename(from_: int, source: str, to: int, target: str, *, keep_existing: bool) -> bool:
    """Rename. If NFS reports failure because its own retry found the rename done, accept it."""
    if keep_existing:
        return _rename_to_new(from_, source, to, target)
    size = os.stat(source, dir_fd=from_, follow_symlinks=False).st_size
    try:
        os.replace(source, target, src_dir_fd=from_, dst_dir_fd=to)
    except FileNotFoundError:
        if _size(from_, source) is not None or _size(to, target) != size:
            raise
    return True


def _rename_to_new(from_: int, source: str, to: int, target: str) -> bool:
    """Rename without replacing: if the target exists, remove the source and return False."""
    made = True
    try:
        os.link(source, target, src_dir_fd=from_, dst_dir_fd=to, follow_symlinks=False)
    except FileExistsError:
        made = False
    except OSError as error:
        if error.errno not in NO_LINKS:
            raise
        made = _size(to, target) is None  # not atomic, but the best available here
        if made:
            return _rename(from_, source, to, target, keep_existing=False)
    _unlink(from_, source)
    return made


@retry_transient
def _unlink(folder: int, name: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name, dir_fd=folder)


def _size(folder: int, name: str) -> int | None:
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
