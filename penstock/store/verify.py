"""Verifies a cache: digests, counts and ledgers of datasets, shards and tokenizers.

Reads every byte once, at disk speed. A damaged shard is marked, so that the next `prepare` rebuilds its slice; nothing
is deleted, and readers keep the current file.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.digests import bytes_digest
from penstock.errors import FormatError, StoreError
from penstock.prepare.encode.columns import Columns
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.listing import dataset_folders
from penstock.store.manifest import COUNTS, ShardTable, read_manifest
from penstock.store.shard import ShardMeta, read_shard
from penstock.store.trust import read_record

OnShard = Callable[[str], None]
REBUILD = "The next prepare rebuilds this slice"


@dataclass(frozen=True, slots=True)
class CacheProblem:
    """A damaged or missing part of a cache. `rows` are the first and last row number in the source file."""

    what: str
    path: Path
    dataset: str | None = None
    shard: str | None = None
    slice: int | None = None
    source: str | None = None
    rows: tuple[int, int] | None = None

    def __str__(self) -> str:
        where = f" (slice {self.slice}: {self.source}, rows {self.rows[0]} to {self.rows[1]})" if self.rows else ""
        return f"{self.path}{where}: {self.what}"


@dataclass(slots=True)
class VerifyReport:
    """What was checked, and the problems found."""

    datasets: int = 0
    shards: int = 0
    bytes: int = 0
    redone: int = 0  # rows re-encoded from their sources and compared
    findings: list[CacheProblem] = field(default_factory=list)

    def add(self, other: VerifyReport) -> None:
        """Add the results of another run."""
        self.datasets += other.datasets
        self.shards += other.shards
        self.bytes += other.bytes
        self.redone += other.redone
        self.findings += other.findings


def verify_cache(cache: Cache, folders: Iterable[Path] | None = None, on_shard: OnShard | None = None) -> VerifyReport:
    """Check the given datasets, or everything in the cache."""
    cache.check_marker()
    cache.find_datasets()
    run = _Verifier(cache, on_shard)
    for folder in dataset_folders(cache) if folders is None else folders:
        run.dataset(folder)
    if folders is None and cache.storage.is_folder:  # else a build downloads and checks what it reuses
        run.unreferenced_shards()
    return run.result


class _Verifier:
    def __init__(self, cache: Cache, on_shard: OnShard | None) -> None:
        self._cache = cache
        self._on_shard = on_shard
        self._read: dict[str, tuple[str | None, int, str | None]] = {}  # see `_stored`
        self.result = VerifyReport()

    def _found(self, what: str, path: Path, **where: Any) -> None:
        self.result.findings.append(CacheProblem(what, path, **where))

    def dataset(self, folder: Path) -> None:
        """Check a dataset, unless `gc` drops it meanwhile: then nothing is wrong with what is missing."""
        known = len(self.result.findings)
        self._dataset(folder)
        if len(self.result.findings) > known and _is_gone(self._cache.find_dataset(folder.name)):
            del self.result.findings[known:]
            self.result.datasets -= 1

    def _dataset(self, folder: Path) -> None:
        """Check a manifest, all of its shards, and that the ledger adds up."""
        self.result.datasets += 1
        try:
            dataset = Dataset(self._cache, read_manifest(folder / "manifest.json"))
        except FormatError as error:
            self._found(str(error), folder, dataset=folder.name)
            return
        except StoreError as error:
            self._found(f"{error}. The next prepare rebuilds it", folder, dataset=folder.name)
            return
        if dataset.key != folder.name:
            self._found(f"the manifest is that of {dataset.key}. Prepare again", folder, dataset=folder.name)
        total: Counter[str] = Counter()
        whole = True
        for number in range(len(dataset.shards)):
            ledger = self._shard(dataset, number)
            whole = whole and ledger is not None
            total.update({name: int(ledger[name]) for name in COUNTS} if ledger else {})
        if whole:
            self._ledger(dataset, total)
        self._tokenizer(dataset)

    def _shard(self, dataset: Dataset, number: int) -> Mapping[str, Any] | None:
        """Check one shard of a dataset; returns its ledger if the shard is intact."""
        table = dataset.manifest.shards
        name = table.names[number]
        wrong = self._wrong_bytes(name, table.digests[number], table.bytes[number])
        if wrong is None:
            try:
                columns, meta = read_shard(self._cache.shard_path(name))
                off = _miscounts(columns, meta, table, number)
                if not off:
                    return meta.ledger
                wrong = self._bad(name, f"it holds {'; '.join(off)}")
            except (StoreError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
                wrong = self._bad(name, f"its contents are not a valid shard ({error!r})")
        first = table.first_rows[number]
        self._found(
            wrong,
            self._cache.shard_path(name),
            dataset=dataset.key,
            shard=name,
            slice=number,
            source=dataset.source_name(table.sources[number]),
            rows=(first, first + table.rows[number] - 1),
        )
        return None

    def _wrong_bytes(self, name: str, digest: str, size: int) -> str | None:
        found, there, wrong = self._stored(name)
        if found is None:
            return wrong
        if found != digest:
            return self._bad(name, f"{there:,} bytes, not {size:,}" if there != size else "its bytes have changed")
        if wrong is not None:
            return self._bad(name, wrong)
        self._cache.clear_bad(name)
        return None

    def _stored(self, name: str) -> tuple[str | None, int, str | None]:
        """The digest and size of a shard, and what is wrong with its record. Without a digest: why it can't be read."""
        if name not in self._read:
            if self._on_shard is not None:
                self._on_shard(name)
            try:
                data, wrong = self._cache.access.reread(name)
                wrong = f"the shard is missing. {REBUILD}" if data is None else wrong
            except OSError:
                data, wrong = None, f"the shard can't be read. {REBUILD} for you"
            self._read[name] = None if data is None else bytes_digest(data), len(data or b""), wrong
            self.result.shards += 1
            self.result.bytes += len(data or b"")
        return self._read[name]

    def _bad(self, name: str, what: str) -> str:
        return mark_bad_shard(self._cache, name, what)

    def _ledger(self, dataset: Dataset, total: Counter[str]) -> None:
        ledger = dataset.manifest.ledger
        off = [
            f"{ledger[name]:,} {name}, its shards have {total[name]:,}"
            for name in COUNTS
            if ledger[name] != total[name]
        ]
        rejected = sum(ledger["rejected"].values())
        if ledger["rows"] != ledger["kept"] + rejected:
            off.append(f"{ledger['rows']:,} rows, but {ledger['kept']:,} kept and {rejected:,} rejected")
        if off:
            what = f"the ledger does not add up: it has {'; '.join(off)}. Prepare it again with --force"
            self._found(what, dataset.path, dataset=dataset.key)

    def _tokenizer(self, dataset: Dataset) -> None:
        path, data = self._cache.tokenizer_path(dataset.recipe["tokenizer"]), None
        with contextlib.suppress(OSError):
            data = self._cache.storage.read(self._cache.files.relative(path))
        if data is None:
            self._found("the dataset's tokenizer is missing. The next prepare restores it", path, dataset=dataset.key)
        elif bytes_digest(data) != path.stem:
            self._found("the tokenizer's bytes have changed. Delete it, then prepare again", path, dataset=dataset.key)

    def unreferenced_shards(self) -> None:
        """Check shards that no dataset uses yet against the records beside them."""
        for name in sorted(self._cache.storage.shards().keys() - self._read.keys()):
            record = read_record(self._cache.files, name)
            if record is None:
                continue  # nothing to compare with; a build that needs the shard reads it
            wrong = self._wrong_bytes(name, record["digest"], record["bytes"])
            if wrong is not None:
                self._found(wrong, self._cache.shard_path(name), shard=name)


def mark_bad_shard(cache: Cache, name: str, what: str) -> str:
    """Mark a shard as damaged; returns the message for the user."""
    try:
        cache.mark_bad(name, what)
    except StoreError as error:
        return f"{what}. It can't be marked ({error}) Prepare it again with --force"
    return f"{what}. {REBUILD}"


def _miscounts(columns: Columns, meta: ShardMeta, table: ShardTable, number: int) -> list[str]:
    """The counts of a shard that differ from its own ledger or from the manifest."""
    counts = {
        "examples": (columns.examples, table.examples[number]),
        "tokens": (columns.tokens, table.tokens[number]),
        "rows": (int(meta.ledger["rows"]), table.rows[number]),
        "rows kept": (len(np.unique(columns.rows)), int(meta.ledger["kept"])),
        "rows rejected": (len(meta.rejected), sum(meta.ledger["rejected"].values())),
    }
    return [f"{there:,} {what}, not {due:,}" for what, (there, due) in counts.items() if there != due]


def _is_gone(manifest: Path) -> bool:
    """Whether nothing is there any more: a damaged manifest, or a link or pipe in its place, is a problem."""
    try:
        manifest.lstat()
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return False
