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
import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import orjson

from penstock.digests import NAME
from penstock.errors import StoreError
from penstock.store.cache import Cache
from penstock.store.claims import EXPIRY, clean_shared, leased_names
from penstock.store.files import fault, read_regular, writer_is_dead
from penstock.store.listing import dataset_folders, has_manifest, key_folders, last_use
from penstock.store.local import LocalStorage
from penstock.store.manifest import read_manifest
from penstock.store.storage import ASIDE, Entry, shard_at

DAY = 86400.0
RETIRED_AGE = 30 * DAY  # how long replaced shards and unused copies stay for readers that have them mapped
MEMO_AGE = 90 * DAY  # how long slice plans are kept; recomputing one costs a pass over the file
BATCH = 1000  # shards that are set aside at a time


class Garbage(NamedTuple):
    """Unreferenced files that are deleted together: a shard and what is beside it."""

    age: float
    name: str
    bytes: int
    paths: tuple[str, ...]  # the shard first


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
        self._cache, self._storage = cache, cache.storage
        self._older_than = older_than
        self._dry_run = dry_run
        self.result = GcReport()

    def run(self, max_bytes: int | None, drop_unused: float | None) -> GcReport:
        """Drop datasets, delete unreferenced shards, then everything else."""
        if not self._cache.check_marker():
            raise StoreError(f"{self._cache.address}: not a cache. Name one with --cache or PENSTOCK_CACHE.")
        dropped = set() if drop_unused is None else self._drop(drop_unused)
        shards, tokenizers = referenced(self._cache, leave_out=dropped)
        found = self._storage.entries("shards")
        total = sum(entry.size for entry in found)
        loose = sorted(self._loose(found, shards), reverse=True)
        self._delete_shards(_oldest_over_limit(loose, total, max_bytes))
        self._leftovers(tokenizers)
        self.result.leftovers += self._cache.copies.remove_unused(RETIRED_AGE, dry_run=self._dry_run)
        self.result.kept_bytes = total - self.result.bytes
        return self.result

    def _drop(self, unused: float) -> set[str]:
        """Drop datasets unused for that long; the manifest goes first, so that no reader sees half a dataset."""
        self._cache.find_datasets()
        now = self._storage.now()
        self.result.datasets = [f.name for f in dataset_folders(self._cache) if now - last_use(f) > unused]
        for key in self.result.datasets:
            self._delete(f"datasets/{key}/manifest.json")
            self._remove_dataset(key)
        return set(self.result.datasets)

    def _loose(self, found: Iterable[Entry], referenced_names: set[str]) -> Iterator[Garbage]:
        """Shards that no manifest references, with the files beside them."""
        groups: dict[str, list[Entry]] = {}
        for entry in found:
            groups.setdefault(entry.name.partition(".")[0], []).append(entry)
        for name, entries in groups.items():
            age = min(map(self._storage.age, entries))
            if re.fullmatch(NAME, name) and name not in referenced_names and age > self._older_than:
                yield Garbage(age, name, sum(entry.size for entry in entries), tuple(sorted(e.path for e in entries)))

    def _delete_shards(self, loose: list[Garbage]) -> None:
        """Set shards aside, look for new references, then delete or restore them."""
        for first in range(0, len(loose), BATCH):
            batch = loose[first : first + BATCH]
            if not self._dry_run:
                batch = self._delete_batch(batch)
            self.result.shards += sum(any(path.endswith(".arrow") for path in garbage.paths) for garbage in batch)
            self.result.bytes += sum(garbage.bytes for garbage in batch)

    def _delete_batch(self, batch: list[Garbage]) -> list[Garbage]:
        aside = self._storage.set_aside([path for garbage in batch for path in garbage.paths])
        self.result.refused += aside.refused
        fault("gc.aside")
        again, _ = referenced(self._cache)

        def settle(garbage: Garbage) -> bool:
            if garbage.name in again:
                aside.restore(garbage.paths)
                return False
            aside.delete(garbage.paths)
            fault("gc.delete")
            return True

        batch = [garbage for garbage in batch if aside.holds(garbage.paths)]
        settled = self._storage.each(settle, batch)
        aside.close()
        return [garbage for garbage, deleted in zip(batch, settled, strict=True) if deleted]

    def _leftovers(self, tokenizers: set[str]) -> None:
        if not self._dry_run:
            self.result.leftovers += clean_orphans(self._cache)
        for entry in self._cache.files.temporaries():  # left by other hosts
            if self._cache.files.age(entry) > max(self._older_than, DAY):
                with contextlib.suppress(OSError):
                    self.result.leftovers += 1 if self._dry_run else remove_orphan(self._cache.files, entry)
        self._empty_folders()
        for entry in self._storage.entries("retired"):
            if self._storage.now() - entry.changed > RETIRED_AGE:  # changed when it was retired
                self.result.leftovers += self._delete(entry.path)
        if not self._storage.entries("claims"):  # else a build may be about to need one
            for entry in self._old("tokenizers"):
                if entry.name.removesuffix(".json") not in tokenizers:
                    self.result.tokenizers += self._delete(entry.path)
            inputs = _noted_inputs(self._cache)
            for entry in self._old("inputs"):
                if entry.name not in inputs:
                    self.result.leftovers += self._delete(entry.path)
        for entry in self._old("memo", MEMO_AGE):
            self.result.leftovers += self._delete(entry.path)

    def _empty_folders(self) -> None:
        """Remove datasets' folders without a manifest."""
        for folder in key_folders(self._cache) if self._storage.is_folder else ():
            found = self._storage.stat(f"datasets/{folder.name}")
            is_old = found is not None and self._storage.age(found) > max(self._older_than, EXPIRY)
            if is_old and not has_manifest(folder):
                self.result.leftovers += 1
                self._remove_dataset(folder.name)

    def _old(self, folder: str, least: float = float("-inf")) -> Iterator[Entry]:
        """The files below a folder that are old enough to be deleted."""
        age = max(self._older_than, least)
        return (entry for entry in self._storage.entries(folder) if self._storage.age(entry) > age)

    def _delete(self, path: str) -> bool:
        if self._dry_run:
            return True
        try:
            self._storage.delete(path)
        except OSError:
            self.result.refused += 1
            return False
        return True

    def _remove_dataset(self, key: str) -> None:
        """Delete what is left of a dataset, except a manifest that a build has committed in the meantime."""
        folder = f"datasets/{key}"
        for entry in self._storage.entries(folder):
            if entry.name != "manifest.json":
                self._delete(entry.path)
        if not self._dry_run:
            self._storage.remove_folder(f"{folder}/reference")
            self._storage.remove_folder(folder)


