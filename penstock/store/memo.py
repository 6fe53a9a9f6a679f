"""Remembers how files were cut into slices, keyed by file identity, so that a cache hit does not read the data.

The identity (device, inode, size, mtime and ctime in ns) shows that a file has not been written to since. A file that
changed within `CLOCK_TICK` of being read could change again within the same tick of the file system's clock, so its
plan is used but not stored. An object's identity (URL, size, ETag, version) does the same if its store vouches for it
by a strong ETag; plans of other objects are not stored. A plan stored by another user is trusted once this user has
computed the same one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.sources import (
    FileIdentity,
    FileKind,
    Identity,
    ObjectPath,
    Slice,
    SlicePlan,
    SourceFile,
    SourcePath,
    identity,
)
from penstock.store.cache import Cache, has_marker
from penstock.store.files import digest, read_regular
from penstock.store.format import canonical, seal, unseal
from penstock.store.trust import CheckedFiles, Trust

SAMPLE_BYTES = 4 << 20
CLOCK_TICK = 0.05  # seconds; kernels timestamp files with a clock that ticks every 1 to 10 ms


class PlanMemo:
    """Slice plans, stored in the cache."""

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self._checked = CheckedFiles()

    def get(self, file: SourceFile) -> tuple[Slice, ...] | None:
        """The slices of a file, or None if its plan is not stored or the file has changed."""
        found = identity(file.path)
        plan = self._plan(found, file.kind)
        if plan is None or not plan.holds_for(found) or plan.kind is not file.kind:
            return None
        return tuple(replace(part, file=file.ordinal) for part in plan.slices)

    def kind(self, path: SourcePath) -> FileKind | None:
        """The kind of an object whose plan is stored, so that it need not be read to detect it."""
        plan = self._plan(identity(path), None) if isinstance(path, ObjectPath) else None
        return plan.kind if plan is not None and plan.holds_for(identity(path)) else None

    def put(self, file: SourceFile, found: Identity, began: float, slices: Sequence[Slice]) -> None:
        """Store the slices of a file, whose identity was `found` before cutting started at time `began`."""
        if isinstance(found, FileIdentity):
            settled = began - max(found.mtime_ns, found.ctime_ns) / 1e9
            if settled < CLOCK_TICK or identity(file.path) != found:
                return
        elif not _is_vouched(file.path):
            return
        plan = SlicePlan(found, file.kind, tuple(s.without_data() for s in slices))
        self._write(self._path(found, file.kind), plan.to_json(), shared=not isinstance(found, FileIdentity))

    def sample(self, files: Sequence[SourceFile], how: object) -> list[bytes] | None:
        """The first rows of objects, as an earlier run read them; `how` says what else the rows depend on."""
        path = self._sample_path(files, how)
        if path is None or (values := self._read(path, shared=True)) is None:
            return None
        return [row.encode("latin-1") for row in values["rows"]]

    def put_sample(self, files: Sequence[SourceFile], how: object, rows: Sequence[bytes]) -> None:
        """Store the first rows of objects."""
        path = self._sample_path(files, how)
        if path is not None and sum(map(len, rows)) <= SAMPLE_BYTES:
            self._write(path, {"rows": [row.decode("latin-1") for row in rows]}, shared=True)

    def _plan(self, found: Identity, kind: FileKind | None) -> SlicePlan | None:
        path = self._path(found, kind)
        try:
            values = self._read(path, shared=not isinstance(found, FileIdentity))
            return None if values is None else SlicePlan.from_json(values)
        except (KeyError, TypeError, ValueError):
            return None  # damaged: the file is cut again

    def _read(self, path: Path, *, shared: bool) -> dict[str, Any] | None:
        """A memo; one of an object also from other machines."""
        try:
            if shared:
                self._cache.find_memo(path)
            values = unseal(b"memo", read_regular(path))
        except (OSError, KeyError, TypeError, ValueError, StoreError):
            return None
        return None if self._is_untrusted(path) else values

    def _write(self, path: Path, values: dict[str, Any], *, shared: bool) -> None:
        data = seal(b"memo", values)
        with contextlib.suppress(OSError, StoreError):  # optional: without a stored plan, the file is cut again
            if not has_marker(self._cache.tree):
                return  # not a cache yet, and the marker must be its first file
            foreign = self._cache.trust is Trust.CHECKED and self._cache.tree.is_foreign(path)
            if foreign and read_regular(path) == data:
                self._checked.remember([path])
            else:
                self._cache.tree.write(path, data, "memo", durable=False)
                if shared:
                    self._cache.share_memo(path, data)

    def _is_untrusted(self, path: Path) -> bool:
        if self._cache.trust is Trust.ALL or not self._cache.tree.is_foreign(path):
            return False
        return self._cache.trust is Trust.OWN or not self._checked.knows([path])

    def _path(self, found: Identity, kind: FileKind | None) -> Path:
        """Where a plan is. The URL of an object decides its kind."""
        return self._named([*found, kind.value] if isinstance(found, FileIdentity) and kind else [*found])

    def _sample_path(self, files: Sequence[SourceFile], how: object) -> Path | None:
        if not all(_is_vouched(file.path) for file in files):
            return None
        return self._named(["sample", how, [[*identity(file.path)] for file in files]])

    def _named(self, values: list[Any]) -> Path:
        name = digest(canonical(values))
        return self._cache.root / "memo" / name[3:5] / f"{name}.json"


def _is_vouched(path: SourcePath) -> bool:
    return isinstance(path, ObjectPath) and path.is_vouched


def now() -> float:
    """The current time, comparable with file timestamps."""
    return time.time()
