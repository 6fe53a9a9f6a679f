"""A user's own copies of the shards that other users wrote and this user has checked.

The owner of a file can change it through a shared mapping without changing its inode, size, mtime or ctime, so no
record of a check can tell whether a file is still the one that was checked. Therefore the bytes that were checked are
copied to a folder that only this user can write, and read from there. A copy has the name of its shard, so its presence
means that this user has checked it, whichever cache it came from.

Costs the disk space of other users' shards once per user, and a synced write per shard when it is checked.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
import time
from pathlib import Path

from penstock.errors import StoreError
from penstock.store.tree import Tree

LOCAL_VARIABLE = "PENSTOCK_LOCAL_CACHE"
TOUCH_INTERVAL = 86400.0  # seconds between updates of the time of a copy's last use


def user_cache_folder() -> Path:
    """The folder for programs' caches: `XDG_CACHE_HOME` or `~/.cache`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return Path(base) if base else Path("~/.cache").expanduser()


class CheckedCopies:
    """Copies of checked shards, in `PENSTOCK_LOCAL_CACHE`, the user's cache folder, or else the temporary folder."""

    def __init__(self) -> None:
        self._made: Tree | None = None

    def _tree(self) -> Tree | None:
        """The folder of the copies, if there is one."""
        if self._made is None:
            folders = [folder for folder in _candidates() if _is_private(folder)]
            self._made = Tree(folders[0]) if folders else None
        return self._made

    def _make_tree(self) -> Tree:
        for folder in _candidates():
            with contextlib.suppress(OSError):
                folder.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    folder.mkdir(mode=0o700)
                if _is_private(folder):
                    self._made = Tree(folder)
                    return self._made
        tried = " and ".join(map(str, _candidates()))
        raise StoreError(
            f"{tried} can't be created for this user alone, so other users' shards can't be copied after they were "
            f"checked. Name another place with {LOCAL_VARIABLE}, or read them in place with --trust all."
        )

    def find(self, name: str) -> Path | None:
        """The copy of a shard, if this user has checked it. Records its use."""
        tree = self._tree()
        if tree is None:
            return None
        path = _path(tree, name)
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
        tree = self._tree() or self._make_tree()
        try:
            tree.write(_path(tree, name), data, "copy", keep_existing=True)
        except StoreError as error:
            raise StoreError(
                f"{error} It is a copy of another user's shard: {LOCAL_VARIABLE} names another folder for copies, "
                "--trust all reads shards in place."
            ) from error

    def remove_unused(self, seconds: float, *, dry_run: bool) -> int:
        """Delete the copies that have not been used for that long; returns how many."""
        tree, removed = self._tree(), 0
        if tree is None:
            return 0
        for folder in tree.folders(tree.root / "shards"):
            for path in tree.files(folder):
                with contextlib.suppress(OSError):
                    if time.time() - path.lstat().st_mtime > seconds:
                        removed += dry_run or tree.remove(path)
        return removed


def _path(tree: Tree, name: str) -> Path:
    return tree.root / "shards" / name[3:5] / f"{name}.arrow"


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