def _oldest_over_limit(loose: list[Garbage], total: int, max_bytes: int | None) -> list[Garbage]:
    """The oldest shards, enough of them to get below the limit."""
    if max_bytes is None:
        return loose
    chosen: list[Garbage] = []
    for garbage in loose:
        if total <= max_bytes:
            break
        chosen.append(garbage)
        total -= garbage.bytes
    return chosen


def referenced(cache: Cache, leave_out: Collection[str] = ()) -> tuple[set[str], set[str]]:
    """The shards and tokenizers that a lease or manifest references. Leases are read first: manifests replace them."""
    shards = leased_names(cache.storage)
    tokenizers = set(shards)
    cache.find_datasets()
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


def clean_orphans(cache: Cache) -> int:
    """Remove what dead processes of this host left behind; returns the number of files removed."""
    removed = 0
    for entry in cache.files.temporaries():
        if writer_is_dead(entry.name):
            with contextlib.suppress(OSError):  # cleaned up concurrently, or owned by another user
                removed += remove_orphan(cache.files, entry)
    for storage in cache.storages:
        with contextlib.suppress(StoreError):  # unreadable, or read-only for us
            removed += clean_shared(storage)
    return removed


def remove_orphan(files: LocalStorage, entry: Entry) -> bool:
    """Remove a temporary file of a dead writer. A shard that `gc` had set aside is restored: it may be in use."""
    aside = ASIDE.fullmatch(entry.name)
    if aside and aside["suffix"] != ".bad":
        place = shard_at(aside["name"], aside["suffix"].removeprefix("."))
        return not files.move(entry.path, place, keep_existing=True)
    return files.delete(entry.path)
