"""Lists the datasets and shards of a cache. Reads manifests only, no shards."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from penstock.digests import NAME
from penstock.errors import StoreError
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.files import explain_os_errors
from penstock.store.manifest import read_manifest
from penstock.store.storage import Entry


@dataclass(frozen=True, slots=True)
class DatasetEntry:
    """A dataset in a cache. `prepared` and `used` are timestamps; `problem` says why it can't be opened, if so."""

    key: str
    path: Path
    name: str = ""
    rows: int = 0
    examples: int = 0
    tokens: int = 0
    slices: int = 0
    bytes: int = 0
    prepared: float = 0.0
    used: float = 0.0
    problem: str | None = None


def list_datasets(cache: Cache) -> list[DatasetEntry]:
    """All datasets of a cache, the most recently used first."""
    cache.check_marker()
    cache.find_datasets()
    found = [_listed(cache, folder) for folder in dataset_folders(cache)]
    return sorted(found, key=lambda entry: (-entry.used, entry.key))


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A shard in a cache. `host` is empty if unknown; `datasets` are the keys that reference the shard."""

    name: str
    path: Path
    bytes: int
    user: str
    uid: int
    host: str
    written: float
    datasets: tuple[str, ...]


def list_shards(cache: Cache) -> list[ShardEntry]:
    """All shards of a cache and who wrote them."""
    cache.check_marker()
    cache.find_datasets()
    needed: dict[str, list[str]] = {}
    for folder in dataset_folders(cache):
        with contextlib.suppress(StoreError):  # `list_datasets` reports it
            for name in dict.fromkeys(read_manifest(folder / "manifest.json").shards.names):
                needed.setdefault(name, []).append(folder.name)
    shards = cache.storage.shards()
    cache.fetch(shards)
    return [_listed_shard(cache, name, entry, tuple(needed.get(name, ()))) for name, entry in shards.items()]


def _listed_shard(cache: Cache, name: str, found: Entry, datasets: tuple[str, ...]) -> ShardEntry:
    writer, path = cache.writer(name), cache.shard_path(name)
    return ShardEntry(name, path, found.size, writer.user, writer.uid, writer.host, found.modified, datasets)


def dataset_folders(cache: Cache) -> list[Path]:
    """The dataset folders that hold a manifest."""
    return [folder for folder in key_folders(cache) if has_manifest(folder)]


def key_folders(cache: Cache) -> list[Path]:
    """All folders named by a key. Raises if they can't be listed: `gc` must not mistake that for an empty cache."""
    path = cache.root / "datasets"
    with explain_os_errors(path, "can't be read"):
        try:
            return [path / name for name in cache.files.names("datasets") if re.fullmatch(NAME, name)]
        except FileNotFoundError:
            return []


def has_manifest(folder: Path) -> bool:
    """Whether there is a manifest, readable or not."""
    try:
        (folder / "manifest.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True
    return True


def last_use(folder: Path) -> float:
    """When a dataset was last opened or prepared."""
    times = [_modified(folder / "manifest.json"), _modified(folder / "used")]
    return max(times)


def _listed(cache: Cache, folder: Path) -> DatasetEntry:
    manifest_time = _modified(folder / "manifest.json")
    try:
        dataset = Dataset(cache, read_manifest(folder / "manifest.json"))
    except StoreError as error:
        return DatasetEntry(folder.name, folder, prepared=manifest_time, used=last_use(folder), problem=str(error))
    table = dataset.manifest.shards
    return DatasetEntry(
        key=dataset.key,
        path=folder,
        name=_name(dataset),
        rows=sum(table.rows),
        examples=len(dataset),
        tokens=dataset.tokens,
        slices=len(table.names),
        bytes=sum(dict(zip(table.names, table.bytes, strict=True)).values()),
        prepared=manifest_time,
        used=last_use(folder),
    )


def _name(dataset: Dataset) -> str:
    """A readable name: the files and the tokenizer that the dataset was last prepared from."""
    files = [Path(name).name for name in dataset.source_names]
    shown = ", ".join(files[:2]) + (f" and {len(files) - 2} more" if len(files) > 2 else "")
    tokenizer = Path(str(dataset.origins.get("tokenizer", ""))).name
    return " · ".join(part for part in (shown, tokenizer) if part)


def _modified(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0
