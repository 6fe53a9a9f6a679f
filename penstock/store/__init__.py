"""The cache on disk: committed shards, manifests, and the datasets that read them through mmap.

In: the columns of a slice (from `encode` and `build`), a recipe and a ledger. Out: files that are committed atomically
and named by content, and `StoredDataset`, which serves token ids and segments as numpy views on them.

Start with `cache` for the folder's layout, `tree` for how a file is committed, `shard` and `manifest` for the formats,
`dataset` for reading, `claims` for sharing a cache between processes and hosts, `gc` and `verify` for maintenance.
Names exported here load neither numpy nor pyarrow, so that finding a dataset in the cache takes milliseconds;
`columns`, `shard`, `verify` and `conversations` are imported by their full names.
"""

from penstock.store.cache import Cache
from penstock.store.dataset import RowLocation, StoredDataset, open_dataset
from penstock.store.files import bytes_digest, digest, file_digest
from penstock.store.format import FORMAT_VERSION, canonical
from penstock.store.manifest import Manifest, dataset_key, read_manifest, recipe_digest, shard_name
from penstock.store.trust import Trust

__all__ = [
    "FORMAT_VERSION",
    "Cache",
    "Manifest",
    "RowLocation",
    "StoredDataset",
    "Trust",
    "bytes_digest",
    "canonical",
    "dataset_key",
    "digest",
    "file_digest",
    "open_dataset",
    "read_manifest",
    "recipe_digest",
    "shard_name",
]
