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
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import orjson

from penstock.addresses import scheme_of
from penstock.digests import FORMAT_VERSION, bytes_digest, canonical, file_digest, seal, validate_name
from penstock.errors import CorruptError, UsageError
from penstock.store.claims import Claims, lease
from penstock.store.files import explain_os_errors, is_readable_file, make_folder, read_regular
from penstock.store.local import LocalStorage
from penstock.store.storage import MARKER, Storage, is_cache, shard_at
from penstock.store.trust import (
    CheckedContent,
    CheckedCopies,
    ShardWriter,
    Trust,
    host_name,
    is_keyed,
    keyed_digest,
    read_record,
    shard_writer,
    user_cache_folder,
)
from penstock.transient import retry_transient

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


class CachePlace(NamedTuple):
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

    `local` and `local_bytes` are the folder and the size of the local tier. The arguments are those of `CachePlace`.
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

    `storage` decides what exists. `root` and `files` are the folder on this machine: the cache itself, or the tier.
    """

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
        self.tier: Tier | None = None
        self.storage: Storage
        if not scheme_of(given):
            self.root = Path(given).expanduser().absolute()
            self.storage = self.files = LocalStorage(self.root)
            return
        from penstock.store.object_storage import ObjectStorage
        from penstock.store.tier import Tier, tier_folder

        url = re.sub(r":/+", "://", given, count=1).rstrip("/")
        self.root = tier_folder(url, local)
        self.files, self.storage = LocalStorage(self.root), ObjectStorage(url)
        self.tier = Tier(self.files, self.storage, local_bytes)
        make_folder(self.root)
        if not is_cache(self.files):  # its marker names the URL, so that paths in the tier open the cache
            marker = canonical({"format": FORMAT_VERSION, "remote": url})
            self.files.write(MARKER, marker, "marker", in_root=True, durable=False)
        self.files.check_writable()

    @property
    def is_remote(self) -> bool:
        """Whether the cache is in an object store."""
        return self.tier is not None

    @property
    def mappable_bytes(self) -> int | None:
        """Bytes of shards that a dataset should keep mapped; None: any number."""
        return self.tier.max_bytes // 2 if self.tier is not None and self.tier.max_bytes is not None else None

    @property
    def place(self) -> CachePlace:
        """Where the cache is."""
        tier = (str(self.root), self.tier.max_bytes) if self.tier is not None else (None, None)
        return CachePlace(self.storage.address, self.trust.value, *tier)

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
            self._write_marker(canonical({"format": FORMAT_VERSION}))
        self.storage.check_writable()

    def _write_marker(self, data: bytes) -> None:
        """Make an empty folder or URL a cache. Safe to run concurrently: every process writes the same bytes."""
        if self.tier is not None:
            self.storage.create(MARKER, data, "marker")
            return
        make_folder(self.root)
        with explain_os_errors(self.root, "can't be read"):
            readers = retry_transient(self.root.stat)().st_mode & 0o444  # readable by everyone who can use the cache
        self.files.write(MARKER, data, "marker", in_root=True, mode=readers | 0o200)

    def claims(self) -> Claims:
        """The claims of one build."""
        return Claims(self.storage)

    def lease(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Protects shards and tokenizers from `gc` while a manifest that references them is committed."""
        return lease(self.storage, names)

    # -- small files ----------------------------------------------------------------------------------------------

    def read_file(self, path: Path) -> bytes:
        """The bytes of a small file of the cache; OSError if it is missing."""
        relative = self.files.relative(path)
        data = self.storage.read(relative)
        if data is None:
            raise FileNotFoundError(2, "no such file", self.storage.address_of(relative))
        return data

    def write_file(self, path: Path, data: bytes, point: str, *, durable: bool = True) -> None:
        """Commit a small file of the cache; the tier keeps a copy."""
        relative = self.files.relative(path)
        self.storage.write(relative, data, point, durable=durable)
        if self.tier is not None:
            self.files.write(relative, data, point, durable=False)

    def find_dataset(self, key: str) -> Path:
        """The path of a dataset's manifest in its current state, whether or not it exists."""
        if self.tier is not None:
            self.tier.update(key)
        return self.dataset_path(key) / "manifest.json"

    def find_datasets(self) -> None:
        """Bring the manifests of all datasets up to date, before they are listed."""
        if self.tier is not None:
            self.tier.update_all()

    def keys(self, prefix: str) -> list[str]:
        """The keys of the datasets that start with a prefix."""
        if self.tier is not None:
            self.check_marker()
            return self.tier.keys(prefix)
        return sorted(path.parent.name for path in (self.root / "datasets").glob(f"{prefix}*/manifest.json"))

    def mark_used(self, key: str) -> None:
        """Record that a dataset is in use."""
        mark = f"datasets/{key}/used"
        if self.tier is not None:
            self.storage.touch(mark)
        try:
            self.files.touch(mark, create=True)
        except PermissionError:  # another user's mark: replace it
            self.files.delete(mark)
            self.files.touch(mark, create=True)

    def find_memo(self, path: Path) -> None:
        """Bring a memo that doesn't depend on the machine up to date, if it was written with this user's key."""
        if self.tier is None or is_readable_file(path):
            return
        mac, _, data = (self.storage.read(self.files.relative(path)) or b"").partition(b"\n")
        if data and (self.trust is Trust.ALL or is_keyed(path.name.encode() + data, mac.decode(errors="replace"))):
            self.files.write(self.files.relative(path), data, "memo", durable=False)

    def share_memo(self, path: Path, data: bytes) -> None:
        """Let other machines find a memo, signed with this user's key."""
        if self.tier is not None:
            signed = keyed_digest(path.name.encode() + data).encode() + b"\n" + data
            self.storage.write(self.files.relative(path), signed, "memo")

    def tokenizer_json(self, name: str) -> bytes:
        """The bytes of a tokenizer.json, by digest; OSError if it is missing."""
        path = self.tokenizer_path(name)
        is_here = self.tier is None or is_readable_file(path)
        data = read_regular(path) if is_here else self.read_file(path)
        if bytes_digest(data) != name:
            place = path if is_here else self.storage.address_of(self.files.relative(path))
            raise CorruptError(f"{place}: the tokenizer's bytes have changed. Delete it, then prepare again.")
        if not is_here:
            self.files.write(self.files.relative(path), data, "tokenizer", durable=False)
        return data

    def store_tokenizer(self, tokenizer_json: bytes) -> str:
        """Store a tokenizer.json under its digest, so that datasets stay readable without the original folder."""
        name = bytes_digest(tokenizer_json)
        path = self.files.relative(self.tokenizer_path(name))
        if self._digest_on_disk(path, len(tokenizer_json)) != name:
            self.files.write(path, tokenizer_json, "tokenizer")
        if self.tier is not None:
            found = self.storage.stat(path)
            if found is None or found.size != len(tokenizer_json):
                self.storage.write(path, tokenizer_json, "tokenizer")
        return name

    # -- which shards there are -----------------------------------------------------------------------------------

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
            found = self.storage.stat(shard_at(name, "arrow" if self.tier is None else "index"))
        return None if found is None else found.version

    # -- writing shards -------------------------------------------------------------------------------------------

    def commit_shard(self, name: str, data: Any, note: Mapping[str, Any], *, keep_copy: bool = True) -> None:
        """Commit a shard and its record, the shard last. An identical shard stays; a tier keeps a copy if wanted."""
        digest = bytes_digest(data)
        record = {**note, "digest": digest, "bytes": len(data), "host": socket.gethostname()}
        if self.tier is not None:
            record["put"] = time.time_ns()
            self.tier.write_index(name, data, record)
        elif self._keep_identical(name, len(data), record):
            return
        self.storage.put_shard(name, data, digest)
        if self.tier is not None and keep_copy:
            self.tier.keep(name, data, record)

    def _keep_identical(self, name: str, size: int, record: dict[str, Any]) -> bool:
        """Write the record of a shard, unless it is there; True if the shard itself is there, too."""
        path, new_digest = shard_at(name), record["digest"]
        with explain_os_errors(self.root / path, "can't be replaced"):
            is_current = self._digest_on_disk(path, size) == new_digest and not self._is_refused(name)
            if not is_current or (read_record(self.files, name) or {}).get("digest") != new_digest:
                self.files.write(shard_at(name, "json"), seal(b"note", record), "note", durable=False)
            if is_current:
                with contextlib.suppress(PermissionError):  # owned by another user
                    self.files.touch(path)  # so that `gc` and concurrent builds see it as new
        if is_current:
            self.files.clear_mark(name)
        return is_current

    def _digest_on_disk(self, path: str, size: int) -> str | None:
        file = self.root / path
        try:
            return file_digest(file) if is_readable_file(file) and file.stat().st_size == size else None
        except OSError:
            return None

    def mark_bad(self, name: str, why: str) -> None:
        """Mark a shard as damaged, so that the next `prepare` rebuilds it. Readers keep the current file until then."""
        if self.tier is not None:
            self.tier.forget(name)
        self.storage.write(shard_at(name, "bad"), why.encode(), "bad", durable=False)
        self.storage.refresh((name,))

    def clear_bad(self, name: str) -> None:
        """Remove the mark of a shard that proved intact."""
        with contextlib.suppress(OSError):
            self.storage.delete(shard_at(name, "bad"))

    # -- reading shards -------------------------------------------------------------------------------------------

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        """The file to read a shard from: its own, this user's copy, or that of the tier, downloaded if it is missing.

        This user has copies of the shards that others wrote and this user checked. `digest` is what the caller's
        manifest expects.
        """
        if self.tier is not None:
            return self.tier.shard(name, digest)
        is_foreign = self.trust is not Trust.ALL and self.files.is_foreign(shard_at(name))
        return (self.copies.find(name) if is_foreign else None) or self.shard_path(name)

    def download(self, digests: Mapping[str, str]) -> None:
        """Make `shard_file` of these shards quick; the values are their digests."""
        if self.tier is not None:
            self.storage.each(lambda entry: self.shard_file(*entry), digests.items())

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        """The columns of a shard, perhaps without its token ids, and what it records about its slice."""
        from penstock.store.shard import read_shard  # needs pyarrow, which a cache hit does not load

        return self.tier.index(name).read() if self.tier is not None else read_shard(self.shard_file(name))

    def fetch(self, names: Iterable[str]) -> None:
        """Make `structure` of these shards quick."""
        if self.tier is not None:
            self.tier.fetch(names)

    def shard_data(self, name: str, digest: str) -> Any:
        """The bytes of a shard, which must have this digest. A tier keeps no copy of them."""
        if self.tier is not None and not self.tier.has_copy(name, digest):
            return self.tier.data(name, digest)
        path = self.shard_file(name, digest)
        try:
            data = read_regular(path)
        except OSError as error:
            raise CorruptError(f"{path} can't be read: {error.strerror}. Run `penstock cache verify`.") from error
        if bytes_digest(data) != digest:
            raise CorruptError(f"{path}: its bytes have changed. Run `penstock cache verify`.")
        return data

    def shard_record(self, name: str) -> dict[str, Any]:
        """Counts and digest of a committed shard, recomputed from the shard if its record is lost."""
        if self.tier is not None:
            return self.tier.index(name).record
        path = self.shard_file(name)
        is_copy = path != self.shard_path(name)
        record = None if is_copy else read_record(self.files, name)  # the record is the other user's
        with contextlib.suppress(OSError):  # the record is only a cache of what the shard says
            if record is not None and record["bytes"] == path.stat().st_size:
                return record
        from penstock.store.shard import read_shard  # needs pyarrow

        _, meta = read_shard(path)
        return {"rejected": len(meta.rejected), "digest": file_digest(path), "bytes": path.stat().st_size}

    def watch(self, reader: Any) -> None:
        """Learn which shards a dataset has mapped, from its `_open_files`."""
        if self.tier is not None:
            self.tier.watch(reader)

    # -- trust ----------------------------------------------------------------------------------------------------

    def writer(self, name: str) -> ShardWriter:
        """Who wrote a shard. Of an object, by its index: this user, or one of whom only the host is known."""
        if self.tier is None:
            return shard_writer(self.files, name)
        try:
            index = self.tier.index(name)
        except CorruptError:
            return ShardWriter(-1, "an unknown user", "")
        host = host_name(index.record.get("host"))
        return ShardWriter(os.geteuid(), "you", host) if index.is_own else ShardWriter(-1, "another user", host)

    def _is_own(self, name: str) -> bool:
        """Whether this user wrote a shard: by the file's owner or, of an object, by the key in its index."""
        if self.tier is None:
            return not self.files.is_foreign(shard_at(name))
        try:
            return self.tier.index(name).is_own
        except CorruptError:
            return False

    def _is_refused(self, name: str) -> bool:
        return self.trust is Trust.OWN and not self._is_own(name)

    def unchecked(self, names: Iterable[str], key: str) -> list[Path]:
        """The shards and the manifest of a dataset that others wrote and this user hasn't checked.

        A manifest names its shards' digests, so in an object store, one that was checked vouches for all of them.
        """
        if self.trust is Trust.ALL:
            return []
        manifest, given = self.dataset_path(key) / "manifest.json", list(dict.fromkeys(names))
        is_foreign = self.tier is not None or self.files.is_foreign(self.files.relative(manifest))
        is_unknown = is_foreign and not CheckedContent().knows(self._manifest_content(key))
        if self.tier is not None and not is_unknown:
            return []
        self.fetch(given)
        found = [
            name for name in given if not self._is_own(name) and not (self.tier is None and self.copies.find(name))
        ]
        return [*map(self.shard_path, found), *([manifest] if is_unknown else [])]

    def unchecked_shard(self, name: str) -> bytes:
        """The bytes of a shard that another user wrote, to be checked. OSError or CorruptError if there are none."""
        return read_regular(self.shard_path(name) if self.tier is None else self.shard_file(name))

    def keep_checked(self, name: str, data: bytes) -> None:
        """Keep the bytes of a shard that were checked: from now on, this user reads them. A tier already has them."""
        if self.tier is None:
            self.copies.add(name, data)

    def remember_checked(self, key: str) -> None:
        """Record that a dataset's manifest was checked, so that a hit need not repeat it."""
        CheckedContent().remember(self._manifest_content(key))

    def _manifest_content(self, key: str) -> list[object] | None:
        """Identifies the bytes of a manifest."""
        try:
            return ["manifest", bytes_digest(read_regular(self.dataset_path(key) / "manifest.json"))]
        except OSError:
            return None
