"""Garbage collection: deletes shards, tokenizers, inputs and folders that no manifest references, and orphaned files.

Safe alongside readers, which only read what a manifest references. Safe alongside builds on any host: a shard is first
set aside, then leases and manifests are read again, and only then is it deleted (see `store.claims`). Files younger
than a threshold stay, so that concurrent builds rarely repeat work. If a manifest or lease can't be read, nothing is
deleted, because what it references is unknown.

Orphans are what dead processes left behind: temporary files, claims, leases, and shards that a killed `gc` had set
aside. Removing them costs a few listings, so every build does it at its start. Only processes of this host can be known
to be dead; what other hosts left is removed by `gc` when it is old.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from penstock.errors import StoreError
from penstock.store.cache import Cache
from penstock.store.claims import EXPIRY, ServerClock, clean_claims, clean_leases, leased_names
from penstock.store.files import fault, read_regular, writer_is_dead, writer_name
from penstock.store.manifest import read_manifest
from penstock.store.tree import ASIDE
from penstock.store.upkeep.listing import dataset_folders, has_manifest, key_folders, last_use

DAY = 86400.0
RETIRED_AGE = 30 * DAY  # how long replaced shards and unused copies stay for readers that have them mapped
MEMO_AGE = 90 * DAY  # how long slice plans are kept; recomputing one costs a pass over the file


class Garbage(NamedTuple):
    """Unreferenced files that are deleted together: a shard, its note and its mark."""

    paths: tuple[Path, ...]
    bytes: int
    age: float


@dataclass(slots=True)
class GcReport:
    """What was deleted, or would be in a dry run."""

    datasets: list[str] = field(default_factory=list)
    shards: int = 0
    tokenizers: int = 0
    leftovers: int = 0  # temporary files, memos, folders
    bytes: int = 0
    kept_bytes: int = 0  # shards that remain
    refused: int = 0  # files owned by other users


def collect_garbage(
    cache: Cache,
    *,
    older_than: float = DAY,
    max_bytes: int | None = None,
    drop_unused: float | None = None,
    dry_run: bool = False,
) -> GcReport:
    """Delete unreferenced files older than `older_than` seconds.

    With `max_bytes`, delete the oldest shards only until the rest fit. With `drop_unused`, first drop the datasets that
    have not been opened for that many seconds.
    """
    return _Collector(cache, older_than, dry_run).run(max_bytes, drop_unused)


class _Collector:
    def __init__(self, cache: Cache, older_than: float, dry_run: bool) -> None:
        self._cache = cache
        self._older_than = older_than
        self._dry_run = dry_run
        self._tree = cache.tree
        self._clock = ServerClock(cache.tree)
        self.result = GcReport()

    def run(self, max_bytes: int | None, drop_unused: float | None) -> GcReport:
        """Drop datasets, delete unreferenced shards, then everything else."""
        if not self._cache.check_marker():
            raise StoreError(f"{self._cache.root}: not a cache. Name one with --cache or PENSTOCK_CACHE.")
        dropped = set() if drop_unused is None else self._drop(drop_unused)
        shards, tokenizers = referenced(self._cache, leave_out=dropped)
        loose = sorted(self._unreferenced_shards(shards), key=lambda garbage: -garbage.age)
        self._delete_shards(self._oldest_over_limit(loose, max_bytes))
        self._leftovers(tokenizers)
        self.result.leftovers += self._cache.copies.remove_unused(RETIRED_AGE, dry_run=self._dry_run)
        self.result.kept_bytes = _shard_bytes(self._cache) - (self.result.bytes if self._dry_run else 0)
        return self.result

    def _drop(self, unused: float) -> set[str]:
        """Drop datasets unused for that long; the manifest goes first, so that no reader sees half a dataset."""
        now = self._clock.now()
        old = [folder for folder in dataset_folders(self._cache) if now - last_use(folder) > unused]
        self.result.datasets = [folder.name for folder in old]
        for folder in old:
            self._unlink(folder / "manifest.json")
            self._remove_folder(folder)
        return {folder.name for folder in old}

    def _unreferenced_shards(self, referenced_names: set[str]) -> Iterator[Garbage]:
        """Shards that no manifest references, with the files beside them."""
        for folder in self._tree.folders(self._cache.root / "shards"):
            groups: dict[str, list[Path]] = {}
            for path in self._tree.files(folder):
                groups.setdefault(path.stem, []).append(path)
            for name, paths in groups.items():
                if name not in referenced_names:
                    garbage = self._garbage(paths)
                    if garbage is not None and garbage.age > self._older_than:
                        yield garbage

    def _garbage(self, paths: list[Path]) -> Garbage | None:
        try:
            age = min(self._clock.age(path) for path in paths)
            return Garbage(tuple(paths), sum(path.lstat().st_size for path in paths), age)
        except OSError:
            return None  # another process is removing it

    def _oldest_over_limit(self, loose: list[Garbage], max_bytes: int | None) -> list[Garbage]:
        """The oldest shards, enough of them to get below the limit."""
        if max_bytes is None:
            return loose
        total = _shard_bytes(self._cache)
        chosen: list[Garbage] = []
        for garbage in loose:
            if total <= max_bytes:
                break
            chosen.append(garbage)
            total -= garbage.bytes
        return chosen

    def _delete_shards(self, garbage: list[Garbage]) -> None:
        """Set shards aside, look for new references, then delete or restore them."""
        aside: list[tuple[Garbage, list[tuple[Path, Path]]]] = []
        for group in garbage:
            moved = [] if self._dry_run else self._set_aside(group)
            if moved or self._dry_run:
                aside.append((group, moved))
        fault("gc.aside")
        again, _ = referenced(self._cache) if aside and not self._dry_run else (set(), set())
        for group, moved in aside:
            if group.paths[0].stem in again:
                for place, hidden in moved:
                    self._tree.move(hidden, place, keep_existing=True)
                continue
            for _, hidden in moved:
                self._tree.remove(hidden)
            fault("gc.delete")
            self.result.shards += any(path.suffix == ".arrow" for path in group.paths)
            self.result.bytes += group.bytes

    def _set_aside(self, group: Garbage) -> list[tuple[Path, Path]]:
        moved: list[tuple[Path, Path]] = []
        for path in sorted(group.paths):  # the shard before its note
            hidden = self._tree.tmp / f"{writer_name()}.aside.{path.name}"
            try:
                self._tree.move(path, hidden)
                moved.append((path, hidden))
            except FileNotFoundError:
                continue
            except OSError:
                self.result.refused += 1
        return moved

    def _leftovers(self, tokenizers: set[str]) -> None:
        if not self._dry_run:
            self.result.leftovers += clean_orphans(self._cache)
        for path in temporary_files(self._cache):
            if self._is_old(path, max(self._older_than, DAY)):  # left by other hosts
                with contextlib.suppress(OSError):
                    self.result.leftovers += 1 if self._dry_run else remove_orphan(self._cache, path)
        for path in self._tree.files(self._cache.root / "retired"):
            with contextlib.suppress(OSError):
                if self._clock.now() - path.lstat().st_ctime > RETIRED_AGE:  # ctime: when it was retired
                    self.result.leftovers += self._unlink(path)
        if not self._build_in_progress():
            for path in self._tree.files(self._cache.root / "tokenizers"):
                if path.stem not in tokenizers and self._is_old(path, self._older_than):
                    self.result.tokenizers += self._unlink(path)
            inputs = _noted_inputs(self._cache)
            for folder in self._tree.folders(self._cache.root / "inputs"):
                for path in self._tree.files(folder):
                    if path.name not in inputs and self._is_old(path, self._older_than):
                        self.result.leftovers += self._unlink(path)
        for folder in self._tree.folders(self._cache.root / "memo"):
            for path in self._tree.files(folder):
                if self._is_old(path, max(self._older_than, MEMO_AGE)):
                    self.result.leftovers += self._unlink(path)
        for folder in key_folders(self._cache):
            if not has_manifest(folder) and self._is_old(folder, max(self._older_than, EXPIRY)):
                self.result.leftovers += 1
                self._remove_folder(folder)

    def _build_in_progress(self) -> bool:
        return bool(self._tree.files(self._cache.root / "claims"))

    def _is_old(self, path: Path, age: float) -> bool:
        try:
            return self._clock.age(path) > age
        except OSError:
            return False

    def _unlink(self, path: Path) -> bool:
        if self._dry_run:
            return True
        try:
            self._tree.remove(path)
        except OSError:
            self.result.refused += 1
            return False
        return True

    def _remove_folder(self, folder: Path) -> None:
        inner = folder / "reference"
        for path in (*self._tree.files(inner), *self._tree.files(folder)):
            if path.name != "manifest.json":
                self._unlink(path)
        if not self._dry_run:
            self._tree.remove_folder(inner)
            self._tree.remove_folder(folder)


def referenced(cache: Cache, leave_out: Collection[str] = ()) -> tuple[set[str], set[str]]:
    """The shards and tokenizers that a lease or manifest references. Leases are read first: manifests replace them."""
    shards = leased_names(cache.tree)
    tokenizers = set(shards)
    for folder in dataset_folders(cache):
        if folder.name in leave_out:
            continue
        try:
            manifest = read_manifest(folder / "manifest.json")
        except StoreError as error:
            if not has_manifest(folder):
                continue  # dropped in the meantime
            raise StoreError(
                f"{error} Nothing was deleted, because the shards it needs are unknown. "
                "Prepare it again, or delete its folder yourself."
            ) from error
        shards.update(manifest.shards.names)
        tokenizers.add(str(manifest.recipe["tokenizer"]))
    return shards, tokenizers


def _noted_inputs(cache: Cache) -> set[str]:
    """Names of the inputs that datasets were made of, by their notes; all that is lost with one is the way back."""
    names: set[str] = set()
    for folder in dataset_folders(cache):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            files = orjson.loads(read_regular(folder / "notes.json"))["files"]
            names.update(Path(str(entry["path"])).name for entry in files)
    return names


def _shard_bytes(cache: Cache) -> int:
    total = 0
    for folder in cache.tree.folders(cache.root / "shards"):
        for path in cache.tree.files(folder):
            with contextlib.suppress(OSError):
                total += path.lstat().st_size
    return total


def temporary_files(cache: Cache) -> list[Path]:
    """All temporary files: being written, or left by a writer that died."""
    return [*cache.tree.files(cache.root), *cache.tree.files(cache.tree.tmp)]


def clean_orphans(cache: Cache) -> int:
    """Remove what dead processes of this host left behind; returns the number of temporary files removed."""
    removed = 0
    for path in temporary_files(cache):
        if writer_is_dead(path.name):
            with contextlib.suppress(OSError):  # cleaned up concurrently, or owned by another user
                removed += remove_orphan(cache, path)
    clean_claims(cache.tree)
    clean_leases(cache.tree)
    return removed + cache.clean_orphans()


def remove_orphan(cache: Cache, path: Path) -> bool:
    """Remove a temporary file of a dead writer. A shard that `gc` had set aside is restored: it may be in use."""
    aside = ASIDE.fullmatch(path.name)
    if aside and aside["suffix"] != ".bad":
        place = cache.shard_path(aside["name"]).with_suffix(aside["suffix"])
        return not cache.tree.move(path, place, keep_existing=True)
    return cache.tree.remove(path)
