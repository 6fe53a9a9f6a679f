"""Is what is on disk what was promised? Digests, counts and ledgers of datasets, shards and tokenizers.

Reads every byte once, at the speed of the disk. A shard whose bytes are wrong is marked, so that the next `prepare`
makes its slice again; nothing is deleted, and readers go on with what is there.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import FormatError, StoreError
from penstock.store.cache import Cache
from penstock.store.columns import Columns
from penstock.store.dataset import StoredDataset
from penstock.store.files import file_digest, is_there
from penstock.store.listing import dataset_folders
from penstock.store.manifest import COUNTS, ShardTable, read_manifest
from penstock.store.shard import ShardMeta, read_shard

OnShard = Callable[[str], None]
REDO = "The next prepare makes this slice again"


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is not as promised. `rows` are numbers in the source file, first and last."""

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
class Verified:
    """What was looked at, and what was found."""

    datasets: int = 0
    shards: int = 0
    bytes: int = 0
    redone: int = 0  # rows made again from their sources and compared
    findings: list[Finding] = field(default_factory=list)

    def add(self, other: Verified) -> None:
        """Count in what another run looked at."""
        self.datasets += other.datasets
        self.shards += other.shards
        self.bytes += other.bytes
        self.redone += other.redone
        self.findings += other.findings


def verify_cache(cache: Cache, folders: Iterable[Path] | None = None, on_shard: OnShard | None = None) -> Verified:
    """Check the given datasets, or everything in the cache."""
    cache.check_marker()
    run = _Run(cache, on_shard)
    for folder in dataset_folders(cache) if folders is None else folders:
        run.dataset(folder)
    if folders is None:
        run.loose_shards()
    return run.result


class _Run:
    def __init__(self, cache: Cache, on_shard: OnShard | None) -> None:
        self._cache = cache
        self._on_shard = on_shard
        self._digests: dict[str, str | None] = {}  # of shards; None where it can't be read
        self.result = Verified()

    def _found(self, what: str, path: Path, **where: Any) -> None:
        self.result.findings.append(Finding(what, path, **where))

    def dataset(self, folder: Path) -> None:
        """A manifest, all of its shards, and whether they add up."""
        self.result.datasets += 1
        try:
            dataset = StoredDataset(self._cache, read_manifest(folder / "manifest.json"))
        except FormatError as error:
            self._found(str(error), folder, dataset=folder.name)
            return
        except StoreError as error:
            self._found(f"{error}. The next prepare of it makes it again", folder, dataset=folder.name)
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

    def _shard(self, dataset: StoredDataset, number: int) -> Mapping[str, Any] | None:
        """One shard of a dataset; its ledger, if the shard is as promised."""
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
                wrong = self._bad(name, f"its content is not a shard's ({error!r})")
        first = table.first_rows[number]
        self._found(
            wrong,
            self._cache.shard_path(name),
            dataset=dataset.key,
            shard=name,
            slice=number,
            source=source_name(dataset, table.sources[number]),
            rows=(first, first + table.rows[number] - 1),
        )
        return None

    def _wrong_bytes(self, name: str, digest: str, size: int) -> str | None:
        path = self._cache.shard_path(name)
        if not path.exists():
            return f"the shard is gone. {REDO}"
        found = self._digest(name)
        if found is None:
            return f"the shard can't be read. {REDO} for you"
        if found == digest:
            with contextlib.suppress(OSError):
                self._cache.tree.remove(self._cache.bad_path(name))
            return None
        there = path.stat().st_size
        return self._bad(name, f"{there:,} bytes, not {size:,}" if there != size else "its bytes have changed")

    def _digest(self, name: str) -> str | None:
        if name not in self._digests:
            path = self._cache.shard_path(name)
            self.result.shards += 1
            if self._on_shard is not None:
                self._on_shard(name)
            self._digests[name] = None
            with contextlib.suppress(OSError):
                if is_there(path):
                    self._digests[name] = file_digest(path) if path.stat().st_size else "empty"
                    self.result.bytes += path.stat().st_size
        return self._digests[name]

    def _bad(self, name: str, what: str) -> str:
        return marked_bad(self._cache, name, what)

    def _ledger(self, dataset: StoredDataset, total: Counter[str]) -> None:
        ledger = dataset.ledger
        off = [f"{ledger[name]:,} {name}, its shards {total[name]:,}" for name in COUNTS if ledger[name] != total[name]]
        rejected = sum(ledger["rejected"].values())
        if ledger["rows"] != ledger["kept"] + rejected:
            off.append(f"{ledger['rows']:,} rows, but {ledger['kept']:,} kept and {rejected:,} rejected")
        if off:
            what = f"the ledger does not add up: it says {'; '.join(off)}. Use prepare --force"
            self._found(what, dataset.path, dataset=dataset.key)

    def _tokenizer(self, dataset: StoredDataset) -> None:
        path = self._cache.tokenizer_path(dataset.recipe["tokenizer"])
        if not is_there(path):
            self._found("the dataset's tokenizer is gone. The next prepare puts it back", path, dataset=dataset.key)
        elif file_digest(path) != path.stem:
            self._found("the tokenizer's bytes have changed. Delete it, then prepare again", path, dataset=dataset.key)

    def loose_shards(self) -> None:
        """Shards that no dataset has been made of yet, against the notes beside them."""
        tree = self._cache.tree
        for folder in tree.folders(tree.root / "shards"):
            for path in tree.files(folder):
                if path.suffix == ".arrow" and path.stem not in self._digests:
                    self._loose(path)

    def _loose(self, path: Path) -> None:
        note = self._cache.read_note(path.stem)
        if note is None:
            return  # without a note nothing is promised; a build that wants the shard reads it itself
        wrong = self._wrong_bytes(path.stem, note["digest"], note["bytes"])
        if wrong is not None:
            self._found(wrong, path, shard=path.stem)


def marked_bad(cache: Cache, name: str, what: str) -> str:
    """Mark a shard; says so."""
    try:
        cache.mark_bad(name, what)
    except StoreError as error:
        return f"{what}. It can't be marked ({error}) Use prepare --force"
    return f"{what}. {REDO}"


def _miscounts(columns: Columns, meta: ShardMeta, table: ShardTable, number: int) -> list[str]:
    """Where a shard's counts are not those of its own ledger or of the manifest."""
    counts = {
        "examples": (columns.examples, table.examples[number]),
        "tokens": (columns.tokens, table.tokens[number]),
        "rows": (int(meta.ledger["rows"]), table.rows[number]),
        "rows kept": (len(np.unique(columns.rows)), int(meta.ledger["kept"])),
        "rows rejected": (len(meta.rejected), sum(meta.ledger["rejected"].values())),
    }
    return [f"{there:,} {what}, not {due:,}" for what, (there, due) in counts.items() if there != due]


def source_name(dataset: StoredDataset, source: int) -> str:
    """What users know a source file by."""
    try:
        return str(dataset.notes["files"][source]["name"])
    except (KeyError, IndexError, TypeError):
        return f"source {source}"
