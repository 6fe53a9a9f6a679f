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
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import orjson

from penstock import surface
from penstock.addresses import scheme_of
from penstock.errors import CorruptError, StoreError, UsageError
from penstock.prepare.sources.joined import member_row
from penstock.store.cache import SCHEMES, Cache, open_cache
from penstock.store.files import read_regular
from penstock.store.manifest import BuildLedger, Manifest, read_manifest
from penstock.store.storage import MARKER, has_marker

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from penstock.arguments import ViewArguments
    from penstock.prepare.encode.columns import Columns
    from penstock.prepare.tokenizer.vocabulary import Vocabulary
    from penstock.store.shard import ShardMeta
    from penstock.surface import ConversationReader, Stats, View

LATEST, MANIFEST = "latest", "manifest.json"
KEY = re.compile(r"b3-[0-9a-f]{1,64}")
_SHOWN_KEYS, _SHOWN_KEY = 4, 11  # datasets in an error, and characters of their keys, as in `penstock cache ls`
DOWNLOAD_BYTES = 4 << 30  # of shards downloaded ahead of their use, at most
USED_INTERVAL = 3600.0  # seconds between updates of a dataset's `used` mark


class RowLocation(NamedTuple):
    """Where an example comes from: ordinal of the source file (or run of small files) and row in it, both from 0."""

    source: int
    row: int

    @property
    def member(self) -> str:
        """In a mixture, the name of the member whose source it is; else nothing."""
        return ""


class MemberRow(RowLocation):
    """The location of a row of a mixture's member. It compares and unpacks as source and row."""

    _member: str

    @classmethod
    def of(cls, location: RowLocation, member: str) -> MemberRow:
        """The location with the member's name."""
        found = cls(*location)
        found._member = member
        return found

    @property
    def member(self) -> str:
        return self._member

    def __repr__(self) -> str:
        return f"RowLocation(source={self.source}, row={self.row}, member={self.member!r})"

    def __reduce__(self) -> tuple[Callable[..., MemberRow], tuple[RowLocation, str]]:
        return MemberRow.of, (RowLocation(*self), self.member)


