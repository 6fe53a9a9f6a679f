"""A cache in an object store: the same layout as on disk, plus an index beside each shard, and a local tier.

    URL/penstock-cache.json              the marker
    URL/shards/ab/b3-abcdef….arrow       the examples of one slice, put once
    URL/shards/ab/b3-abcdef….index       the same without token ids, written before it: see `store.remote.index`
    URL/shards/ab/b3-abcdef….bad         `verify` found the shard damaged
    URL/datasets/KEY/manifest.json, …    as on disk, put last
    URL/tokenizers/…, memo/…             as on disk
    URL/claims/…, leases/…, collections/… see `store.remote.claims`
    URL/clock                            shows the store's time

Objects appear whole or not at all, so nothing is renamed. An object that is found in place of a new shard is kept if
its bytes are the same, and else replaced. Everything that is read is compared with a digest: shards with that in the
manifest or index, indexes and manifests with their own.

`root` is the local tier. The store alone decides what exists: the tier only holds copies.
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
from typing import TYPE_CHECKING, Any

from penstock.errors import CorruptError, StoreError, UsageError
from penstock.objects import ObjectInfo
from penstock.store.cache import MARKER, Cache, CachePlace
from penstock.store.claims import SliceClaims
from penstock.store.copies import LOCAL_VARIABLE, user_cache_folder
from penstock.store.files import bytes_digest, digest, fault, is_readable_file, make_folder, read_regular
from penstock.store.format import FORMAT_VERSION, canonical, check_marker, seal
from penstock.store.remote.claims import RemoteClaims, clean_remote, collected, remote_lease
from penstock.store.remote.listing import Kinds, ShardListing, by_name
from penstock.store.remote.manifests import ManifestCopies
from penstock.store.remote.objects import CacheObjects
from penstock.store.remote.tier import Tier
from penstock.store.remote.user_key import is_keyed, keyed_digest
from penstock.store.trust import CheckedContent, ShardWriter, Trust

if TYPE_CHECKING:
    from penstock.prepare.encode.columns import Columns
    from penstock.store.remote.index import ShardIndex
    from penstock.store.shard import ShardMeta

BYTES_VARIABLE = "PENSTOCK_LOCAL_CACHE_BYTES"
COLLECTION_WAIT = 0.5  # seconds between looks at a `gc` that is about to delete what a build needs


class RemoteCache(Cache):
    """A cache in an object store, seen through its local tier."""

    is_remote = True

    def __init__(
        self,
        url: str,
        *,
        trust: Trust = Trust.CHECKED,
        local: str | os.PathLike[str] | None = None,
        local_bytes: int | None = None,
    ) -> None:
        super().__init__(tier_folder(url, local), trust=trust)
        self.url = url
        self.remote = CacheObjects(url)
        self.tier = Tier(self.tree, _tier_bytes() if local_bytes is None else local_bytes)
        self.mappable_bytes = self.tier.max_bytes // 2 if self.tier.max_bytes is not None else None
        self._shards = ShardListing(self.remote)
        self._manifests = ManifestCopies(self.remote, self.tree)
        self._committed: set[str] = set()  # shards that this process has put
        self._open_tier()

    @property
    def place(self) -> CachePlace:
        """Where the cache is."""
        return CachePlace(self.url, self.trust.value, str(self.root), self.tier.max_bytes)

    def object_path(self, path: Path) -> str:
        """The path in the store of a file of the tier."""
        return path.relative_to(self.root).as_posix()

    def index_path(self, name: str) -> Path:
        """The path of a shard's index in the tier."""
        return self.shard_path(name).with_suffix(".index")

    # -- the marker -----------------------------------------------------------------------------------------------

    def check_marker(self) -> bool:
        """Whether there is a cache at the URL. False if there is nothing; StoreError if there is something else."""
        data = self.remote.get(MARKER)
        if data is None:
            others = [name for name in self.remote.names() if name != MARKER]
            data = self.remote.get(MARKER) if others else None  # another process may have written it meanwhile
            if others and data is None:
                raise StoreError(
                    f"{self.url} is not a Penstock cache: it holds other objects ({others[0]}, …) and no {MARKER}. "
                    "Nothing was changed. Choose an empty prefix with --cache or PENSTOCK_CACHE."
                )
        if data is None:
            return False
        check_marker(data, self.remote.address(MARKER), f'Put it back: {{"format":{FORMAT_VERSION}}}')
        return True

    def _open_tier(self) -> None:
        """Create the local tier. Its marker names the URL, so that paths in the tier open the cache."""
        make_folder(self.root)
        if not super().check_marker():
            marker = canonical({"format": FORMAT_VERSION, "remote": self.url})
            self.tree.write(self.root / MARKER, marker, "marker", in_root=True, durable=False)
        self.check_writable()

    def prepare_root(self) -> None:
        """Create the marker and the local tier, and check that both can be written."""
        self.check_marker()
        self.remote.create(MARKER, canonical({"format": FORMAT_VERSION}))
        self.remote.now()  # writes an object, also where the marker exists

    # -- sharing --------------------------------------------------------------------------------------------------

    def claims(self) -> SliceClaims:
        """The claims of one build."""
        return RemoteClaims(self.remote)

    def lease(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Protects shards and tokenizers from `gc` while a manifest that references them is committed."""
        return remote_lease(self.remote, names)

    def clean_orphans(self) -> int:
        """Remove what dead processes left in the store, if we may."""
        with contextlib.suppress(StoreError):  # read-only for us
            return clean_remote(self.remote)
        return 0

    # -- small files ----------------------------------------------------------------------------------------------

    def read_file(self, path: Path) -> bytes:
        """The bytes of an object; FileNotFoundError if it is missing."""
        data = self.remote.get(self.object_path(path))
        if data is None:
            raise FileNotFoundError(2, "no such object", self.remote.address(self.object_path(path)))
        return data

    def write_file(self, path: Path, data: bytes, point: str, *, durable: bool = True) -> None:
        """Put a small object, and keep a copy of it."""
        fault(f"remote.{point}.open")
        self.remote.put(self.object_path(path), data)
        fault(f"remote.{point}.put")
        self.tree.write(path, data, point, durable=False)

    def find_dataset(self, key: str) -> Path:
        """Bring a dataset's manifest and notes up to date in the tier; returns the manifest's path there."""
        self._manifests.update(key)
        return self.dataset_path(key) / "manifest.json"

    def find_datasets(self) -> None:
        """Bring the manifests and notes of all datasets up to date in the tier."""
        self._manifests.update_all()

    def keys(self, prefix: str) -> list[str]:
        """The keys of the datasets that start with a prefix."""
        self.check_marker()
        return self._manifests.keys(prefix)

    def watch(self, reader: Any) -> None:
        """Keep the shards that a dataset has mapped out of the way of the tier's trimming."""
        known = weakref.ref(reader)
        self.tier.mapped.append(lambda: found._open_files() if (found := known()) is not None else ())

    def mark_used(self, mark: Path) -> None:
        """Record in the store that a dataset is in use."""
        self.remote.put(self.object_path(mark), b"")

    def find_memo(self, path: Path) -> None:
        """Copy a memo to the tier if it was written with this user's key."""
        if is_readable_file(path):
            return
        mac, _, data = (self.remote.get(self.object_path(path)) or b"").partition(b"\n")
        if data and (self.trust is Trust.ALL or is_keyed(path.name.encode() + data, mac.decode(errors="replace"))):
            self.tree.write(path, data, "memo", durable=False)

    def share_memo(self, path: Path, data: bytes) -> None:
        """Put a memo, signed with this user's key."""
        signed = keyed_digest(path.name.encode() + data).encode() + b"\n" + data
        self.remote.put(self.object_path(path), signed)

    # -- which shards there are -----------------------------------------------------------------------------------

    def refresh(self, names: Iterable[str]) -> None:
        """Bring up to date what `has_shard` knows of these shards."""
        self._shards.refresh(names)

    def has_shard(self, name: str) -> bool:
        """Whether the shard was there when its folder was last listed, and counts."""
        return name in self._committed or self._counts(name, self._shards.find(name))

    def _counts(self, name: str, kinds: Kinds) -> bool:
        if not {"arrow", "index"} <= kinds.keys() or "bad" in kinds:
            return False
        return self.trust is not Trust.OWN or self._is_own(name)

    def _is_own(self, name: str) -> bool:
        try:
            return self.index(name).is_own
        except CorruptError:
            return False

    def is_committed(self, name: str) -> bool:
        """Whether a shard exists at this moment."""
        if self.remote.head(self.object_path(self.shard_path(name))) is None:
            return False
        self._shards.refresh((name,))
        return self._counts(name, self._shards.find(name))

    def all_present(self, names: Iterable[str]) -> bool:
        """Whether all shards exist and no `gc` is about to delete one. Waits for the end of a `gc` that is."""
        wanted = list(names)
        while collected(self.remote, wanted):
            time.sleep(COLLECTION_WAIT)
        self.refresh(wanted)
        return all(self._counts(name, self._shards.find(name)) for name in wanted)

    def shard_stamp(self, name: str) -> object:
        """A value that changes when a shard is put again; None if there is none."""
        found = self.remote.head(self.object_path(self.index_path(name)))
        return None if found is None else (found.etag, found.modified)

    # -- writing shards -------------------------------------------------------------------------------------------

    def commit_shard(self, name: str, data: Any, note: dict[str, Any]) -> None:
        """Put a shard and its index, and keep a copy in the tier, which need not survive a power failure."""
        described = self.put_shard(name, data, note)
        self._keep_copy(name, data, described)
        self.tier.grown(len(data))

    def add_shard(self, name: str, data: Any, note: dict[str, Any]) -> None:
        """Put a shard that was copied from another cache; the tier gets no copy."""
        self.put_shard(name, data, note)

    def put_shard(self, name: str, data: Any, note: dict[str, Any]) -> dict[str, Any]:
        """Put a shard and its index, the shard last. One that exists with the same bytes is kept. Returns its note."""
        from penstock.store.remote.index import encode_index  # needs pyarrow, which a cache hit does not load

        path, made_by = self.object_path(self.shard_path(name)), socket.gethostname()
        described = {**note, "digest": bytes_digest(data), "bytes": len(data), "host": made_by, "put": time.time_ns()}
        index = encode_index(name, data, described)
        self.remote.put(self.object_path(self.index_path(name)), index)
        self.tree.write(self.index_path(name), index, "index", durable=False)
        fault("remote.index.put")
        while not self.remote.create(path, data):
            found = self.remote.head(path)
            if found is None:
                continue  # deleted in the meantime
            if found.size == len(data) and bytes_digest(self.remote.get(path) or b"") == described["digest"]:
                break
            if self.remote.replace(path, data, found):
                break
        fault("remote.shard.put")
        listed = self._shards.known(name)
        if listed is None or "bad" in listed:
            self.remote.delete(self.object_path(self.bad_path(name)))
        self._committed.add(name)
        return described

    def mark_bad(self, name: str, why: str) -> None:
        """Mark a shard as damaged, so that the next `prepare` rebuilds it; forget our copies of it."""
        self._committed.discard(name)
        self._shards.forget(name)
        for path in (self.shard_path(name), self.note_path(name), self.index_path(name)):
            self.tree.remove(path)
        self.remote.put(self.object_path(self.bad_path(name)), why.encode())

    def store_tokenizer(self, tokenizer_json: bytes) -> str:
        """Store a tokenizer.json under its digest."""
        name = super().store_tokenizer(tokenizer_json)
        path = self.object_path(self.tokenizer_path(name))
        found = self.remote.head(path)
        if found is None or found.size != len(tokenizer_json):
            self.remote.put(path, tokenizer_json)
        return name

    # -- reading shards -------------------------------------------------------------------------------------------

    def index(self, name: str) -> ShardIndex:
        """A shard's index, from the tier or the store; CorruptError if it is missing or damaged."""
        from penstock.store.remote.index import parse_index  # needs pyarrow

        path = self.index_path(name)
        if is_readable_file(path):
            try:
                return parse_index(name, read_regular(path))
            except (CorruptError, OSError):
                self.tree.remove(path)
        data = self._object(self.object_path(path))
        try:
            found = parse_index(name, data)
        except CorruptError as error:
            raise CorruptError(f"{self.remote.address(self.object_path(path))}: {error}. {REPAIR}") from error
        self.tree.write(path, data, "index", durable=False)
        return found

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        """The columns of a shard without its token ids, and what it records about its slice."""
        return self.index(name).read()

    def fetch(self, names: Iterable[str]) -> None:
        """Download the indexes of these shards, many at a time."""
        missing = [name for name in dict.fromkeys(names) if not is_readable_file(self.index_path(name))]
        self.remote.each(self.index, missing)

    def shard_note(self, name: str) -> dict[str, Any]:
        """Counts and digest of a committed shard, from its index."""
        return self.index(name).note

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        """A shard's file in the tier, downloaded if it is not there with this digest (default: that in its index)."""
        expected = digest or str(self.index(name).note["digest"])
        path = self.shard_path(name)
        if not self._has_copy(name, expected):
            self.tier.obtain(path, lambda: self._has_copy(name, expected), lambda: self._download(name, expected, path))
        self.tier.used(path)
        return path

    def download(self, digests: Mapping[str, str]) -> None:
        """Download shards, many at a time."""
        self.remote.each(lambda entry: self.shard_file(*entry), digests.items())

    def _has_copy(self, name: str, expected: str) -> bool:
        note = self.read_note(name)
        try:
            size = self.shard_path(name).stat().st_size
        except OSError:
            return False
        return note is not None and note["digest"] == expected and note["bytes"] == size

    def _download(self, name: str, expected: str, path: Path) -> int:
        """Download a shard and check it. A wrong digest is tried once more: the object may just have been replaced."""
        place = self.object_path(path)
        data = self._object(place)
        if bytes_digest(data) != expected and bytes_digest(data := self._object(place)) != expected:
            raise self._changed(name, data)
        index = self.index(name)
        if not index.describes(data):
            self.tree.remove(self.index_path(name))
            raise CorruptError(f"{self.remote.address(place)}: its index does not describe it. {REPAIR}")
        self._keep_copy(name, data, {**index.note, "digest": expected, "bytes": len(data)})
        return len(data)

    def _keep_copy(self, name: str, data: Any, note: dict[str, Any]) -> None:
        """Write a shard to the tier, and then the note that says which digest it was compared with."""
        self.tree.write(self.shard_path(name), data, "copy", durable=False)
        self.tree.write(self.note_path(name), seal(b"note", note), "note", durable=False)

    def _changed(self, name: str, data: bytes) -> CorruptError:
        place = self.remote.address(self.object_path(self.shard_path(name)))
        return CorruptError(
            f"{place}: its bytes ({len(data):,}) are not those that the dataset was committed with. {REPAIR}"
        )

    def _object(self, path: str) -> bytes:
        data = self.remote.get(path)
        if data is None:
            raise CorruptError(
                f"{self.remote.address(path)}: the object is missing, although a dataset needs it. "
                "Run the same prepare again: it rebuilds only this slice."
            )
        return data

    def shard_data(self, name: str, digest: str) -> Any:
        """The bytes of a shard, which must have this digest. They are not kept in the tier."""
        if self._has_copy(name, digest):
            return super().shard_data(name, digest)
        data = self._object(self.object_path(self.shard_path(name)))
        if bytes_digest(data) != digest:
            raise self._changed(name, data)
        return data

    def fresh_copy(self, path: Path) -> None:
        """Replace a file of the tier by its object as it is now, unchecked. For `verify`."""
        for suffix in {path.suffix, ".json", ".index"} if path.suffix == ".arrow" else {path.suffix}:
            self.tree.remove(path.with_suffix(suffix))
        data = self.remote.get(self.object_path(path))
        if data is not None:
            self.tree.write(path, data, "download", durable=False)
            self.tier.grown(len(data))

    def wrong_index(self, name: str) -> str | None:
        """What is wrong with the index of a shard of which the tier has a fresh copy."""
        try:
            index, data = self.index(name), read_regular(self.shard_path(name))
        except CorruptError as error:
            return str(error)
        if not index.describes(data) or index.note["digest"] != bytes_digest(data):
            return "its index does not describe it"
        self.tree.write(self.note_path(name), seal(b"note", index.note), "note", durable=False)
        return None

    def clear_bad(self, name: str) -> None:
        """Remove the mark of a shard that proved intact."""
        self.remote.delete(self.object_path(self.bad_path(name)))

    def tokenizer_json(self, name: str) -> bytes:
        """The bytes of a tokenizer.json, by digest; FileNotFoundError if it is missing."""
        path = self.tokenizer_path(name)
        if not is_readable_file(path):
            data = self.read_file(path)
            if bytes_digest(data) != name:
                raise CorruptError(
                    f"{self.remote.address(self.object_path(path))}: the tokenizer's bytes have changed. Delete it, "
                    "then prepare again."
                )
            self.tree.write(path, data, "tokenizer", durable=False)
        return super().tokenizer_json(name)

    # -- trust ----------------------------------------------------------------------------------------------------

    def writer(self, name: str) -> ShardWriter:
        """Who wrote a shard, by its index: this user, or one of whom only the host is known."""
        try:
            index = self.index(name)
        except CorruptError:
            return ShardWriter(-1, "an unknown user", "")
        host = str(index.note.get("host", ""))
        host = host if re.fullmatch(r"[\w.-]{1,253}", host) else ""
        return ShardWriter(os.geteuid(), "you", host) if index.is_own else ShardWriter(-1, "another user", host)

    def shard_address(self, name: str) -> str:
        """The URL of a shard."""
        return self.remote.address(self.object_path(self.shard_path(name)))

    def shard_objects(self) -> dict[str, ObjectInfo]:
        """All shards of the store, by name."""
        found = by_name(self.remote.objects("shards"))
        shards = {name: kinds["arrow"] for name, kinds in found.items() if {"arrow", "index"} <= kinds.keys()}
        self.fetch(shards)
        return shards

    def unchecked(self, names: Iterable[str], key: str) -> list[Path]:
        """The manifest and the shards that were not written with this user's key, unless this user has checked them.

        Objects have no owner. A manifest names its shards' digests, so one that was checked vouches for all of them.
        """
        if self.trust is Trust.ALL or CheckedContent().knows(self._manifest_content(key)):
            return []
        given = list(dict.fromkeys(names))
        self.fetch(given)
        shards = [self.shard_path(name) for name in given if not self._is_own(name)]
        return [*shards, self.dataset_path(key) / "manifest.json"]

    def unchecked_shard(self, name: str) -> bytes:
        """The bytes of a shard that another user wrote, to be checked."""
        return read_regular(self.shard_file(name))

    def keep_checked(self, name: str, data: bytes) -> None:
        """Keep nothing: the tier already holds these bytes."""


REPAIR = "Run `penstock cache verify`, then the same prepare again: it rebuilds what is damaged."


def _tier_bytes() -> int | None:
    given = os.environ.get(BYTES_VARIABLE)
    if given and not given.isdigit():
        raise UsageError(f"{BYTES_VARIABLE}={given!r} is not a number of bytes.")
    return int(given) if given else None


def tier_folder(url: str, local: str | os.PathLike[str] | None) -> Path:
    """The local tier of a cache: a folder of its own below the given one, or `penstock-remote` in the user's cache."""
    base = local or os.environ.get(LOCAL_VARIABLE) or user_cache_folder() / "penstock-remote"
    folder = Path(base).expanduser().absolute()
    name = f"{re.sub(r'[^A-Za-z0-9]+', '-', url.partition('://')[2]).strip('-')[:40]}-{digest(url.encode())[3:11]}"
    return folder if folder.name == name else folder / name
