"""A cache in a folder: the only way to write, move and remove its files, and the paths that belong to Penstock.

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
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from penstock.digests import NAME, file_digest
from penstock.store.files import (
    READ_FLAGS,
    explain_os_errors,
    fault,
    is_readable_file,
    make_folder,
    read_opened,
    sync_descriptor,
    writer_name,
)
from penstock.store.storage import MARKER, OWN, Entry, Storage, shard_at, temporary_name
from penstock.transient import retry_transient

_INNER = re.compile(rf"[0-9a-f]{{2}}|{NAME}|dates|reference")  # subfolders that hold Penstock's files
NO_LINKS = (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK)  # no hard links, or another user's file
_FOLDER = os.O_RDONLY | os.O_DIRECTORY
_NEW_FILE = os.O_WRONLY | os.O_CREAT | os.O_EXCL
FILE_MODE = 0o644  # less the umask: a group that may write to its members' files could change what others rely on

T = TypeVar("T")
V = TypeVar("V")


class LocalStorage(Storage):
    """Penstock's files below one folder. Only the path to the folder itself may contain links."""

    is_folder = True
    renewal = 5.0

    def __init__(self, root: Path) -> None:
        self.root = root
        self._offset, self._read_at = 0.0, None

    @property
    def address(self) -> str:
        return str(self.root)

    def address_of(self, path: str) -> str:
        return str(self.root / path)

    def relative(self, path: Path) -> str:
        """The path of a file in this folder."""
        return path.relative_to(self.root).as_posix()

    @retry_transient
    def is_foreign(self, path: str) -> bool:
        """Whether another user owns a file, allowing for file servers that map users."""
        try:
            uid = (self.root / path).lstat().st_uid
        except FileNotFoundError:
            return False
        return uid != os.geteuid() and uid != self._mapped_user

    @cached_property
    def _mapped_user(self) -> int:
        try:
            return self._probe().st_uid
        except OSError:  # read-only for us
            return os.geteuid()

    @contextlib.contextmanager
    def folder(self, path: str, *, create: bool = False) -> Iterator[int]:
        """Open a folder. New folders get the root's permissions, so that everyone who shares the cache can use them."""
        descriptor = os.open(self.root, _FOLDER)
        try:
            mode = os.fstat(descriptor).st_mode & 0o7777
            for part in filter(None, path.split("/")):
                outer, descriptor = descriptor, _open_folder(descriptor, part, mode if create else None)
                _close(outer)
            yield descriptor
        finally:
            _close(descriptor)

    @retry_transient
    def make_folder(self, path: str) -> None:
        with self.folder(path, create=True):
            pass

    @retry_transient
    def names(self, folder: str = "") -> list[str]:
        with self.folder(folder) as opened, os.scandir(opened) as entries:
            return sorted(entry.name for entry in entries)

    def entries(self, folder: str) -> list[Entry]:
        found: list[Entry] = []
        folders = [folder]
        with explain_os_errors(self.root / folder, "can't be read"):
            while folders:
                with contextlib.suppress(FileNotFoundError):
                    files, inner = self._listed(folders.pop())
                    found += files
                    folders += inner
        return sorted(found)

    def temporaries(self) -> list[Entry]:
        """Temporary files: being written, or left by a writer that died. Empty if they can't be listed."""
        found: list[Entry] = []
        for folder in ("", "tmp"):
            with contextlib.suppress(OSError):
                found += self._listed(folder)[0]
        return sorted(found)

    def shards(self) -> dict[str, Entry]:
        return {entry.name[:-6]: entry for entry in self.entries("shards") if entry.name.endswith(".arrow")}

    @retry_transient
    def _listed(self, folder: str) -> tuple[list[Entry], list[str]]:
        """Our files in a folder, and the subfolders that may hold more."""
        files, inner = [], []
        with self.folder(folder) as opened, os.scandir(opened) as entries:
            for entry in entries:
                with contextlib.suppress(FileNotFoundError):  # removed in the meantime
                    path, status = f"{folder}/{entry.name}".lstrip("/"), entry.stat(follow_symlinks=False)
                    if stat.S_ISDIR(status.st_mode) and _INNER.fullmatch(entry.name):
                        inner.append(path)
                    elif stat.S_ISREG(status.st_mode) and OWN.fullmatch(path):
                        files.append(_entry(path, status))
        return files, inner

    @retry_transient
    def read(self, path: str) -> bytes | None:
        """The bytes of a regular file; OSError for anything else that is there."""
        folder, _, name = path.rpartition("/")
        try:
            with self.folder(folder) as opened:
                return read_opened(os.open(name, READ_FLAGS, dir_fd=opened), self.root / path)
        except FileNotFoundError:
            return None

    @retry_transient
    def stat(self, path: str) -> Entry | None:
        """What the file system says of a file; of a link, not of its target."""
        folder, _, name = path.rpartition("/")
        try:
            with self.folder(folder) as opened:
                return _entry(path, os.stat(name, dir_fd=opened, follow_symlinks=False))
        except FileNotFoundError:
            return None

    def write(
        self,
        path: str,
        data: Any,
        point: str,
        *,
        durable: bool = True,
        keep_existing: bool = False,
        in_root: bool = False,
        mode: int | None = None,
    ) -> None:
        """Write a file atomically. With `keep_existing`, a file that already exists wins.

        With `in_root` the temporary file is created in the root instead of `tmp/`. `mode` overrides the umask.
        """
        with explain_os_errors(self.root / path, "can't be written"):
            self._write(path, data, point, durable, keep_existing, "" if in_root else "tmp", mode)

    @retry_transient
    def _write(
        self, path: str, data: Any, point: str, durable: bool, keep_existing: bool, temporaries: str, mode: int | None
    ) -> None:
        parent, _, name = path.rpartition("/")
        with self.folder(parent, create=True) as folder, self.folder(temporaries, create=True) as tmp:
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
                _rename(tmp, temporary, folder, name, keep_existing=keep_existing)
                fault(f"{point}.rename")
            except BaseException:
                with contextlib.suppress(OSError):
                    _unlink(tmp, temporary)
                raise
            if durable:
                sync_descriptor(folder)

    def create(self, path: str, data: bytes, point: str) -> bool:
        with explain_os_errors(self.root / path, "can't be written"):
            try:
                self._create(path, data, point)
            except FileExistsError:
                return False
        return True

    @retry_transient
    def _create(self, path: str, data: bytes, point: str) -> None:
        parent, _, name = path.rpartition("/")
        with self.folder(parent, create=True) as folder:
            descriptor = os.open(name, _NEW_FILE, 0o666, dir_fd=folder)
            fault(f"{point}.open")
            try:
                with os.fdopen(descriptor, "wb") as file:
                    file.write(data)
            except OSError:  # disk full: leave no empty file behind
                _unlink(folder, name)
                raise
            fault(f"{point}.write")

    def replace(self, path: str, data: bytes, found: Entry, point: str) -> bool:
        """Set the file aside and create it again: only one process can take it; one that was not meant goes back."""
        current, aside = self.stat(path), f"tmp/{temporary_name()}"
        if current is None or current.version != found.version:
            return False
        try:
            self.move(path, aside)
        except FileNotFoundError:
            return False
        taken = self.stat(aside)
        if taken is None or taken.version != found.version:  # another process was faster: this is its file
            self.move(aside, path, keep_existing=True)
            return False
        self.delete(aside)
        return self.create(path, data, point)

    def renew(self, path: str, data: bytes, renewed: bytes) -> bytes:
        self.touch(path)
        return data

    def holds(self, path: str, size: int, digest: str) -> bool:
        file = self.root / path
        try:
            return is_readable_file(file) and file.stat().st_size == size and file_digest(file) == digest
        except OSError:
            return False

    @retry_transient
    def touch(self, path: str, *, create: bool = False) -> None:
        flags = os.O_WRONLY | os.O_NOFOLLOW | os.O_NONBLOCK | (os.O_CREAT if create else 0)
        parent, _, name = path.rpartition("/")
        with self.folder(parent) as folder:
            descriptor = os.open(name, flags, 0o666, dir_fd=folder)
            try:
                os.utime(descriptor)
            finally:
                os.close(descriptor)

    def make_cache(self, marker: bytes) -> None:
        make_folder(self.root)
        with explain_os_errors(self.root, "can't be read"):
            readers = retry_transient(self.root.stat)().st_mode & 0o444  # readable by everyone who can use the cache
        self.write(MARKER, marker, "marker", in_root=True, mode=readers | 0o200)

    def check_writable(self) -> None:
        with explain_os_errors(self.root, "can't be written"):
            self.make_folder("tmp")
            if not os.access(self.root / "tmp", os.W_OK | os.X_OK):
                self._probe()  # creates a file; its error says why not

    def _server_time(self) -> float:
        """The mtime of a new file."""
        try:
            return self._probe().st_mtime
        except OSError:
            return time.time()  # the cache is read-only for us

    @retry_transient
    def _probe(self) -> os.stat_result:
        """The owner and mtime that the file server gives to a new file."""
        with self.folder("tmp") as folder:
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

    @retry_transient
    def move(self, source: str, target: str, *, keep_existing: bool = False) -> bool:
        """Rename one of Penstock's files.

        With `keep_existing`, an existing target wins: the source is removed and the result is False.
        """
        (outer, _, old), (inner, _, new) = source.rpartition("/"), target.rpartition("/")
        with self.folder(outer) as from_, self.folder(inner, create=True) as to:
            self._check(source, from_)
            if not OWN.fullmatch(target):
                raise _not_ours(self.root / target)
            return _rename(from_, old, to, new, keep_existing=keep_existing)

    @retry_transient
    def delete(self, path: str) -> bool:
        """Remove one of Penstock's files; False if it is already gone. FileExistsError for any other file."""
        parent, _, name = path.rpartition("/")
        try:
            with self.folder(parent) as folder:
                self._check(path, folder)
                os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return False
        return True

    def remove_folder(self, folder: str) -> None:
        parent, _, name = folder.rpartition("/")
        with contextlib.suppress(OSError), self.folder(parent) as opened:
            os.rmdir(name, dir_fd=opened)

    def _check(self, path: str, folder: int) -> None:
        name = path.rpartition("/")[2]
        if not OWN.fullmatch(path) or not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise _not_ours(self.root / path)

    def set_aside(self, paths: Collection[str]) -> AsideFiles:
        """Rename files into `tmp/`, so that builds see their shards missing."""
        return AsideFiles(self, paths)

    def about_to_go(self, names: Collection[str]) -> bool:
        return False  # what was set aside is missing

    def has_shard(self, name: str, *, now: bool = False) -> bool:
        return is_readable_file(self.root / shard_at(name)) and not (self.root / shard_at(name, "bad")).exists()

    def refresh(self, names: Iterable[str]) -> None:
        pass  # `has_shard` remembers nothing

    def lists_shards(self, names: Collection[str]) -> bool:
        """By listing folders, because an NFS client may answer `stat` from its cache."""
        wanted: dict[str, set[str]] = {}
        for name in names:
            wanted.setdefault(shard_at(name).rpartition("/")[0], set()).add(name)
        for folder, shards in wanted.items():
            try:
                found = set(self.names(folder))
            except OSError:
                return False
            if any(f"{name}.arrow" not in found or f"{name}.bad" in found for name in shards):
                return False
        return True

    def put_shard(self, name: str, data: Any, digest: str) -> None:
        """Write a shard in place of any other.

        Other processes may have the existing file mapped, and on NFS removing it would kill readers on other hosts
        with SIGBUS. So it moves to `retired/`, where `gc` deletes it once it is old.
        """
        path = shard_at(name)
        with explain_os_errors(self.root / path, "can't be replaced"):
            with contextlib.suppress(FileNotFoundError):
                self.move(path, f"retired/{name}.{secrets.token_hex(6)}.arrow")
            fault("shard.retire")
            self.write(path, data, "shard", keep_existing=True)
        self.clear_mark(name)

    def clear_mark(self, name: str) -> None:
        """Remove the mark of a shard that was rebuilt."""
        bad = shard_at(name, "bad")
        with explain_os_errors(self.root / bad, "can't be removed, although the shard has been rebuilt"):
            self.delete(bad)

    def each(self, act: Callable[[T], V], items: Iterable[T]) -> list[V]:
        return [act(item) for item in items]


