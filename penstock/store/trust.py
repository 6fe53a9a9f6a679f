"""Which users' files in a shared cache are reused, who wrote them, and this user's own copies of what was checked.

A shard is named by its inputs, so anyone who can write to a cache could store other tokens under the right name. In a
folder, a file's owner comes from the file system and can be relied on; the host comes from the record beside a shard,
which its writer could forge. Objects have no owner: there, users recognise what they wrote by a key.

The owner of a file can change it through a shared mapping without changing its inode, size, mtime or ctime, so no
record of a check can tell whether a file is still the one that was checked. Therefore the bytes that were checked are
copied to a folder that only this user can write, and read from there. A copy has the name of its shard, so its presence
means that this user has checked it, whichever cache it came from. Copies cost the disk space of other users' shards
once per user, and a synced write per shard when it is checked.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import pwd
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Sequence
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import blake3

from penstock.digests import canonical, digest, unseal
from penstock.errors import StoreError
from penstock.store.files import read_regular
from penstock.store.local import LocalStorage
from penstock.store.storage import shard_at

KEY_VARIABLE = "PENSTOCK_CACHE_KEY"
LOCAL_VARIABLE = "PENSTOCK_LOCAL_CACHE"
TOUCH_INTERVAL = 86400.0  # seconds between updates of the time of a copy's last use


class Trust(StrEnum):
    """Which shards are reused besides the user's own."""

    CHECKED = "checked"  # other users', after a sample of each was checked against the references
    OWN = "own"  # none
    ALL = "all"  # all, unchecked


class ShardWriter(NamedTuple):
    """Who wrote a shard. `host` is empty if the record beside it is lost or owned by someone else."""

    uid: int
    user: str
    host: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host or 'an unknown host'}"


RECORD_FIELDS = {"digest": str, "bytes": int, "rejected": int}


def read_record(files: LocalStorage, name: str) -> dict[str, Any] | None:
    """The record beside a shard, with its counts, digest and engines; None if it is lost or damaged."""
    try:
        record = unseal(b"note", read_regular(files.root / shard_at(name, "json")))
    except (OSError, ValueError):
        return None
    return record if all(type(record.get(key)) is kind for key, kind in RECORD_FIELDS.items()) else None


def host_name(given: object) -> str:
    """The host in a record, if it can be one."""
    return given if isinstance(given, str) and re.fullmatch(r"[\w.-]{1,253}", given) else ""


def user_name(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


def state_folder() -> Path:
    """The user's own folder for what Penstock must not read from a shared cache."""
    state = os.environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path("~/.local/state").expanduser()) / "penstock"


class CheckedContent:
    """Remembers which manifests and memos of other users this user has checked, by the digest of their bytes.

    Stored in the user's own state folder, where nobody else can write. Shards are not remembered but copied, because
    they are too large to be read on every hit: see `CheckedCopies`.
    """

    def __init__(self) -> None:
        self._root = state_folder()

    def knows(self, content: Sequence[object] | None) -> bool:
        """Whether what these JSON values identify was checked."""
        try:
            return content is not None and (self._root / self._path(content)).lstat().st_uid == os.geteuid()
        except OSError:
            return False

    def remember(self, content: Sequence[object] | None) -> None:
        """Record that what these JSON values identify was checked. If that fails, it is checked again next time."""
        if content is None:
            return
        with contextlib.suppress(OSError, StoreError):
            self._root.mkdir(parents=True, exist_ok=True)
            LocalStorage(self._root).write(self._path(content), b"", "checked", durable=False, in_root=True)

    def _path(self, content: Sequence[object]) -> str:
        return f"checked/{digest(b'checked', canonical(content))}"


