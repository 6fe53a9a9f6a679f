"""The cache: its layout, its marker, and how shards, manifests and tokenizers are committed to it and found.

    CACHE/penstock-cache.json          the marker: written first, identifies the folder or URL as a cache
    CACHE/shards/ab/b3-abcdef….arrow   the examples of one slice; counts, digest and engines in its record beside it
    CACHE/datasets/KEY/manifest.json   the shards of a dataset, in order
    CACHE/tokenizers/b3-….json         the tokenizer.json files that datasets were built with
    CACHE/inputs/ab/b3-….jsonl         rows given in memory or through a pipe, which are in no other file
    CACHE/retired/b3-….….arrow         replaced shards, kept while readers may still have them mapped
    CACHE/memo/…, claims/…, leases/…, tmp/…, collections/…, clock   disposable: losing them only repeats work

A shard exists if its file exists: the file gets its name once its bytes are on disk. A `….bad` file beside a shard
records that `verify` found it damaged; the shard then counts as missing until it is rebuilt. Its record is `….json` in
a folder. In an object store it is `….index`, which also has all columns but the token ids (see `store.shard`), so that
a manifest is written and a view is scanned without downloading tokens.

A folder or URL that holds other files and no marker is neither written to nor cleaned up, so a mistyped `--cache` can't
mix Penstock's files with the user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from penstock.addresses import scheme_of
from penstock.digests import FORMAT_VERSION, NAME, bytes_digest, canonical, file_digest, seal, validate_name
from penstock.errors import CorruptError, UsageError
from penstock.store.claims import Claims, lease
from penstock.store.files import explain_os_errors, read_regular
from penstock.store.local import LocalStorage
from penstock.store.storage import MARKER, Storage, is_cache, shard_at
from penstock.store.trust import (
    CheckedContent,
    CheckedCopies,
    ShardWriter,
    Trust,
    host_name,
    read_record,
    user_cache_folder,
    user_name,
)

if TYPE_CHECKING:
    from penstock.prepare.encode.columns import Columns
    from penstock.store.shard import ShardMeta
    from penstock.store.tier import Tier

SCHEMES = ("s3", "s3a", "gs", "az", "azure", "adl", "abfs", "abfss")
CACHE_VARIABLE = "PENSTOCK_CACHE"
COLLECTION_WAIT = 0.5  # seconds between looks at a `gc` that is about to delete what a build needs


def default_cache() -> str:
    """`PENSTOCK_CACHE` if set, else `penstock` in the user's cache folder."""
    return os.environ.get(CACHE_VARIABLE) or str(user_cache_folder() / "penstock")


class CacheAddress(NamedTuple):
    """Where a cache is, as plain values that can be sent to another process or host: see `open_cache`."""

    address: str  # a folder, or a URL
    trust: str = Trust.CHECKED.value
    local: str | None = None  # of a cache in an object store: the folder of its local tier
    local_bytes: int | None = None  # the size of the local tier


def open_cache(
    address: str | os.PathLike[str] | None = None,
    trust: Trust | str = Trust.CHECKED,
    local: str | os.PathLike[str] | None = None,
    local_bytes: int | None = None,
) -> Cache:
    """The cache at an address: a folder, the URL of one in an object store, or the local tier of one.

    `local` and `local_bytes` are the folder and the size of the local tier. The arguments are those of `CacheAddress`.
    """
    given = os.fspath(address) if address is not None and os.fspath(address) else default_cache()
    scheme = scheme_of(given)
    if scheme in SCHEMES:
        return Cache(given, trust=Trust(trust), local=local, local_bytes=local_bytes)
    if scheme:
        raise UsageError(
            f"{given}: {scheme} addresses are not supported for caches. Use a folder, or s3://, gs:// or az://."
        )
    folder = Path(given).expanduser().absolute()
    if (url := _remote_of(folder)) is not None:
        return Cache(url, trust=Trust(trust), local=folder, local_bytes=local_bytes)
    if local is not None:
        raise UsageError(f"a local cache ({os.fspath(local)}) belongs to a cache in an object store, not to {given}.")
    return Cache(folder, trust=Trust(trust))


