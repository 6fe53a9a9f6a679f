"""Finds the slices of the sources: from the plan memo for unchanged files, by reading the others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from penstock.sources import KeepData, ObjectPath, Slice, SourceSet, identity, plan_slices
from penstock.store.memo import PlanMemo, now


class SliceFinder:
    """Finds slices, and remembers how each file was sliced."""

    def __init__(self, sources: SourceSet, memo: PlanMemo, max_row_bytes: int) -> None:
        self._sources = sources
        self._memo = memo
        self._max_row_bytes = max_row_bytes
        self.known_files: dict[int, tuple[Slice, ...]] = {}
        self._divided: dict[int, set[int]] = {}  # by file, the units that several slices share
        for file in sources.files:
            slices = memo.get(file, of=len(sources.files))
            if slices is not None:
                self.known_files[file.ordinal] = slices

    def known(self) -> list[Slice] | None:
        """Returns all slices if no file must be read to find them, else None."""
        files = self._sources.files
        if any(file.ordinal not in self.known_files for file in files):
            return None
        if self._sources.is_whole:
            return [part for file in files for part in self.known_files[file.ordinal]] or None
        if any(file.kind.is_streamed for file in files):
            return None
        return list(self._sources.slices(max_row_bytes=self._max_row_bytes, known=self.known_files))

    @property
    def unknown_bytes(self) -> int:
        """The size of the files that must be read to find their slices."""
        files = (file for file in self._sources.files if file.ordinal not in self.known_files)
        return sum(identity(file.path).size for file in files)

    def planned(self) -> list[Slice] | None:
        """Returns the slices of a split, reading whole files if necessary; None without a split."""
        if self._sources.split is None:
            return None
        self._plan_all()
        return self.known()

    def find(self, keep: KeepData = KeepData.STREAMED) -> Iterator[Slice]:
        """Yields all slices in order and lazily; those read from their file carry its data as `keep` says."""
        if self._sources.split is not None:
            self._plan_all()
        began = now()
        before = {file.ordinal: identity(file.path) for file in self._sources.files}
        found: dict[int, list[Slice]] = {file.ordinal: [] for file in self._sources.files}
        for part in self._sources.slices(max_row_bytes=self._max_row_bytes, known=self.known_files, keep=keep):
            found[part.file].append(part.without_data())
            yield part
        if self._sources.is_whole:
            for file in self._sources.files:
                if file.ordinal not in self.known_files:
                    self._memo.put(file, before[file.ordinal], began, found[file.ordinal])

    def prefetch(self, part: Slice) -> None:
        """Reads a row group or record batch of an object that is divided into several slices, for all workers here."""
        path = self._sources.files[part.file].path
        if not isinstance(path, ObjectPath) or part.file not in self.known_files:
            return
        if part.file not in self._divided:
            counts = Counter(known.unit for known in self.known_files[part.file] if known.units == 1)
            self._divided[part.file] = {unit for unit, count in counts.items() if count > 1}
        if part.units == 1 and part.unit in self._divided[part.file]:
            path.prefetch(part.start, part.end)

    def _plan_all(self) -> None:
        """Slices every file. A split may use only a part of a file, but the memo always holds the whole file."""
        for file in self._sources.files:
            if file.ordinal not in self.known_files:
                began = now()
                whole = plan_slices(file)
                self._memo.put(file, whole.identity, began, whole.slices)
                self.known_files[file.ordinal] = whole.slices
