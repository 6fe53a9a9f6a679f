"""A prepared dataset, read through mmap.

Opening reads the manifest only. A random example costs about two page faults; the first access to a shard also checks
its offsets and segments, so that damaged data raises an error. numpy and pyarrow are imported when the first
shard is read: finding a dataset in the cache needs neither.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import threading
import time
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from penstock.addresses import local_path
from penstock.errors import StoreError, UsageError
from penstock.store.cache import Cache, has_marker
from penstock.store.files import read_regular
from penstock.store.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.encode.vocabulary import Vocabulary
    from penstock.store.columns import Columns
    from penstock.store.shard import ShardMeta

LATEST = "latest"
KEY = re.compile(r"b3-[0-9a-f]{1,64}")
USED_INTERVAL = 3600.0  # seconds between updates of a dataset's `used` mark


class RowLocation(NamedTuple):
    """Where an example comes from: ordinal of the source file and row number in it, both from 0."""

    source: int
    row: int


class StoredDataset:
    """The examples of a manifest, in source order."""

    def __init__(self, cache: Cache, manifest: Manifest) -> None:
        self.cache = cache
        self.manifest = manifest
        self._ends = list(accumulate(manifest.shards.examples))
        self._open: OrderedDict[int, Columns] = OrderedDict()
        self._lock = threading.Lock()
        self._marked = 0.0
        self.keep_open: int | None = None  # shards that stay mapped; None: as many as file descriptors allow

    # -- description ----------------------------------------------------------------------------------------------

    @property
    def key(self) -> str:
        """The content key."""
        return self.manifest.key

    @property
    def path(self) -> Path:
        """The dataset's folder."""
        return self.cache.dataset_path(self.key)

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Everything that determined the tokens besides the rows."""
        return self.manifest.recipe

    @property
    def ledger(self) -> Mapping[str, Any]:
        """The build ledger: rows in = rows kept + rejected, with reasons."""
        return self.manifest.ledger

    @property
    def is_preference(self) -> bool:
        """Whether the dataset holds preference pairs."""
        return self.manifest.preference

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.manifest.shards.tokens)

    def __len__(self) -> int:
        return self.examples // 2 if self.is_preference else self.examples

    def __repr__(self) -> str:
        labelled = self.recipe.get("mapping", {}).get("format") == "kto"
        kind = "pairs" if self.is_preference else "labelled examples" if labelled else "examples"
        return f"<Dataset {self.key[:11]}… {len(self):,} {kind}, {self.tokens:,} tokens>"

    def mark_used(self, *, now: bool = False) -> None:
        """Record that the dataset is in use, for `cache ls` and `cache gc`. Does nothing in a read-only cache."""
        if not now and self._marked and time.monotonic() - self._marked < USED_INTERVAL:
            return
        self._marked = time.monotonic()
        mark = self.path / "used"
        with contextlib.suppress(OSError, StoreError):
            if not has_marker(self.cache.tree):
                return
            with contextlib.suppress(FileNotFoundError):
                if not now and time.time() - mark.lstat().st_mtime <= USED_INTERVAL:
                    return
            try:
                self.cache.tree.touch(mark, create=True)
            except PermissionError:  # another user's mark: replace it
                self.cache.tree.remove(mark)
                self.cache.tree.touch(mark, create=True)

    # -- examples -------------------------------------------------------------------------------------------------

    @property
    def examples(self) -> int:
        """Number of token sequences; a pair has two."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def shard_examples(self) -> npt.NDArray[np.int64]:
        """Number of examples in each shard."""
        import numpy as np

        return np.asarray(self.manifest.shards.examples, np.int64)

    @property
    def shards(self) -> list[str]:
        """Names of the shards, in order."""
        return self.manifest.shards.names

    def columns(self, shard: int) -> Columns:
        """The columns of a shard. Recently used shards stay open."""
        with self._lock:  # loaders read from their own threads
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found
        from penstock.store.shard import read_shard

        self.mark_used()
        columns, _ = read_shard(self.cache.shard_path(self.shards[shard]))
        with self._lock:
            self._open[shard] = columns
            if len(self._open) > (self.keep_open or _open_limit()):
                self._open.popitem(last=False)
        return columns

    def shard_meta(self, shard: int) -> ShardMeta:
        """Ledger, rejected rows and spot-check sample of a shard."""
        from penstock.store.shard import read_shard

        return read_shard(self.cache.shard_path(self.shards[shard]))[1]

    def noted(self, note: str) -> npt.NDArray[np.int64]:
        """Numbers of the examples (of pairs: of the pairs) whose rows have a note, such as `tools_dropped`."""
        import numpy as np

        from penstock.chat.notes import runs_to_rows

        if note not in self.ledger["notes"]:
            known = ", ".join(self.ledger["notes"]) or "none"
            raise UsageError(f"no row has the note {note!r}. Notes of this dataset: {known}.")
        found, before, sides = [np.arange(0)], 0, 2 if self.is_preference else 1
        for shard, examples in enumerate(self.manifest.shards.examples):
            runs = self.shard_meta(shard).noted.get(note)
            if runs:
                rows = self.columns(shard).rows[::sides]
                found.append(np.flatnonzero(np.isin(rows, runs_to_rows(runs))) + before)
            before += examples // sides
        return np.concatenate(found)

    def find(self, example: int) -> tuple[int, int]:
        """The shard that holds an example, and the example's index in it."""
        if not 0 <= example < self.examples:
            raise IndexError(f"example {example} of {self.examples}")
        shard = bisect_right(self._ends, example)
        return shard, example - self._ends[shard] + self.manifest.shards.examples[shard]

    def locate(self, example: int) -> RowLocation:
        """The source row of an example."""
        shard, number = self.find(example)
        table = self.manifest.shards
        return RowLocation(table.sources[shard], table.first_rows[shard] + int(self.columns(shard).rows[number]))

    def input_ids(self, example: int) -> npt.NDArray[Any]:
        """The tokens of an example."""
        shard, number = self.find(example)
        from penstock.store.chains import tokens

        return tokens(self.columns(shard), number)

    # -- tokenizer ------------------------------------------------------------------------------------------------

    @cached_property
    def tokenizer_json(self) -> bytes:
        """The tokenizer.json that the dataset was built with."""
        path = self.cache.tokenizer_path(self.recipe["tokenizer"])
        try:
            return self.cache.tokenizer_json(path.stem)
        except OSError as error:
            raise StoreError(
                f"{path}: the dataset's tokenizer is missing ({error.strerror}). Prepare again."
            ) from error

    @cached_property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary of the dataset's tokenizer."""
        from penstock.encode.vocabulary import Vocabulary

        return Vocabulary(self.tokenizer_json)

    def token_id(self, name: str) -> int | None:
        """The id of a named special token such as `eos_token`, or None if the tokenizer has none."""
        content = self.recipe["special_tokens"].get(name)
        return self.vocabulary.id_of(content) if content is not None else None

    @cached_property
    def notes(self) -> Mapping[str, Any]:
        """The notes beside the manifest: the paths that the dataset was last prepared from."""
        try:
            value = orjson.loads(read_regular(self.path / "notes.json"))
        except (OSError, orjson.JSONDecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    def __reduce__(self) -> tuple[Callable[..., StoredDataset], tuple[str]]:
        return open_dataset, (str(self.path),)


def open_dataset(where: str | os.PathLike[str], *, cache: str | os.PathLike[str] | None = None) -> StoredDataset:
    """Open a prepared dataset by its folder, or by its key (or an unambiguous prefix) in a cache.

    A key may be given without its `b3-`; `latest` is the dataset of the cache that was used last.
    """
    path = local_path(where, "dataset")
    if str(where) == LATEST and not path.exists():
        return _latest(Cache(cache))
    if path.name == "manifest.json":
        path = path.parent
    if (path / "manifest.json").is_file():
        return StoredDataset(Cache(path.absolute().parent.parent), read_manifest(path / "manifest.json"))
    home = Cache(cache)
    key = path.name if path.name.startswith("b3-") else f"b3-{path.name}"
    found = sorted((home.root / "datasets").glob(f"{key}*/manifest.json")) if KEY.fullmatch(key) else []
    if len(found) == 1:
        return StoredDataset(home, read_manifest(found[0]))
    if found:
        raise StoreError(f"{where}: {len(found)} datasets start with this prefix. Give more of the key.")
    raise StoreError(
        f"{where}: no dataset at this path, and none with this key in {home.root}. List them with `penstock cache ls`."
    )


def _latest(home: Cache) -> StoredDataset:
    """The dataset that was prepared or opened last."""
    found = [folder for folder in (home.root / "datasets").glob("b3-*") if (folder / "manifest.json").is_file()]
    if not found:
        raise StoreError(f"latest: there is no dataset in {home.root}. Name the cache with --cache or PENSTOCK_CACHE.")

    def used(folder: Path) -> float:
        times = [folder / name for name in ("used", "manifest.json")]
        return max(path.stat().st_mtime for path in times if path.exists())

    newest = max(found, key=used)
    return StoredDataset(home, read_manifest(newest / "manifest.json"))


def _open_limit() -> int:
    """How many shards may stay mapped; each holds a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft if soft != resource.RLIM_INFINITY else hard, 8192) // 2)