def _remote_of(folder: Path) -> str | None:
    """The URL of the cache that a folder is the local tier of."""
    try:
        value = orjson.loads(read_regular(folder / MARKER))
    except (OSError, orjson.JSONDecodeError):
        return None
    url = value.get("remote") if isinstance(value, dict) else None
    return url if isinstance(url, str) and scheme_of(url) in SCHEMES else None


class Cache:
    """A cache in a folder, or in an object store with a local tier. `trust` decides whose shards count as present.

    `storage` decides what exists; `access` is how this machine reads it. `root` and `files` are the folder on this
    machine: the cache itself, or the tier.
    """

    storage: Storage
    storages: tuple[Storage, ...]  # `storage`, and the folder of the tier if there is one
    access: FolderShards | Tier

    def __init__(
        self,
        address: str | os.PathLike[str] | None = None,
        *,
        trust: Trust = Trust.CHECKED,
        local: str | os.PathLike[str] | None = None,
        local_bytes: int | None = None,
    ) -> None:
        given = os.fspath(address) if address is not None and os.fspath(address) else default_cache()
        self.trust = trust
        self.copies = CheckedCopies()
        self._readers: weakref.WeakSet[Any] = weakref.WeakSet()
        if scheme_of(given):
            from penstock.store.object_storage import ObjectStorage
            from penstock.store.tier import Tier, tier_folder

            url = re.sub(r":/+", "://", given, count=1).rstrip("/")
            self.storage = ObjectStorage(url)
            self.access = Tier(self.storage, tier_folder(url, local), trust, local_bytes, self._mapped)
            self.storages = (self.storage, self.access.files)
        else:
            self.storage = files = LocalStorage(Path(given).expanduser().absolute())
            self.access = FolderShards(files, trust, self.copies)
            self.storages = (files,)
        self.files = self.access.files
        self.root = self.files.root

    @property
    def is_remote(self) -> bool:
        """Whether the cache is in an object store."""
        return not self.storage.is_folder

    @property
    def mappable_bytes(self) -> int | None:
        """Bytes of shards that a dataset should keep mapped; None: any number."""
        return None if self.access.max_bytes is None else self.access.max_bytes // 2

    @property
    def place(self) -> CacheAddress:
        """Where the cache is, for `open_cache` in another process."""
        local = str(self.root) if self.is_remote else None
        return CacheAddress(self.storage.address, self.trust.value, local, self.access.max_bytes)

    @property
    def address(self) -> str:
        """The folder or URL by which users name the cache."""
        return self.storage.address

    def shard_path(self, name: str) -> Path:
        """The path of a shard on this machine, whether or not it exists yet."""
        return self.root / shard_at(name)

    def shard_address(self, name: str) -> str:
        """Where a shard is, for messages."""
        return self.storage.address_of(shard_at(name))

    def dataset_path(self, key: str) -> Path:
        """The folder of a dataset."""
        return self.root / "datasets" / validate_name(key)

    def tokenizer_path(self, digest: str) -> Path:
        """The path of a tokenizer.json, by its digest."""
        return self.root / "tokenizers" / f"{validate_name(digest)}.json"

    def check_marker(self) -> bool:
        """Whether there is a cache. False if there is nothing; StoreError if there is something else."""
        return is_cache(self.storage)

    def prepare_root(self) -> None:
        """Create the cache and its marker, and check that it is writable."""
        if not self.check_marker():
            self.storage.make_cache(canonical({"format": FORMAT_VERSION}))
        self.storage.check_writable()

    def claims(self) -> Claims:
        """The claims of one build."""
        return Claims(self.storage)

    def lease(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Protects shards and tokenizers from `gc` while a manifest that references them is committed."""
        return lease(self.storage, names)

    def read_file(self, path: Path) -> bytes:
        """The bytes of a small file of the cache; OSError if it is missing."""
        return self._read(self.files.relative(path), self.storage)[0]

    def _read(self, path: str, *storages: Storage) -> tuple[bytes, Storage]:
        """A file, and the first of the storages that has it."""
        for storage in storages:
            if (data := storage.read(path)) is not None:
                return data, storage
        raise FileNotFoundError(2, "no such file", self.storage.address_of(path))

    def write_file(self, path: Path, data: bytes, point: str, *, durable: bool = True) -> None:
        """Commit a small file of the cache; a tier keeps a copy."""
        for storage in self.storages:
            storage.write(self.files.relative(path), data, point, durable=durable and storage is self.storage)

    def find_dataset(self, key: str) -> Path:
        """The path of a dataset's manifest in its current state, whether or not it exists."""
        self.access.update(key)
        return self.dataset_path(key) / "manifest.json"

    def find_datasets(self) -> None:
        """Bring the manifests of all datasets up to date, before they are listed."""
        self.access.update()

    def keys(self, prefix: str) -> list[str]:
        """The keys of the datasets that start with a prefix."""
        self.check_marker()
        if re.fullmatch(NAME, prefix):
            return [prefix] if self.storage.stat(f"datasets/{prefix}/manifest.json") is not None else []
        paths = [entry.path.split("/") for entry in self.storage.entries("datasets")]
        return sorted(path[1] for path in paths if path[2] == "manifest.json" and path[1].startswith(prefix))

    def mark_used(self, key: str) -> None:
        """Record that a dataset is in use."""
        mark = f"datasets/{key}/used"
        for storage in self.storages:
            try:
                storage.touch(mark, create=True)
            except PermissionError:  # another user's mark: replace it
                storage.delete(mark)
                storage.touch(mark, create=True)

    def find_memo(self, path: Path) -> None:
        """Bring a memo that doesn't depend on the machine up to date, if it was written with this user's key."""
        self.access.find_memo(self.files.relative(path))

    def share_memo(self, path: Path, data: bytes) -> None:
        """Let other machines find a memo, signed with this user's key."""
        self.access.share_memo(self.files.relative(path), data)

    def tokenizer_json(self, name: str) -> bytes:
        """The bytes of a tokenizer.json, by digest; OSError if it is missing."""
        path = self.files.relative(self.tokenizer_path(name))
        data, storage = self._read(path, *reversed(self.storages))
        if bytes_digest(data) != name:
            place = storage.address_of(path)
            raise CorruptError(f"{place}: the tokenizer's bytes have changed. Delete it, then prepare again.")
        if storage is not self.files:
            self.files.write(path, data, "tokenizer", durable=False)
        return data

    def store_tokenizer(self, tokenizer_json: bytes) -> str:
        """Store a tokenizer.json under its digest, so that datasets stay readable without the original folder."""
        name = bytes_digest(tokenizer_json)
        path = self.files.relative(self.tokenizer_path(name))
        for storage in self.storages:
            if not storage.holds(path, len(tokenizer_json), name):
                storage.write(path, tokenizer_json, "tokenizer")
        return name

    def refresh(self, names: Iterable[str]) -> None:
        """Bring up to date what `has_shard` knows of these shards."""
        self.storage.refresh(names)

    def has_shard(self, name: str) -> bool:
        """Whether the shard exists, is readable and trusted, and is not marked as damaged; as of a moment ago."""
        return self.storage.has_shard(name) and not self._is_refused(name)

    def is_committed(self, name: str) -> bool:
        """Whether a shard exists at this moment, asked after claiming its slice."""
        return self.storage.has_shard(name, now=True) and not self._is_refused(name)

    def all_present(self, names: Iterable[str]) -> bool:
        """Whether all shards exist at this moment. Waits for the end of a `gc` that is about to delete one."""
        wanted = list(names)
        while self.storage.about_to_go(wanted):
            time.sleep(COLLECTION_WAIT)
        return self.storage.lists_shards(wanted) and not any(map(self._is_refused, wanted))

    def shard_stamp(self, name: str) -> object:
        """A value that changes when a shard is committed again; None if there is none."""
        with explain_os_errors(self.shard_path(name), "can't be read"):
            found = self.storage.stat(shard_at(name, self.access.stamped))
        return None if found is None else found.version

    def commit_shard(self, name: str, data: Any, record: Mapping[str, Any], *, keep_copy: bool = True) -> None:
        """Commit a shard and its record, the shard last. An identical shard stays; a tier keeps a copy if wanted."""
        size, host = len(data), socket.gethostname()
        made = {**record, "digest": bytes_digest(data), "bytes": size, "host": host}
        self.access.commit(name, data, made, keep_copy=keep_copy)

    def mark_bad(self, name: str, why: str) -> None:
        """Mark a shard as damaged, so that the next `prepare` rebuilds it. Readers keep the current file until then."""
        self.access.forget(name)
        self.storage.write(shard_at(name, "bad"), why.encode(), "bad", durable=False)
        self.storage.refresh((name,))

    def clear_bad(self, name: str) -> None:
        """Remove the mark of a shard that proved intact."""
        with contextlib.suppress(OSError):
            self.storage.delete(shard_at(name, "bad"))

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        """The file to read a shard from: its own, this user's copy, or that of the tier, downloaded if it is missing.

        This user has copies of the shards that others wrote and this user checked. `digest` is what the caller's
        manifest expects.
        """
        return self.access.shard_file(name, digest)

    def download(self, digests: Mapping[str, str]) -> None:
        """Make `shard_file` of these shards quick; the values are their digests."""
        self.storage.each(lambda entry: self.shard_file(*entry), digests.items())

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        """The columns of a shard, perhaps without its token ids, and what it records about its slice."""
        return self.access.structure(name)

    def fetch(self, names: Iterable[str]) -> None:
        """Make `structure` of these shards quick."""
        self.access.fetch(names)

    def shard_data(self, name: str, digest: str) -> Any:
        """The bytes of a shard, which must have this digest. A tier keeps no copy of them."""
        place = self.shard_address(name)
        try:
            data = self.access.shard_data(name, digest)
        except OSError as error:
            raise CorruptError(f"{place} can't be read: {error.strerror}. Run `penstock cache verify`.") from error
        if bytes_digest(data) != digest:
            raise CorruptError(f"{place}: its bytes have changed. Run `penstock cache verify`.")
        return data

    def shard_record(self, name: str) -> dict[str, Any]:
        """Counts and digest of a committed shard."""
        return self.access.record(name)

    def watch(self, reader: Any) -> None:
        """Learn which shards a dataset has mapped, from its `_open_files`, so that a tier keeps them."""
        self._readers.add(reader)

    def _mapped(self) -> Iterable[Path]:
        return [path for reader in list(self._readers) for path in reader._open_files()]

    def _is_refused(self, name: str) -> bool:
        """Whether a shard counts as missing because another user wrote it."""
        return self.trust is Trust.OWN and not self.access.is_own(name)

    def writer(self, name: str) -> ShardWriter:
        """Who wrote a shard."""
        return self.access.writer(name)

    def unchecked(self, names: Iterable[str], key: str) -> list[Path]:
        """The shards and the manifest of a dataset that others wrote and this user hasn't checked."""
        if self.trust is Trust.ALL:
            return []
        manifest, given = self.dataset_path(key) / "manifest.json", list(dict.fromkeys(names))
        is_known = self.access.is_own_manifest(key) or CheckedContent().knows(self._manifest_content(key))
        found = self.access.unchecked(given, manifest_checked=is_known)
        return [*map(self.shard_path, found), *([] if is_known else [manifest])]

    def unchecked_shard(self, name: str) -> bytes:
        """The bytes of a shard that another user wrote, to be checked. OSError or CorruptError if there are none."""
        return read_regular(self.shard_file(name))

    def keep_checked(self, name: str, data: bytes) -> None:
        """Keep the bytes of a shard that were checked: from now on, this user reads them."""
        self.access.keep_checked(name, data)

    def remember_checked(self, key: str) -> None:
        """Record that a dataset's manifest was checked, so that a hit need not repeat it."""
        CheckedContent().remember(self._manifest_content(key))

    def _manifest_content(self, key: str) -> list[object] | None:
        """Identifies the bytes of a manifest."""
        try:
            return ["manifest", bytes_digest(read_regular(self.dataset_path(key) / "manifest.json"))]
        except OSError:
            return None


class FolderShards:
    """Shards of a folder, read where they are, with their record in a file beside them.

    Has the methods of `store.tier.Tier`, for what depends on the kind of storage: how a shard becomes a file on this
    machine, its record, and who wrote it. `Cache` says what each of them does.
    """

    max_bytes: int | None = None  # of shards that this machine should hold
    stamped = "arrow"  # the kind of file that every commit of a shard writes or touches

    def __init__(self, files: LocalStorage, trust: Trust, copies: CheckedCopies) -> None:
        self.files, self.trust, self._copies = files, trust, copies

    def update(self, key: str | None = None) -> None:
        pass  # manifests are where they are

    def find_memo(self, path: str) -> None:
        pass

    def share_memo(self, path: str, data: bytes) -> None:
        pass

    def commit(self, name: str, data: Any, record: dict[str, Any], *, keep_copy: bool) -> None:
        if not self._keep_identical(name, data, record):
            self.files.put_shard(name, data, record["digest"])

    def _keep_identical(self, name: str, data: Any, record: dict[str, Any]) -> bool:
        """Write the record of a shard, unless it is there; True if the shard itself is there, too."""
        path, digest = shard_at(name), record["digest"]
        with explain_os_errors(self.files.root / path, "can't be replaced"):
            is_wanted = self.trust is not Trust.OWN or self.is_own(name)
            is_current = is_wanted and self.files.holds(path, len(data), digest)
            if not is_current or (read_record(self.files, name) or {}).get("digest") != digest:
                self.files.write(shard_at(name, "json"), seal(b"note", record), "note", durable=False)
            if is_current:
                with contextlib.suppress(PermissionError):  # owned by another user
                    self.files.touch(path)  # so that `gc` and concurrent builds see it as new
        if is_current:
            self.files.clear_mark(name)
        return is_current

    def forget(self, name: str) -> None:
        pass

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        is_foreign = self.trust is not Trust.ALL and not self.is_own(name)
        return (self._copies.find(name) if is_foreign else None) or self.files.root / shard_at(name)

    def shard_data(self, name: str, digest: str) -> bytes:
        return read_regular(self.shard_file(name))

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        from penstock.store.shard import read_shard  # needs pyarrow, which a cache hit does not load

        return read_shard(self.shard_file(name))

    def fetch(self, names: Iterable[str]) -> None:
        pass

    def record(self, name: str) -> dict[str, Any]:
        """Recomputed from the shard if it is lost, or if the shard is a copy: then the record is the other user's."""
        path = self.shard_file(name)
        found = read_record(self.files, name) if path == self.files.root / shard_at(name) else None
        with contextlib.suppress(OSError):
            if found is not None and found["bytes"] == path.stat().st_size:
                return found
        _, meta = self.structure(name)
        return {"rejected": len(meta.rejected), "digest": file_digest(path), "bytes": path.stat().st_size}

    def reread(self, name: str) -> tuple[bytes | None, str | None]:
        return self.files.read(shard_at(name)), None  # the record is only a cache of what the shard says

    def writer(self, name: str) -> ShardWriter:
        uid, host = (self.files.root / shard_at(name)).lstat().st_uid, ""
        with contextlib.suppress(OSError):  # the record may be missing
            if (self.files.root / shard_at(name, "json")).lstat().st_uid == uid:
                host = host_name((read_record(self.files, name) or {}).get("host"))
        return ShardWriter(uid, user_name(uid), host)

    def is_own(self, name: str) -> bool:
        return not self.files.is_foreign(shard_at(name))

    def is_own_manifest(self, key: str) -> bool:
        return not self.files.is_foreign(f"datasets/{key}/manifest.json")

    def unchecked(self, names: list[str], *, manifest_checked: bool) -> list[str]:
        return [name for name in names if not self.is_own(name) and self._copies.find(name) is None]

    def keep_checked(self, name: str, data: bytes) -> None:
        self._copies.add(name, data)
