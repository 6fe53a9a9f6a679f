"""A beacon: a file by which workers on other hosts can tell that they see the same cache folder.

Every cache has the same marker, so a marker at the right path proves nothing: each host may have a folder of its own
there. The beacon's name is random and never used twice. A build that is killed leaves it behind as a temporary file of
a dead writer, which is cleaned up with the others.
"""

from __future__ import annotations

import contextlib
import time

from penstock.store.tree import Tree, temporary_name

_PAUSES = (0.0, 0.5, 2.0, 5.0)  # seconds; an NFS client may see another host's new files with a delay


class Beacon:
    """A beacon that this process keeps in a cache."""

    def __init__(self, tree: Tree) -> None:
        self._tree, self.name = tree, temporary_name()

    def light(self) -> None:
        """Create the file, unless it exists."""
        self._tree.touch(self._tree.tmp / self.name, create=True)

    def close(self) -> None:
        """Remove the file."""
        with contextlib.suppress(OSError):
            self._tree.remove(self._tree.tmp / self.name)


def sees_beacon(tree: Tree, name: str) -> bool:
    """Whether the beacon of another process is in this folder. Lists it, to bypass a network file system's cache."""
    for pause in _PAUSES:
        time.sleep(pause)
        with contextlib.suppress(OSError):  # there is no such folder here
            if name in tree.names(tree.tmp):
                return True
    return False
