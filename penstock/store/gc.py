"""Deletes what no manifest reaches: shards, tokenizers, inputs, folders of dropped datasets, what dead processes left.

Safe beside readers, who only read what a manifest reaches. Safe beside builds on any host: a shard is first put aside,
then leases and manifests are read again, and only then is it deleted; see `store.leases`. What is younger than a
threshold stays, so that builds under way seldom repeat work. When a manifest or lease can't be read, nobody knows what
it reaches, so nothing is deleted.
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
from penstock.store.claims import EXPIRY, ServerClock
from penstock.store.files import fault, read_regular, writer_name
from penstock.store.leases import leased
from penstock.store.listing import dataset_folders, dataset_places, has_manifest, last_use
from penstock.store.manifest import read_manifest
from penstock.store.orphans import clean_orphans, remove_orphan, temporary_files

DAY = 86400.0
RETIRED_AGE = 30 * DAY  # a replaced shard stays this long for those who had mapped it
MEMO_AGE = 90 * DAY  # how files were cut is forgotten after this; finding it again costs one reading


class Garbage(NamedTuple):
    """Files that nothing reaches and that go together."""

    paths: tuple[Path, ...]
    bytes: int
    age: float


@dataclass(slots=True)
class Collected:
    """What was deleted, or would be."""

    datasets: list[str] = field(default_factory=list)
    shards: int = 0
    tokenizers: int = 0
    leftovers: int = 0  # temporary files, memos, folders
    bytes: int = 0
    kept_bytes: int = 0  # shards that stay
    refused: int = 0  # files that belong to others


def collect(
    cache: Cache,
    *,
    older_than: float = DAY,
    max_bytes: int | None = None,
    drop_unused: float | None = None,
    dry_run: bool = False,
) -> Collected:
    """Delete what no manifest reaches and is older than so many seconds; with `max_bytes` no more than needed.

    `drop_unused`: first drop datasets that were not opened for so many seconds.
    """
    return _Run(cache, older_than, dry_run).all(max_bytes, drop_unused)


class _Run:
    def __init__(self, cache: Cache, older_than: float, dry_run: bool) -> None:
        self._cache = cache
        self._older_than = older_than
        self._dry_run = dry_run
        self._tree = cache.tree
        self._clock = ServerClock(cache.tree)
        self.result = Collected()

    def all(self, max_bytes: int | None, drop_unused: float | None) -> Collected:
        """The whole of it."""
        if not self._cache.check_marker():
            raise StoreError(f"{self._cache.root}: there is no cache here. Name it with --cache or PENSTOCK_CACHE.")
        dropped = set() if drop_unused is None else self._drop(drop_unused)
        shards, tokenizers = reached(self._cache, leave_out=dropped)
        loose = sorted(self._loose_shards(shards), key=lambda garbage: -garbage.age)
        self._delete_shards(self._enough(loose, max_bytes))
        self._leftovers(tokenizers)
        self.result.kept_bytes = _shard_bytes(self._cache) - (self.result.bytes if self._dry_run else 0)
        return self.result

    def _drop(self, unused: float) -> set[str]:
        """Drop datasets that nobody has opened for long: the manifest first, so that no reader meets half of it."""
        now = self._clock.now()
        old = [folder for folder in dataset_folders(self._cache) if now - last_use(folder) > unused]
        self.result.datasets = [folder.name for folder in old]
        for folder in old:
            self._unlink(folder / "manifest.json")
            self._remove_folder(folder)
        return {folder.name for folder in old}

    def _loose_shards(self, reached_names: set[str]) -> Iterator[Garbage]:
        """Shards that no manifest reaches, with what stands beside them."""
        for folder in self._tree.folders(self._cache.root / "shards"):
            groups: dict[str, list[Path]] = {}
            for path in self._tree.files(folder):
                groups.setdefault(path.stem, []).append(path)
            for name, paths in groups.items():
                if name not in reached_names:
                    garbage = self._garbage(paths)
                    if garbage is not None and garbage.age > self._older_than:
                        yield garbage

    def _garbage(self, paths: list[Path]) -> Garbage | None:
        try:
            age = min(self._clock.age(path) for path in paths)
            return Garbage(tuple(paths), sum(path.lstat().st_size for path in paths), age)
        except OSError:
            return None  # somebody else removes it

    def _enough(self, loose: list[Garbage], max_bytes: int | None) -> list[Garbage]:
        """The oldest ones, as many as it takes to come below the limit."""
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
        """Put aside, look again, delete or put back."""
        aside: list[tuple[Garbage, list[tuple[Path, Path]]]] = []
        for group in garbage:
            moved = [] if self._dry_run else self._put_aside(group)
            if moved or self._dry_run:
                aside.append((group, moved))
        fault("gc.aside")
        again, _ = reached(self._cache) if aside and not self._dry_run else (set(), set())
        for group, moved in aside:
            if group.paths[0].stem in again:
                for place, hidden in moved:
                    self._tree.move(hidden, place, keep=True)
                continue
            for _, hidden in moved:
                self._tree.remove(hidden)
            fault("gc.delete")
            self.result.shards += any(path.suffix == ".arrow" for path in group.paths)
            self.result.bytes += group.bytes

    def _put_aside(self, group: Garbage) -> list[tuple[Path, Path]]:
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
            if self._is_old(path, max(self._older_than, DAY)):  # of hosts that we can't ask
                with contextlib.suppress(OSError):
                    self.result.leftovers += 1 if self._dry_run else remove_orphan(self._cache, path)
        for path in self._tree.files(self._cache.root / "retired"):
            with contextlib.suppress(OSError):
                if self._clock.now() - path.lstat().st_ctime > RETIRED_AGE:  # ctime: when it got its present name
                    self.result.leftovers += self._unlink(path)
        if not self._someone_builds():
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
        for folder in dataset_places(self._cache):
            if not has_manifest(folder) and self._is_old(folder, max(self._older_than, EXPIRY)):
                self.result.leftovers += 1
                self._remove_folder(folder)

    def _someone_builds(self) -> bool:
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


def reached(cache: Cache, leave_out: Collection[str] = ()) -> tuple[set[str], set[str]]:
    """Names of the shards and tokenizers that a lease or manifest reaches. Leases first: manifests replace them."""
    shards = leased(cache.tree)
    tokenizers = set(shards)
    for folder in dataset_folders(cache):
        if folder.name in leave_out:
            continue
        try:
            manifest = read_manifest(folder / "manifest.json")
        except StoreError as error:
            if not has_manifest(folder):
                continue  # dropped since we looked
            raise StoreError(
                f"{error} So it is not known which shards it needs, and nothing is deleted. "
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
