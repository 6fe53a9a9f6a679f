"""Remembers how files were cut into slices, keyed by file identity, so that a cache hit does not read the data.

The identity (device, inode, size, mtime and ctime in ns) shows that a file has not been written to since. A file that
changed within `CLOCK_TICK` of being read could change again within the same tick of the file system's clock, so its
plan is used but not stored. A plan stored by another user is trusted once this user has computed the same one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from penstock.errors import StoreError
from penstock.sources import FileIdentity, Slice, SlicePlan, SourceFile, identity
from penstock.store.cache import Cache, has_marker
from penstock.store.files import digest, read_regular
from penstock.store.format import canonical, seal, unseal
from penstock.store.trust import CheckedFiles, Trust

CLOCK_TICK = 0.05  # seconds; kernels timestamp files with a clock that ticks every 1 to 10 ms


class PlanMemo:
    """Slice plans, stored in the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._checked = CheckedFiles()

    def get(self, file: SourceFile) -> tuple[Slice, ...] | None:
        """The slices of a file, or None if its plan is not stored or the file has changed."""
        found = identity(file.path)
        path = self._path(file, found)
        try:
            plan = SlicePlan.from_json(unseal(b"memo", read_regular(path)))
        except (OSError, KeyError, TypeError, ValueError):
            return None  # missing or unreadable: the file is cut again
        if self._is_untrusted(path) or not plan.holds_for(found) or plan.kind is not file.kind:
            return None
        return tuple(replace(part, file=file.ordinal) for part in plan.slices)

    def put(self, file: SourceFile, found: FileIdentity, began: float, slices: Sequence[Slice]) -> None:
        """Store the slices of a file, whose identity was `found` before cutting started at time `began`."""
        settled = began - max(found.mtime_ns, found.ctime_ns) / 1e9
        if settled < CLOCK_TICK or identity(file.path) != found:
            return
        plan = SlicePlan(found, file.kind, tuple(s.without_data() for s in slices))
        path, data = self._path(file, found), seal(b"memo", plan.to_json())
        with contextlib.suppress(OSError, StoreError):  # optional: without a stored plan, the file is cut again
            if not has_marker(self._cache.tree):
                return  # not a cache yet, and the marker must be its first file
            foreign = self._cache.trust is Trust.CHECKED and self._cache.tree.is_foreign(path)
            if foreign and read_regular(path) == data:
                self._checked.remember([path])
            else:
                self._cache.tree.write(path, data, "memo", durable=False)

    def _is_untrusted(self, path: Path) -> bool:
        if self._cache.trust is Trust.ALL or not self._cache.tree.is_foreign(path):
            return False
        return self._cache.trust is Trust.OWN or not self._checked.knows([path])

    def _path(self, file: SourceFile, found: FileIdentity) -> Path:
        name = digest(canonical([*found, file.kind.value]))
        return self._cache.root / "memo" / name[3:5] / f"{name}.json"


def now() -> float:
    """The current time, comparable with file timestamps."""
    return time.time()