def user_cache_folder() -> Path:
    """The folder for programs' caches: `XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) if base else Path("~/.cache").expanduser()


class CheckedCopies:
    """Copies of checked shards, in `PENSTOCK_LOCAL_CACHE`, the user's cache folder, or else the temporary folder."""

    def __init__(self) -> None:
        self._made: LocalStorage | None = None

    def _folder(self) -> LocalStorage | None:
        """The folder of the copies, if there is one."""
        if self._made is None:
            folders = [folder for folder in _candidates() if _is_private(folder)]
            self._made = LocalStorage(folders[0]) if folders else None
        return self._made

    def _make_folder(self) -> LocalStorage:
        for folder in _candidates():
            with contextlib.suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                if _is_private(folder):
                    self._made = LocalStorage(folder)
                    return self._made
        tried = " and ".join(map(str, _candidates()))
        raise StoreError(
            f"{tried} can't be created for this user alone, so other users' shards can't be copied after they were "
            f"checked. Name another place with {LOCAL_VARIABLE}, or read them in place with --trust all."
        )

    def find(self, name: str) -> Path | None:
        """The copy of a shard, if this user has checked it. Records its use."""
        folder = self._folder()
        if folder is None:
            return None
        path = folder.root / shard_at(name)
        try:
            used = path.lstat().st_mtime
        except OSError:
            return None
        if time.time() - used > TOUCH_INTERVAL:
            with contextlib.suppress(OSError):
                os.utime(path)
        return path

    def add(self, name: str, data: bytes) -> None:
        """Keep the bytes of a shard that were checked."""
        folder = self._folder() or self._make_folder()
        try:
            folder.write(shard_at(name), data, "copy", keep_existing=True)
        except StoreError as error:
            raise StoreError(
                f"{error} It is a copy of another user's shard: {LOCAL_VARIABLE} names another folder for copies, "
                "--trust all reads shards in place."
            ) from error

    def remove_unused(self, seconds: float, *, dry_run: bool) -> int:
        """Delete the copies that have not been used for that long; returns how many."""
        folder, removed = self._folder(), 0
        if folder is None:
            return 0
        with contextlib.suppress(OSError, StoreError):
            for entry in folder.entries("shards"):
                if time.time() - entry.modified > seconds:
                    removed += dry_run or folder.delete(entry.path)
        return removed


def _candidates() -> list[Path]:
    bases = Path(os.environ.get(LOCAL_VARIABLE) or user_cache_folder()).expanduser(), Path(tempfile.gettempdir())
    return [base.absolute() / f"penstock-copies-{os.geteuid()}" for base in bases]


def _is_private(folder: Path) -> bool:
    """Whether a folder exists, belongs to this user, and can't be written by anybody else."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022
    return is_own and os.access(folder, os.W_OK | os.X_OK)


# -- the key of a user --------------------------------------------------------------------------------------------


def keyed_digest(data: bytes) -> str:
    """A digest that only holders of the user's key can compute."""
    return blake3.blake3(data, key=user_key()).hexdigest()


def is_keyed(data: bytes, mac: object) -> bool:
    """Whether a keyed digest was computed with the user's key."""
    return isinstance(mac, str) and hmac.compare_digest(mac.encode(), keyed_digest(data).encode())


@cache
def user_key() -> bytes:
    """A secret by which users recognise what they wrote to an object store.

    It comes from `PENSTOCK_CACHE_KEY`, or is created once in the user's state folder. Without a writable home it lasts
    as long as the process: then everything counts as written by others, and is checked.
    """
    if given := os.environ.get(KEY_VARIABLE):
        return blake3.blake3(given.encode(), derive_key_context="penstock cache key").digest()
    path = state_folder() / "cache.key"
    try:
        return _stored_key(path)
    except FileNotFoundError:
        pass
    except OSError:
        return secrets.token_bytes(32)
    made = secrets.token_bytes(32)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f"cache.key.{secrets.token_hex(6)}")
        with os.fdopen(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(made)
        try:
            os.link(temporary, path)  # the first process wins
        finally:
            temporary.unlink()
    except FileExistsError:
        return _stored_key(path)
    except OSError:
        return made
    return made


def _stored_key(path: Path) -> bytes:
    found, data = path.lstat(), read_regular(path)
    if found.st_uid != os.geteuid() or len(data) != 32:
        raise PermissionError(13, "not a key of this user", str(path))
    return data