class Shards:
    """The shards of a dataset, in order. Recently used ones stay mapped."""

    def __init__(self, cache: Cache, manifest: Manifest) -> None:
        self._cache = cache
        self._key = manifest.key
        self._pairs = manifest.preference
        self._table = manifest.shards
        self._ends = list(accumulate(manifest.shards.examples))
        self._open: OrderedDict[int, Columns] = OrderedDict()
        self._lock = threading.Lock()
        self._marked = 0.0
        self._has_structure = False
        self.keep_open: int | None = None  # shards that stay mapped; None: as many as file descriptors allow
        cache.watch(self)

    def __len__(self) -> int:
        return len(self.names)

    @property
    def names(self) -> list[str]:
        """Their names in the cache."""
        return self._table.names

    @property
    def bytes(self) -> list[int]:
        """The sizes of their files."""
        return self._table.bytes

    @property
    def total(self) -> int:
        """Token sequences in all of them; a pair has two."""
        return self._ends[-1] if self._ends else 0

    @cached_property
    def examples(self) -> npt.NDArray[np.int64]:
        """Token sequences in each of them."""
        import numpy as np

        return np.asarray(self._table.examples, np.int64)

    def columns(self, shard: int) -> Columns:
        """The columns of a shard."""
        with self._lock:  # loaders read from their own threads
            found = self._open.get(shard)
            if found is not None:
                self._open.move_to_end(shard)
                return found
        self.mark_used()
        try:
            columns = self.read(shard)
        except CorruptError:
            if not self._cache.is_remote or self._cache.shard_path(self.names[shard]).exists():
                raise
            columns = self.read(shard)  # another process has just made room in the local tier
        with self._lock:
            self._open[shard] = columns
            if len(self._open) > (self.keep_open or self._default_open):
                self._open.popitem(last=False)
        return columns

    def read(self, shard: int) -> Columns:
        """The columns of a shard, mapped for the caller alone, so that mapped pages don't accumulate in memory."""
        from penstock.store.shard import read_shard

        return read_shard(self.file(shard))[0]

    def structure(self, shard: int) -> Columns:
        """The columns of a shard, perhaps without its token ids, which a cache in an object store keeps apart."""
        if not self._cache.is_remote:
            return self.columns(shard)
        with self._lock:
            if shard in self._open:
                return self._open[shard]
            is_first, self._has_structure = not self._has_structure, True
        if self._pairs:  # the common prompt of a pair is found in its tokens
            if is_first:
                self.fetch(range(len(self)))
            return self.columns(shard)
        if is_first:
            self._cache.fetch(self.names)
        return self._cache.structure(self.names[shard])[0]

    def meta(self, shard: int) -> ShardMeta:
        """Ledger, rejected rows and spot-check sample of a shard."""
        return self._cache.structure(self.names[shard])[1]

    def file(self, shard: int) -> Path:
        """The file of a shard on this machine; downloaded first, if the cache is in an object store."""
        return self._cache.shard_file(self.names[shard], self._table.digests[shard])

    def find(self, example: int) -> tuple[int, int]:
        """The shard that holds a token sequence, and the sequence's number in it."""
        if not 0 <= example < self.total:
            raise IndexError(f"example {example} of {self.total}")
        shard = bisect_right(self._ends, example)
        return shard, example - self._ends[shard] + self._table.examples[shard]

    @property
    def download_bytes(self) -> int:
        """Bytes of shards to download ahead of their use; 0 if all shards are on this machine."""
        if not self._cache.is_remote:
            return 0
        most = self._cache.mappable_bytes
        return DOWNLOAD_BYTES if most is None else min(DOWNLOAD_BYTES, max(1, most // 2))

    def fetch(self, shards: Iterable[int]) -> None:
        """Download shards that are not on this machine, many at a time."""
        with self._lock:
            missing = [shard for shard in shards if shard not in self._open]
        self._cache.download({self.names[shard]: self._table.digests[shard] for shard in missing})

    def mark_used(self, *, now: bool = False) -> None:
        """Record that the dataset is in use, for `cache ls` and `cache gc`. Does nothing in a read-only cache."""
        if not now and self._marked and time.monotonic() - self._marked < USED_INTERVAL:
            return
        self._marked = time.monotonic()
        mark = self._cache.dataset_path(self._key) / "used"
        with contextlib.suppress(OSError, StoreError):
            if not has_marker(self._cache.files):
                return
            with contextlib.suppress(FileNotFoundError):
                if not now and abs(time.time() - mark.lstat().st_mtime) <= USED_INTERVAL:
                    return
            self._cache.mark_used(self._key)

    @cached_property
    def _default_open(self) -> int:
        """How many shards stay mapped: half of a local tier's bytes, and no more than file descriptors allow."""
        most = self._cache.mappable_bytes
        fitting = _open_limit() if most is None else max(1, most // max(1, sum(self.bytes) // max(1, len(self))))
        return min(_open_limit(), fitting)

    def _open_files(self) -> list[Path]:
        with self._lock:
            return [self._cache.shard_path(self.names[shard]) for shard in self._open]


class Dataset:
    """A prepared dataset. Call `view` to get examples with loss masks."""

    def __init__(self, cache: Cache, manifest: Manifest) -> None:
        self.cache = cache
        self.manifest = manifest
        self.shards = Shards(cache, manifest)

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
    def address(self) -> str:
        """The folder or URL of the dataset, for `ps.open`."""
        return f"{self.cache.address}/datasets/{self.key}"

    @property
    def recipe(self) -> Mapping[str, Any]:
        """Everything except the rows that determined the tokens."""
        return self.manifest.recipe

    @cached_property
    def ledger(self) -> BuildLedger:
        """The build ledger: rows in = rows kept + rejected, with reasons."""
        return BuildLedger.of(self.manifest.ledger)

    @property
    def notes(self) -> Mapping[str, int]:
        """How many kept rows have which note, such as `tools_dropped`; `rows_with` lists them."""
        return self.ledger.notes

    @property
    def is_preference(self) -> bool:
        """Whether the dataset holds preference pairs."""
        return self.manifest.preference

    @property
    def is_labelled(self) -> bool:
        """Whether each answer is labelled as desirable or not (KTO)."""
        return (self.recipe.get("mapping") or {}).get("format") == "kto"

    @property
    def tokens(self) -> int:
        """Total number of tokens."""
        return sum(self.manifest.shards.tokens)

    def __len__(self) -> int:
        return self.shards.total // 2 if self.is_preference else self.shards.total

    def __repr__(self) -> str:
        kind = "pairs" if self.is_preference else "labelled examples" if self.is_labelled else "examples"
        return f"<Dataset {self.key[:11]}… {len(self):,} {kind}, {self.tokens:,} tokens>"

    def _repr_html_(self) -> str | None:
        return surface.html(self)

    # -- use ------------------------------------------------------------------------------------------------------

    def view(self, **options: Unpack[ViewArguments]) -> View:
        """Apply a loss policy, a maximum length and a hold-out, without encoding anything again."""
        return surface.view(self, options)

    def stats(self, capacity: int | None = None) -> Stats:
        """Statistics of all rows, with the trained tokens of the default view."""
        return surface.stats(self, capacity)

    def input_ids(self, example: int) -> npt.NDArray[Any]:
        """The tokens of an example."""
        from penstock.prepare.faithful.prefixes import tokens

        shard, number = self.shards.find(example)
        return tokens(self.shards.columns(shard), number)

    def rows_with(self, note: str) -> npt.NDArray[np.int64]:
        """Numbers of the examples (of pairs: of the pairs) whose rows have a note."""
        import numpy as np

        from penstock.prepare.chat.notes import runs_to_rows

        if note not in self.notes:
            known = ", ".join(self.notes) or "none"
            raise UsageError(f"no row has the note {note!r}. Notes of this dataset: {known}.")
        found, before, sides = [np.arange(0)], 0, 2 if self.is_preference else 1
        for shard, examples in enumerate(self.shards.examples.tolist()):
            runs = self.shards.meta(shard).noted.get(note)
            if runs:
                rows = self.shards.columns(shard).rows[::sides]
                found.append(np.flatnonzero(np.isin(rows, runs_to_rows(runs))) + before)
            before += examples // sides
        return np.concatenate(found)

    # -- where the rows come from ---------------------------------------------------------------------------------

    def conversation(self, index: int) -> dict[str, Any]:
        """The conversation that example (or pair) `index` was rendered from, reread from its source.

        Returns `messages`, `tools` and template `variables` in the form that transformers' `apply_chat_template`
        takes (`text` for rows without a template); for pairs, one such dictionary each for `chosen` and `rejected`.
        """
        return self.conversations.conversation(index)

    @cached_property
    def conversations(self) -> ConversationReader:
        """Reads the source rows of examples."""
        return surface.conversations(self)

    def locate(self, example: int) -> RowLocation:
        """The source row of an example."""
        shard, number = self.shards.find(example)
        table, rows = self.manifest.shards, self.shards.structure(shard).rows
        return RowLocation(table.sources[shard], table.first_rows[shard] + int(rows[number]))

    @cached_property
    def origins(self) -> Mapping[str, Any]:
        """The files (by `name` and `path`), slices and tokenizer that the dataset was last prepared from."""
        try:
            value = orjson.loads(read_regular(self.path / "notes.json"))
        except (OSError, orjson.JSONDecodeError):
            return {}
        return value if isinstance(value, dict) else {}

    @cached_property
    def source_names(self) -> list[str]:
        """The names of the source files as they were given, if that is known."""
        files = self.origins.get("files")
        return [str(file["name"]) for file in files] if isinstance(files, list) and _all_named(files) else []

    def source_name(self, source: int) -> str:
        """The name of a source file, or its number."""
        return self.source_names[source] if source < len(self.source_names) else f"source {source}"

    def file_row(self, source: int, row: int) -> tuple[str, int]:
        """A row's file, and its number there: a source may be many files."""
        files = self.origins.get("files")
        members = files[source].get("members") if isinstance(files, list) and source < len(files) else None
        if not isinstance(members, dict):
            return self.source_name(source), row
        member, row = member_row(members["rows"], row)
        return str(members["names"][member]), row

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
        from penstock.prepare.tokenizer.vocabulary import Vocabulary

        return Vocabulary(self.tokenizer_json)

    def token_id(self, name: str) -> int | None:
        """The id of a named special token such as `eos_token`, or None if the tokenizer has none."""
        content = self.recipe["special_tokens"].get(name)
        return self.vocabulary.id_of(content) if content is not None else None

    def __reduce__(self) -> tuple[Callable[..., Dataset], tuple[str, None, str | None]]:
        return open_dataset, (self.address, None, self.cache.place.local)


def _all_named(files: list[Any]) -> bool:
    return all(isinstance(file, dict) and "name" in file for file in files)


def open_dataset(
    where: str | os.PathLike[str],
    cache: str | os.PathLike[str] | None = None,
    local_cache: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Open a prepared dataset by its folder or URL, or by its key (or an unambiguous prefix) in a cache.

    A key may be given without its `b3-`; `latest` is the dataset of the cache that was used last. `local_cache` is the
    folder to which shards are downloaded from a cache in an object store.
    """
    given = os.fspath(where).removesuffix("/manifest.json").rstrip("/")
    if scheme := scheme_of(given):
        if scheme not in SCHEMES:
            raise UsageError(f"{where}: {scheme} addresses are not supported for datasets. Use a folder or a key.")
        address, _, name = given.rpartition("/datasets/")
        if not KEY.fullmatch(name):
            raise UsageError(f"{where}: not the address of a dataset. Expected s3://BUCKET/CACHE/datasets/b3-….")
        return _by_key(open_cache(address, local=local_cache), name, where)
    path = Path(given).expanduser()
    if given == LATEST and not path.exists():
        return _latest(open_cache(cache, local=local_cache))
    if (path / "manifest.json").is_file():
        home = open_cache(path.absolute().parent.parent)
        return Dataset(home, read_manifest(home.find_dataset(path.name) if home.is_remote else path / MANIFEST))
    home, name = open_cache(cache, local=local_cache), path.name
    if (path / MARKER).is_file():
        home, name = open_cache(path), ""
    elif name.endswith("*") and path.parent.name == "datasets":
        home = open_cache(path.absolute().parent.parent)
    return _by_key(home, name.rstrip("*"), where)


def _by_key(home: Cache, name: str, where: object) -> Dataset:
    """The dataset whose key starts with this."""
    key = name if name.startswith("b3-") else f"b3-{name}"
    found = home.keys(key) if key == "b3-" or KEY.fullmatch(key) else []
    if len(found) == 1:
        return Dataset(home, read_manifest(home.find_dataset(found[0])))
    if found:
        raise _several(where, home, found)
    raise StoreError(
        f"{where}: no dataset at this path, and none with this key in {home.address}. "
        "List them with `penstock cache ls`."
    )


def _several(where: object, home: Cache, keys: list[str]) -> StoreError:
    """Names the datasets that a prefix or pattern matches."""
    shown = "; ".join(f"{key[:_SHOWN_KEY]} ({_described(home, key)})" for key in keys[:_SHOWN_KEYS])
    more = f" and {len(keys) - _SHOWN_KEYS:,} more" if len(keys) > _SHOWN_KEYS else ""
    return StoreError(
        f"{where}: {len(keys):,} datasets match: {shown}{more}. Give more of one key, or `latest` for the one used "
        "last; `penstock cache ls` lists them with their sources."
    )


def _described(home: Cache, key: str) -> str:
    try:
        return f"{read_manifest(home.find_dataset(key)).ledger['examples']:,} examples"
    except StoreError:
        return "unreadable"


def _latest(home: Cache) -> Dataset:
    """The dataset that was prepared or opened last."""
    home.find_datasets()
    found = [folder for folder in (home.root / "datasets").glob("b3-*") if (folder / "manifest.json").is_file()]
    if not found:
        raise StoreError(
            f"latest: there is no dataset in {home.address}. Name the cache with --cache or PENSTOCK_CACHE."
        )

    def used(folder: Path) -> float:
        times = [folder / name for name in ("used", "manifest.json")]
        return max(path.stat().st_mtime for path in times if path.exists())

    newest = max(found, key=used)
    return Dataset(home, read_manifest(newest / "manifest.json"))


def _open_limit() -> int:
    """How many shards may stay mapped; each holds a file descriptor."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return max(16, min(soft if soft != resource.RLIM_INFINITY else hard, 8192) // 2)
