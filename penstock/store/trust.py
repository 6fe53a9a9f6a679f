"""Whose files in a shared cache are reused, and who wrote which.

A shard is named by its inputs, so whoever may write to a cache can put other tokens under the right name. The owner of
a file is the file system's word; the host stands in the note beside a shard, and is the writer's own word.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from penstock.errors import StoreError
from penstock.store.files import digest
from penstock.store.format import canonical
from penstock.store.tree import Tree

if TYPE_CHECKING:
    from penstock.store.cache import Cache


class Trust(StrEnum):
    """Which shards are reused besides those of this user."""

    CHECKED = "checked"  # others', after rows of each were compared with the references
    OWN = "own"  # nobody else's
    ALL = "all"  # everybody's, unchecked


class ShardWriter(NamedTuple):
    """Who wrote a shard. `host` is empty where the note beside it is lost or somebody else's."""

    uid: int
    user: str
    host: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host or 'an unknown host'}"


def shard_writer(cache: Cache, name: str) -> ShardWriter:
    """Owner and host of a shard."""
    uid, note = cache.shard_path(name).lstat().st_uid, cache.read_note(name) or {}
    host = str(note.get("host", ""))
    with contextlib.suppress(OSError):  # a note is a convenience
        if cache.note_path(name).lstat().st_uid == uid and re.fullmatch(r"[\w.-]{1,253}", host):
            return ShardWriter(uid, _user(uid), host)
    return ShardWriter(uid, _user(uid), "")


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return f"user {uid}"


class CheckedFiles:
    """Which files of others this user has checked, so that a hit need not do it again.

    Kept where nobody else writes: in the user's own folder for state. A file is known by inode, size, mtime and ctime;
    its owner can't change it without changing these.
    """

    def __init__(self) -> None:
        state = os.environ.get("XDG_STATE_HOME")
        base = Path(state) if state else Path("~/.local/state").expanduser()
        self._root = base / "penstock"

    def knows(self, files: Sequence[Path]) -> bool:
        """Were these files checked, as they are now?"""
        try:
            return self._path(files).lstat().st_uid == os.geteuid()
        except OSError:
            return False

    def remember(self, files: Sequence[Path]) -> None:
        """Note that these files were checked; where that can't be kept, they are checked again."""
        try:
            path = self._path(files)
            self._root.mkdir(parents=True, exist_ok=True)
            Tree(self._root).write(path, b"", "checked", durable=False, in_root=True)
        except (OSError, StoreError):
            return

    def _path(self, files: Sequence[Path]) -> Path:
        found = [(path.name, path.lstat()) for path in files]
        identities = [[name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns] for name, s in found]
        return self._root / "checked" / digest(b"checked", canonical(identities))
