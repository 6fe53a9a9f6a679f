"""Copies datasets between caches: `penstock cache push` and `pull`.

The order is that of a build: tokenizer, shards, manifest last, under a lease. So a copy that is killed resumes with the
missing shards, and builds and `gc` may run at the same time. Every shard is compared with the manifest's digest.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from penstock.errors import StoreError
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.trust import Trust

THREADS = 8
ATTEMPTS = 3  # if a concurrent gc deletes what was there

OnCopied = Callable[[int], None]


@dataclass(frozen=True, slots=True)
class Transfer:
    """What was copied."""

    key: str
    address: str
    shards: int
    copied: int
    bytes: int  # of the copied shards


def copy_dataset(dataset: Dataset, target: Cache, on_copied: OnCopied | None = None) -> Transfer:
    """Copy a dataset to another cache, except the shards that are there already.

    Copies belong to the user who makes them, so shards by other users are refused until they have been checked.
    """
    source, table = dataset.cache, dataset.manifest.shards
    digests = dict(zip(table.names, table.digests, strict=True))
    foreign = [path for path in source.unchecked(list(digests), dataset.key) if path.stem in digests]
    if foreign and source.trust is not Trust.ALL:
        raise StoreError(
            f"{dataset.address}: {len(foreign)} of {len(digests)} shards were written by others; copies would count as "
            "yours. Check them first (run the same prepare on this cache), or copy them with --trust all."
        )
    target.prepare_root()
    target.store_tokenizer(dataset.tokenizer_json)
    copied: dict[str, int] = {}

    def copy(name: str) -> None:
        data = source.shard_data(name, digests[name])
        target.commit_shard(name, data, source.shard_record(name), keep_copy=False)
        copied[name] = len(data)
        if on_copied is not None:
            on_copied(len(data))

    with target.lease([*digests, str(dataset.recipe["tokenizer"])]):
        for _ in range(ATTEMPTS):
            target.refresh(digests)
            missing = [name for name in digests if not target.has_shard(name)]
            with ThreadPoolExecutor(THREADS, "penstock-copy") as pool:
                list(pool.map(copy, missing))
            if target.all_present(digests):
                break
        else:
            raise StoreError(f"{target.address}: shards disappear as soon as they are written. Run the copy again.")
        dataset.manifest.commit(target)
    _copy_notes(dataset, target)
    made = f"{target.address}/datasets/{dataset.key}"
    return Transfer(dataset.key, made, len(digests), len(copied), sum(copied.values()))


def _copy_notes(dataset: Dataset, target: Cache) -> None:
    try:
        notes = dataset.cache.read_file(dataset.path / "notes.json")
    except OSError:
        return
    target.write_file(target.dataset_path(dataset.key) / "notes.json", notes, "notes", durable=False)
