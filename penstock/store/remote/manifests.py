"""Copies of manifests and notes in the local tier, brought up to date before they are read.

With them, everything that reads manifests works on a cache in an object store as on a folder. Modification times are
those of the objects, since they say when a dataset was prepared and used.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from penstock.store.files import is_readable_file, read_regular
from penstock.store.remote.objects import CacheObjects
from penstock.store.tree import NAME, Tree

COPIED = ("notes.json", "manifest.json")


class ManifestCopies:
    """The manifests and notes of a cache in an object store."""

    def __init__(self, folder: CacheObjects, tree: Tree) -> None:
        self._folder, self._tree = folder, tree

    def keys(self, prefix: str) -> list[str]:
        """The keys of the datasets that start with a prefix."""
        if re.fullmatch(NAME, prefix):
            return [prefix] if self._folder.head(f"datasets/{prefix}/manifest.json") is not None else []
        found = [re.fullmatch(rf"datasets/({NAME})/manifest\.json", path) for path in self._folder.objects("datasets")]
        return sorted(match[1] for match in found if match is not None and match[1].startswith(prefix))

    def update(self, key: str) -> None:
        """Bring the manifest and notes of one dataset up to date."""
        for name in COPIED:
            self._copy(f"datasets/{key}/{name}")

    def update_all(self) -> None:
        """Bring the manifests and notes of all datasets up to date, and when they were used."""
        listed = self._folder.objects("datasets")
        found = {path: info for path, info in listed.items() if re.fullmatch(rf"datasets/{NAME}/[a-z.]+", path)}
        wanted = {path for path in found if path.endswith(COPIED)}
        here = [path for inner in self._tree.folders(self._tree.root / "datasets") for path in self._tree.files(inner)]
        present = {path.relative_to(self._tree.root).as_posix() for path in here if path.name in COPIED}
        self._folder.each(self._copy, sorted(wanted | present))
        for path, info in found.items():
            if info.modified is not None:
                self._date(self._tree.root / path, info.modified.timestamp())

    def _copy(self, path: str) -> None:
        """Make a file of the tier equal to its object."""
        data, copy = self._folder.get(path), self._tree.root / path
        if data is None:
            self._tree.remove(copy)
        elif not is_readable_file(copy) or read_regular(copy) != data:
            self._tree.write(copy, data, "copy", durable=False)

    def _date(self, copy: Path, modified: float) -> None:
        with contextlib.suppress(OSError):  # dropped in the meantime
            if copy.name == "used":
                self._tree.touch(copy, create=True)
            if copy.name in ("used", "manifest.json"):
                os.utime(copy, (modified, modified))