class AsideFiles:
    """Files that `gc` has renamed. If it is killed, the next build or `gc` puts them back: they may be in use."""

    def __init__(self, storage: LocalStorage, paths: Iterable[str]) -> None:
        self._storage = storage
        self._hidden: dict[str, str] = {}
        self.refused = 0
        for path in paths:
            hidden = f"tmp/{writer_name()}.aside.{path.rpartition('/')[2]}"
            try:
                storage.move(path, hidden)
                self._hidden[path] = hidden
            except FileNotFoundError:
                continue
            except OSError:
                self.refused += 1

    def holds(self, paths: Iterable[str]) -> bool:
        return any(path in self._hidden for path in paths)

    def delete(self, paths: Iterable[str]) -> None:
        for path in filter(self._hidden.__contains__, paths):
            self._storage.delete(self._hidden[path])

    def restore(self, paths: Iterable[str]) -> None:
        for path in filter(self._hidden.__contains__, paths):
            self._storage.move(self._hidden[path], path, keep_existing=True)

    def close(self) -> None:
        pass


def _entry(path: str, status: os.stat_result) -> Entry:
    version = (status.st_ino, status.st_mtime_ns, status.st_size)
    return Entry(path, status.st_size, status.st_mtime, status.st_ctime, version)


def _not_ours(path: Path) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "not a file that Penstock created", str(path))


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
