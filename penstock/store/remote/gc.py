"""Garbage collection in an object store: deletes what no manifest references. See `store.remote.claims` for its safety.

Ages are measured by the store's clock. A `gc` that is suspended for longer than `COLLECTION_TIME` while it deletes
gives up: builders wait for it no longer than `COLLECTION_EXPIRY`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.errors import StoreError
from penstock.objects import ObjectInfo
from penstock.store.files import fault
from penstock.store.remote.cache import RemoteCache
from penstock.store.remote.claims import COLLECTION_TIME, clean_remote, remote_leased
from penstock.store.tree import NAME, temporary_name
from penstock.store.upkeep.gc import DAY, MEMO_AGE, GcReport, referenced

BATCH = 1000  # shards in one collection


class _Loose(NamedTuple):
    age: float
    bytes: int
    name: str
    paths: tuple[str, ...]  # the shard first


def collect_remote(
    cache: RemoteCache,
    *,
    older_than: float = DAY,
    max_bytes: int | None = None,
    drop_unused: float | None = None,
    dry_run: bool = False,
) -> GcReport:
    """Delete unreferenced objects older than `older_than` seconds; the options are those of `collect_garbage`."""
    if not cache.check_marker():
        raise StoreError(f"{cache.url}: not a cache. Name one with --cache or PENSTOCK_CACHE.")
    return _RemoteCollector(cache, older_than, dry_run).run(max_bytes, drop_unused)


class _RemoteCollector:
    def __init__(self, cache: RemoteCache, older_than: float, dry_run: bool) -> None:
        self._cache, self._folder = cache, cache.remote
        self._older_than, self._dry_run = older_than, dry_run
        self.result = GcReport()

    def run(self, max_bytes: int | None, drop_unused: float | None) -> GcReport:
        dropped = set() if drop_unused is None else self._drop(drop_unused)
        shards, tokenizers = self._referenced(dropped)
        listed = {path: info for path, info in self._folder.objects("shards").items() if path.endswith(_KINDS)}
        total = sum(info.size for info in listed.values())
        loose = sorted(self._loose(listed, shards), reverse=True)
        self._delete(_oldest_over_limit(loose, total, max_bytes), dropped)
        self._leftovers(tokenizers)
        self.result.kept_bytes = total - self.result.bytes
        return self.result

    def _referenced(self, leave_out: Iterable[str]) -> tuple[set[str], set[str]]:
        """The shards and tokenizers that a lease or manifest references. Leases are read first."""
        leased = remote_leased(self._folder)
        self._cache.find_datasets()
        shards, tokenizers = referenced(self._cache, leave_out=list(leave_out))
        return shards | leased, tokenizers | leased

    def _drop(self, unused: float) -> set[str]:
        """Drop datasets unused for that long; the manifest goes first, so that no reader sees half a dataset."""
        found: dict[str, dict[str, ObjectInfo]] = {}
        for path, info in self._folder.objects("datasets").items():
            if parts := re.fullmatch(rf"datasets/({NAME})/(.+)", path):
                found.setdefault(parts[1], {})[parts[2]] = info
        for key, files in found.items():
            times = [self._folder.age(files[name]) for name in ("manifest.json", "used") if name in files]
            if "manifest.json" in files and min(times) > unused:
                self.result.datasets.append(key)
                for name in sorted(files, key=lambda name: name != "manifest.json"):
                    self._remove(f"datasets/{key}/{name}")
        return set(self.result.datasets)

    def _loose(self, listed: dict[str, ObjectInfo], shards: set[str]) -> Iterator[_Loose]:
        groups: dict[str, list[str]] = {}
        for path in listed:
            groups.setdefault(path.rpartition("/")[2].partition(".")[0], []).append(path)
        for name, paths in groups.items():
            age = min(self._folder.age(listed[path]) for path in paths)
            if re.fullmatch(NAME, name) and name not in shards and age > self._older_than:
                yield _Loose(age, sum(listed[path].size for path in paths), name, tuple(sorted(paths)))

    def _delete(self, loose: list[_Loose], dropped: set[str]) -> None:
        """Announce a collection, look for new references, then delete what still has none."""
        for first in range(0, len(loose), BATCH):
            batch = loose[first : first + BATCH]
            if self._dry_run:
                self._count(batch)
                continue
            path, began = f"collections/{temporary_name()}", time.monotonic()
            self._folder.put(path, "\n".join(garbage.name for garbage in batch).encode())
            fault("gc.aside")
            again, _ = self._referenced(dropped)
            chosen = [garbage for garbage in batch if garbage.name not in again]

            def delete(garbage: _Loose, began: float = began) -> None:
                for place in garbage.paths:
                    if time.monotonic() - began > COLLECTION_TIME:
                        raise StoreError("gc was suspended while it deleted shards, and gave up. Run it again.")
                    self._folder.delete(place)

            self._folder.each(delete, chosen)
            fault("gc.delete")
            self._count(chosen)
            self._folder.delete(path)

    def _count(self, deleted: Iterable[_Loose]) -> None:
        for garbage in deleted:
            self.result.shards += any(path.endswith(".arrow") for path in garbage.paths)
            self.result.bytes += garbage.bytes

    def _leftovers(self, tokenizers: set[str]) -> None:
        if not self._dry_run:
            self.result.leftovers += clean_remote(self._folder)
        if not self._folder.objects("claims"):  # else a build may be about to need one
            for path, info in self._folder.objects("tokenizers").items():
                name = path.rpartition("/")[2].removesuffix(".json")
                if re.fullmatch(NAME, name) and name not in tokenizers and self._folder.age(info) > self._older_than:
                    self.result.tokenizers += 1
                    self._remove(path)
        for path, info in self._folder.objects("memo").items():
            if self._folder.age(info) > max(self._older_than, MEMO_AGE):
                self.result.leftovers += 1
                self._remove(path)

    def _remove(self, path: str) -> None:
        if not self._dry_run:
            self._folder.delete(path)


_KINDS = (".arrow", ".index", ".bad")


def _oldest_over_limit(loose: list[_Loose], total: int, max_bytes: int | None) -> list[_Loose]:
    """The oldest shards, enough of them to get below the limit."""
    if max_bytes is None:
        return loose
    chosen: list[_Loose] = []
    for garbage in loose:
        if total <= max_bytes:
            break
        chosen.append(garbage)
        total -= garbage.bytes
    return chosen
