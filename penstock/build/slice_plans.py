"""Remembers how files were cut into slices, keyed by file identity, so that a cache hit does not read the data.

The identity (device, inode, size, mtime and ctime in ns) shows whether a file was written to since, with an exception:
a program that writes through a mapping changes the times only when a clean page becomes dirty, and on tmpfs never. So a
plan is stored only if the file had not changed for `SETTLED` seconds, after which the kernel has written dirty pages
back, and not for files on tmpfs. In addition, the plan holds the hashes of some blocks, which are compared when it is
used. `--rehash` uses no plan.

An object's identity (URL, size, ETag, version) does the same if its store vouches for it by a strong ETag; plans of
other objects are not stored. A plan stored by another user is trusted once this user has computed the same one.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import groupby
from pathlib import Path
from typing import Any

from xxhash import xxh3_64_intdigest

from penstock.digests import bytes_digest, canonical, digest, seal, unseal
from penstock.errors import StoreError
from penstock.prepare.sources.chunks import SteadyFile
from penstock.prepare.sources.joined import RUN_FILES, JoinedIdentity, JoinedPath
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import KeepData, plan_slices
from penstock.prepare.sources.remote import ObjectIdentity, ObjectPath, SourcePath, is_local
from penstock.prepare.sources.slices import SLICE_SIZES, FileIdentity, Identity, Slice, SlicePlan, SourceFile, identity
from penstock.prepare.sources.source_set import SourceSet
from penstock.store.cache import Cache
from penstock.store.files import read_regular
from penstock.store.storage import has_marker
from penstock.store.trust import CheckedContent, Trust

Block = tuple[int, int]  # where a block of a file starts, and its hash
SAMPLE_BYTES = 4 << 20
SETTLED = 60.0  # seconds; Linux writes dirty pages back after 35 s at most, unless configured otherwise
WITHOUT_TIMES = frozenset({"tmpfs", "ramfs"})  # file systems on which writing through a mapping changes no times
BLOCK_BYTES, BLOCKS = 4096, 8  # hashed of each file
BLOCKS_COMPARED = 512  # at a hit, over all files; at least one of each


class SlicePlans:
    """Slice plans, stored in the cache. With `rehash`, plans of files are stored but not used."""

    def __init__(self, cache: Cache, *, rehash: bool = False) -> None:
        self._cache = cache
        self._rehash = rehash
        self._checked = CheckedContent()

    def get(self, file: SourceFile, of: int = 1) -> tuple[Slice, ...] | None:
        """The slices of a file (one `of` so many), or None if its plan is not stored or the file has changed."""
        if self._rehash:
            return None
        found = identity(file.path)
        plan, values = self._plan(found, file.kind)
        if plan is None or not plan.holds_for(found) or plan.kind is not file.kind:
            return None
        blocks = values.get("blocks")
        if isinstance(file.path, Path) and not _same_blocks(file.path, blocks, max(1, BLOCKS_COMPARED // of)):
            return None
        if isinstance(file.path, JoinedPath):
            if is_local(file.path) and _first_blocks(file.path) != blocks:
                return None
            file.path.recall(values["rows"])
        return tuple(replace(part, file=file.ordinal) for part in plan.slices)

    def kinds(self, paths: Sequence[SourcePath]) -> dict[SourcePath, FileKind]:
        """The kinds of objects that were seen before, so that they need not be read to detect them."""
        known: dict[SourcePath, FileKind] = {}
        joined: set[SourcePath] = set()
        for run in _small_objects(paths):
            joined.update(run)
            if (values := self._read(self._kinds_path(run), shared=True)) is not None:
                known |= zip(run, map(FileKind, values["kinds"]), strict=True)
        for path in paths:
            if not isinstance(path, ObjectPath) or path in joined:
                continue
            plan, _ = self._plan(path.identity(), None)
            if plan is not None and plan.holds_for(path.identity()):
                known[path] = plan.kind
        return known

    def put_kinds(self, files: Sequence[SourceFile]) -> None:
        """Store the kinds of runs of small objects, whose own plans are not stored."""
        kinds: dict[SourcePath, FileKind] = {}
        paths: list[SourcePath] = []
        for file in files:
            members = file.path.members if isinstance(file.path, JoinedPath) else [file.path]
            paths += members
            if not is_local(file.path):
                kinds |= dict.fromkeys(members, FileKind.JSONL if file.kind is FileKind.JOINED else file.kind)
        for run in _small_objects(paths):
            if self._read(path := self._kinds_path(run), shared=True) is None:
                self._write(path, {"kinds": [kinds[member].value for member in run]}, shared=True)

    def put(self, file: SourceFile, found: Identity, began: float, slices: Sequence[Slice]) -> None:
        """Store the slices of a file, whose identity was `found` before cutting started at time `began`."""
        more: dict[str, Any] = {"rows": file.path.rows} if isinstance(file.path, JoinedPath) else {}
        changed, devices = 0, ""  # the devices of files, or nothing for objects
        if isinstance(found, FileIdentity):
            changed, devices = max(found.mtime_ns, found.ctime_ns), str(found.device)
        elif isinstance(found, JoinedIdentity):
            changed, devices = found.changed_ns, found.devices
        if devices:
            assert not isinstance(file.path, ObjectPath)
            settled = began - changed / 1e9
            if settled < SETTLED or not WITHOUT_TIMES.isdisjoint(map(_file_system, devices.split())):
                return
            if isinstance(file.path, JoinedPath):
                more["blocks"] = _first_blocks(file.path)
            else:
                more["blocks"] = _hashed_blocks(file.path, found.size)
            if identity(file.path) != found:
                return
        elif not _is_vouched(file.path):
            return
        values = SlicePlan(found, file.kind, tuple(s.without_data() for s in slices)).to_json() | more
        self._write(self._path(found, file.kind), values, shared=not devices)

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

    def _plan(self, found: Identity, kind: FileKind | None) -> tuple[SlicePlan | None, dict[str, Any]]:
        """A stored plan, and what is stored with it."""
        path = self._path(found, kind)
        is_shared = isinstance(found, ObjectIdentity) or (isinstance(found, JoinedIdentity) and not found.devices)
        try:
            values = self._read(path, shared=is_shared) or {}
            return SlicePlan.from_json(values), values
        except (KeyError, TypeError, ValueError):
            return None, {}  # missing or damaged: the file is cut again

    def _read(self, path: Path, *, shared: bool) -> dict[str, Any] | None:
        """A memo; one of an object also from other machines."""
        try:
            if shared:
                self._cache.find_memo(path)
            data = read_regular(path)
            values = unseal(b"memo", data)
        except (OSError, KeyError, TypeError, ValueError, StoreError):
            return None
        return None if self._is_untrusted(path, data) else values

    def _write(self, path: Path, values: dict[str, Any], *, shared: bool) -> None:
        data = seal(b"memo", values)
        with contextlib.suppress(OSError, StoreError):  # optional: without a stored plan, the file is cut again
            if not has_marker(self._cache.files):
                return  # not a cache yet, and the marker must be its first file
            foreign = self._cache.trust is Trust.CHECKED and self._cache.files.is_foreign(
                self._cache.files.relative(path)
            )
            if foreign and read_regular(path) == data:
                self._checked.remember(_content(path, data))
            else:
                self._cache.files.write(self._cache.files.relative(path), data, "memo", durable=False)
                if shared:
                    self._cache.share_memo(path, data)

    def _is_untrusted(self, path: Path, data: bytes) -> bool:
        if self._cache.trust is Trust.ALL or not self._cache.files.is_foreign(self._cache.files.relative(path)):
            return False
        return self._cache.trust is Trust.OWN or not self._checked.knows(_content(path, data))

    def _path(self, found: Identity, kind: FileKind | None) -> Path:
        """Where a plan is. The URL of an object decides its kind."""
        return self._named([*found, kind.value] if isinstance(found, FileIdentity) and kind else [*found])

    def _sample_path(self, files: Sequence[SourceFile], how: object) -> Path | None:
        if not all(_is_vouched(file.path) for file in files):
            return None
        return self._named(["sample", how, [[*identity(file.path)] for file in files]])

    def _kinds_path(self, run: Sequence[ObjectPath]) -> Path:
        return self._named(["kinds", [[*path.identity()] for path in run]])

    def _named(self, values: list[Any]) -> Path:
        name = digest(canonical(values))
        return self._cache.root / "memo" / name[3:5] / f"{name}.json"


def _small_objects(paths: Sequence[SourcePath]) -> Iterator[list[ObjectPath]]:
    """Runs of objects that may be joined, whatever their kinds."""
    for small, run in groupby(paths, lambda path: _is_vouched(path) and identity(path).size < SLICE_SIZES.smallest):
        if small and len(found := [path for path in run if isinstance(path, ObjectPath)]) >= RUN_FILES:
            yield found


def _hashed_blocks(path: Path, size: int) -> list[Block]:
    """Hashes of the first block, the last one, and some between. The places depend on the size alone."""
    last, choose = max(0, size - BLOCK_BYTES), random.Random(size)  # noqa: S311
    starts = {0, last, *(choose.randrange(last + 1) for _ in range(BLOCKS - 2))}
    with contextlib.closing(SteadyFile(path)) as file:
        return [(start, _block_hash(file, start)) for start in sorted(starts)]


def _first_blocks(run: JoinedPath) -> list[int]:
    """Hashes of the first block of each member of a run."""
    return [xxh3_64_intdigest(text) for text in run.texts(BLOCK_BYTES)]


def _same_blocks(path: Path, blocks: Any, most: int) -> bool:
    """Whether a file still has the blocks that were hashed, of which so many are compared."""
    if not blocks:
        return False
    try:
        with contextlib.closing(SteadyFile(path)) as file:
            chosen = random.sample(blocks, min(most, len(blocks)))
            return all(_block_hash(file, start) == value for start, value in chosen)
    except OSError:
        return False


def _block_hash(file: SteadyFile, start: int) -> int:
    file.seek(start)
    return xxh3_64_intdigest(file.read(BLOCK_BYTES))


@cache
def _file_system(device: str) -> str:
    """The kind of file system that a device number belongs to; '' if unknown."""
    number = f"{os.major(int(device))}:{os.minor(int(device))}"
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
            mount, _, rest = line.partition(" - ")
            if mount.split()[2] == number:
                return rest.split()[0]
    return ""


def _content(path: Path, data: bytes) -> list[object]:
    return ["memo", path.name, bytes_digest(data)]


def _is_vouched(path: SourcePath) -> bool:
    return not isinstance(path, Path) and path.is_vouched


def now() -> float:
    """The current time, comparable with file timestamps."""
    return time.time()


# ---- planning --------------------------------------------------------------------------------------------------------
#
# Finds the slices of the sources: from the plan memo for unchanged files, by reading the others.


class SliceFinder:
    """Finds slices, and remembers how each file was sliced."""

    def __init__(self, sources: SourceSet, memo: SlicePlans, max_row_bytes: int) -> None:
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
