"""Which users' files in a shared cache are reused, and who wrote them.

A shard is named by its inputs, so anyone who can write to a cache could store other tokens under the right name. A
file's owner comes from the file system and can be relied on; the host comes from the note beside a shard, which its
writer could forge.
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
    """Which shards are reused besides the user's own."""

    CHECKED = "checked"  # other users', after a sample of each was checked against the references
    OWN = "own"  # none
    ALL = "all"  # all, unchecked


class ShardWriter(NamedTuple):
    """Who wrote a shard. `host` is empty if the note beside it is lost or owned by someone else."""

    uid: int
    user: str
    host: str

    def __str__(self) -> str:
        return f"{self.user} on {self.host or 'an unknown host'}"


def shard_writer(cache: Cache, name: str) -> ShardWriter:
    """The owner of a shard, and the host it was written on."""
    uid, note = cache.shard_path(name).lstat().st_uid, cache.read_note(name) or {}
    host = str(note.get("host", ""))
    with contextlib.suppress(OSError):  # the note may be missing
        if cache.note_path(name).lstat().st_uid == uid and re.fullmatch(r"[\w.-]{1,253}", host):
            return ShardWriter(uid, _user(uid), host)
    return ShardWriter(uid, _user(uid), "")


def _user(uid: int) -> str:
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
    they are too large to be read on every hit: see `store.copies`.
    """

    def __init__(self) -> None:
        self._root = state_folder()

    def knows(self, content: Sequence[object] | None) -> bool:
        """Whether what these JSON values identify was checked."""
        try:
            return content is not None and self._path(content).lstat().st_uid == os.geteuid()
        except OSError:
            return False

    def remember(self, content: Sequence[object] | None) -> None:
        """Record that what these JSON values identify was checked. If that fails, it is checked again next time."""
        if content is None:
            return
        with contextlib.suppress(OSError, StoreError):
            self._root.mkdir(parents=True, exist_ok=True)
            Tree(self._root).write(self._path(content), b"", "checked", durable=False, in_root=True)

    def _path(self, content: Sequence[object]) -> Path:
        return self._root / "checked" / digest(b"checked", canonical(content))
