"""The cache folder: its layout, its marker file, and how shards and tokenizers are committed to it.

    CACHE/penstock-cache.json          the marker: written first, identifies the folder as a cache
    CACHE/shards/ab/b3-abcdef….arrow   the examples of one slice; counts, digest and engines in `….json` beside it
    CACHE/datasets/KEY/manifest.json   the shards of a dataset, in order
    CACHE/tokenizers/b3-….json         the tokenizer.json files that datasets were built with
    CACHE/inputs/ab/b3-….jsonl         rows given in memory or through a pipe, which are in no other file
    CACHE/retired/b3-….….arrow         replaced shards, kept while readers may still have them mapped
    CACHE/memo/…, claims/…, leases/…, tmp/…  disposable: losing them only repeats work

A shard exists if its file exists: the file is renamed into place once its bytes are on disk. A `….bad` file beside a
shard records that `verify` found it damaged; the shard then counts as missing until it is rebuilt.

A folder that holds other files and no marker is neither written to nor cleaned up, so a mistyped `--cache` can't mix
Penstock's files with the user's own.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import time
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from penstock.addresses import scheme_of
from penstock.errors import CorruptError, StoreError
from penstock.store.claims import Claims, SliceClaims, lease
from penstock.store.copies import CheckedCopies, user_cache_folder
from penstock.store.files import (
    bytes_digest,
    explain_os_errors,
    fault,
    file_digest,
    is_readable_file,
    make_folder,
    read_regular,
)
from penstock.store.format import FORMAT_VERSION, canonical, check_marker, seal, unseal
from penstock.store.tree import NAME, TEMPORARY, Tree
from penstock.store.trust import CheckedContent, ShardWriter, Trust, shard_writer
from penstock.transient import retry_transient

if TYPE_CHECKING:
    from penstock.prepare.encode.columns import Columns
    from penstock.store.shard import ShardMeta

MARKER = "penstock-cache.json"
FOLDERS = {"claims", "datasets", "leases", "memo", "retired", "shards", "tmp", "tokenizers"}
FILE_SYSTEM_ENTRIES = {"lost+found", ".snapshot"}  # created by file systems themselves
_RECHECK_PAUSES = (0.05, 0.2, 0.5)  # seconds; an NFS client may see another host's new files with a delay
CACHE_VARIABLE = "PENSTOCK_CACHE"


def default_cache() -> str:
    """`PENSTOCK_CACHE` if set, else `penstock` in the user's cache folder."""
    return os.environ.get(CACHE_VARIABLE) or str(user_cache_folder() / "penstock")


def validate_name(name: object) -> str:
    """Return a digest read from a file if it is safe to use in a path; raise CorruptError otherwise."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise CorruptError(f"{name!r} is not the name of a shard or dataset: names are b3- and 64 hexadecimal digits")
    return name


class CachePlace(NamedTuple):
    """Where a cache is, as plain values that can be sent to another process or host: see `open_cache`."""

    address: str  # a folder, or a URL
    trust: str = Trust.CHECKED.value
    local: str | None = None  # of a cache in an object store: the folder of its local tier
    local_bytes: int | None = None  # the size of the local tier


class Cache:
    """A cache folder. `trust` decides whose shards count as present.

    `RemoteCache` extends it: there `root` is the local tier of a cache in an object store, the methods that look for
    files or write them also ask the store, and `shard_file` downloads.
    """

    is_remote = False
    mappable_bytes: int | None = None  # of shards that a dataset should keep mapped; None: any number

    def __init__(self, root: str | os.PathLike[str] | None = None, *, trust: Trust = Trust.CHECKED) -> None:
        given = os.fspath(root) if root is not None and os.fspath(root) else default_cache()
        assert not scheme_of(given), "URLs are opened by open_cache"
        self.root = Path(given).expanduser().absolute()
        self.tree = Tree(self.root)
        self.trust = trust
        self.copies = CheckedCopies()

    @property
    def place(self) -> CachePlace:
        """Where the cache is."""
        return CachePlace(str(self.root), self.trust.value)

    @property
    def address(self) -> str:
        """The folder or URL by which users name the cache."""
        return self.place.address

    def shard_path(self, name: str) -> Path:
        """The path of a shard, whether or not it exists yet."""
        return self.root / "shards" / validate_name(name)[3:5] / f"{name}.arrow"

    def shard_address(self, name: str) -> str:
        """Where a shard is, for messages."""
        return str(self.shard_path(name))

    def note_path(self, name: str) -> Path:
        """The file with a shard's counts, digest and engines."""
        return self.shard_path(name).with_suffix(".json")

    def bad_path(self, name: str) -> Path:
        """The file that marks a shard as damaged."""
        return self.shard_path(name).with_suffix(".bad")

    def dataset_path(self, key: str) -> Path:
        """The folder of a dataset."""
        return self.root / "datasets" / validate_name(key)

    def tokenizer_path(self, digest: str) -> Path:
        """The path of a tokenizer.json, by its digest."""
        return self.root / "tokenizers" / f"{validate_name(digest)}.json"

    def check_marker(self) -> bool:
        """Whether the folder is a cache. False if it is missing or empty; StoreError if it holds something else."""
        return is_cache_folder(self.tree)

    def prepare_root(self) -> None:
        """Create the cache folder and its marker, and check that it is writable."""
        make_folder(self.root)
        if not self.check_marker():
            write_marker(self.tree)
        self.check_writable()

    def check_writable(self) -> None:
        """Raise StoreError if no files can be created in the folder."""
        with explain_os_errors(self.root, "can't be written"):
            self.tree.make_folder(self.tree.tmp)
            if not os.access(self.tree.tmp, os.W_OK | os.X_OK):
                self.tree.server_time()  # creates a file; its error says why not

    def claims(self) -> SliceClaims:
        """The claims of one build."""
        return Claims(self.tree)

    def lease(self, names: Iterable[str]) -> AbstractContextManager[None]:
        """Protects shards and tokenizers from `gc` while a manifest that references them is committed."""
        return lease(self.tree, names)

    def clean_orphans(self) -> int:
        """Remove what dead processes left elsewhere than in this folder; returns how many files."""
        return 0

    # -- reading --------------------------------------------------------------------------------------------------

    def read_file(self, path: Path) -> bytes:
        """The bytes of a small file of the cache; OSError if it is missing."""
        return read_regular(path)

    def write_file(self, path: Path, data: bytes, point: str, *, durable: bool = True) -> None:
        """Commit a small file of the cache."""
        self.tree.write(path, data, point, durable=durable)

    def find_dataset(self, key: str) -> Path:
        """The path of a dataset's manifest in its current state, whether or not it exists."""
        return self.dataset_path(key) / "manifest.json"

    def keys(self, prefix: str) -> list[str]:
        """The keys of the datasets that start with a prefix."""
        return sorted(path.parent.name for path in (self.root / "datasets").glob(f"{prefix}*/manifest.json"))

    def find_datasets(self) -> None:
        """Bring the manifests of all datasets up to date, before they are listed."""

    def find_memo(self, path: Path) -> None:
        """Bring a memo that doesn't depend on the machine up to date."""

    def share_memo(self, path: Path, data: bytes) -> None:
        """Let other machines find a memo."""

    def shard_file(self, name: str, digest: str | None = None) -> Path:
        """The file to read a shard from: this user's copy, if another user wrote the shard and this user checked it.

        `digest` is what the caller's manifest expects.
        """
        return self._copy(name) or self.shard_path(name)

    def _copy(self, name: str) -> Path | None:
        is_foreign = self.trust is not Trust.ALL and self.tree.is_foreign(self.shard_path(name))
        return self.copies.find(name) if is_foreign else None

    def structure(self, name: str) -> tuple[Columns, ShardMeta]:
        """The columns of a shard, perhaps without its token ids, and what it records about its slice."""
        from penstock.store.shard import read_shard  # needs pyarrow, which a cache hit does not load

        return read_shard(self.shard_file(name))

    def fetch(self, names: Iterable[str]) -> None:
        """Make `structure` of these shards quick."""

    def download(self, digests: Mapping[str, str]) -> None:
        """Make `shard_file` of these shards quick; the values are their digests."""

    def shard_data(self, name: str, digest: str) -> Any:
        """The bytes of a shard, which must have this digest."""
        path = self.shard_file(name)
        try:
            data = read_regular(path)
        except OSError as error:
            raise CorruptError(f"{path} can't be read: {error.strerror}. Run `penstock cache verify`.") from error
        if bytes_digest(data) != digest:
            raise CorruptError(f"{path}: its bytes have changed. Run `penstock cache verify`.")
        return data

    def fresh_copy(self, path: Path) -> None:
        """Make a file of the cache what it is now, unchecked. For `verify`."""

    def wrong_index(self, name: str) -> str | None:
        """What is wrong with the index of a shard, where there is one."""
        return None

    def clear_bad(self, name: str) -> None:
        """Remove the mark of a shard that proved intact."""
        with contextlib.suppress(OSError):
            self.tree.remove(self.bad_path(name))

    def watch(self, reader: Any) -> None:
        """Learn which shards a dataset has mapped, from its `_open_files`."""

    def mark_used(self, mark: Path) -> None:
        """Record elsewhere than in this folder that a dataset is in use."""

    # -- shards ---------------------------------------------------------------------------------------------------

    def refresh(self, names: Iterable[str]) -> None:
        """Bring up to date what `has_shard` knows of these shards."""

    def is_committed(self, name: str) -> bool:
        """Whether a shard exists at this moment, asked after claiming its slice."""
        return self.has_shard(name)

    def shard_stamp(self, name: str) -> object:
        """A value that changes when a shard is committed again; None if there is none."""
        try:
            found = self.shard_path(name).stat()
        except FileNotFoundError:
            return None
        return found.st_ino, found.st_mtime_ns

    def has_shard(self, name: str) -> bool:
        """Whether the shard exists, is readable and trusted, and is not marked as damaged."""
        path = self.shard_path(name)
        return is_readable_file(path) and not self.bad_path(name).exists() and not self._is_refused(path)

    def _is_refused(self, path: Path) -> bool:
        return self.trust is Trust.OWN and self.tree.is_foreign(path)

    def all_present(self, names: Iterable[str]) -> bool:
        """Whether all shards exist, by listing their folders: an NFS client may answer `stat` from its cache."""
        wanted: dict[Path, set[str]] = {}
        for name in names:
            wanted.setdefault(self.shard_path(name).parent, set()).add(name)
        for folder, shards in wanted.items():
            try:
                found = set(self.tree.names(folder))
            except OSError:
                return False
            if any(f"{name}.arrow" not in found or f"{name}.bad" in found for name in shards):
                return False
        return True

    def commit_shard(self, name: str, data: Any, note: dict[str, Any]) -> None:
        """Commit a shard and its note, the shard last.

        Other processes may have the existing file mapped, and on NFS removing it would kill readers on other hosts
        with SIGBUS. So an identical shard stays in place, and one that must be replaced moves to `retired/`, where
        `gc` deletes it once it is old.
        """
        path, new_digest = self.shard_path(name), bytes_digest(data)
        with explain_os_errors(path, "can't be replaced"):
            is_current = self._digest_on_disk(path, len(data)) == new_digest and not self._is_refused(path)
            if not is_current or self._noted_digest(name) != new_digest:
                noted = {**note, "digest": new_digest, "bytes": len(data), "host": socket.gethostname()}
                self.tree.write(self.note_path(name), seal(b"note", noted), "note", durable=False)
            if is_current:
                with contextlib.suppress(PermissionError):  # owned by another user
                    self.tree.touch(path)  # so that `gc` and concurrent builds see it as new
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.tree.move(path, self.root / "retired" / f"{name}.{secrets.token_hex(6)}.arrow")
                fault("shard.retire")
                self.tree.write(path, data, "shard", keep_existing=True)
        with explain_os_errors(self.bad_path(name), "can't be removed, although the shard has been rebuilt"):
            self.tree.remove(self.bad_path(name))

    def add_shard(self, name: str, data: Any, note: dict[str, Any]) -> None:
        """Commit a shard that was copied from another cache."""
        self.commit_shard(name, data, note)

    def _digest_on_disk(self, path: Path, size: int) -> str | None:
        try:
            return file_digest(path) if is_readable_file(path) and path.stat().st_size == size else None
        except OSError:
            return None

    def _noted_digest(self, name: str) -> object:
        note = self.read_note(name)
        return note["digest"] if note is not None else None

    def read_note(self, name: str) -> dict[str, Any] | None:
        """The note beside a shard, or None if it is lost or damaged."""
        try:
            note = unseal(b"note", read_regular(self.note_path(name)))
        except (OSError, ValueError):
            return None
        kinds = {"digest": str, "bytes": int, "rejected": int}
        return note if all(type(note.get(key)) is kind for key, kind in kinds.items()) else None

    def writer(self, name: str) -> ShardWriter:
        """Who wrote a shard."""
        return shard_writer(self, name)

    def unchecked(self, names: Iterable[str], key: str) -> list[Path]:
        """The shards and the manifest of a dataset that others wrote and this user hasn't checked."""
        if self.trust is Trust.ALL:
            return []
        paths = {name: self.shard_path(name) for name in names}
        manifest = self.dataset_path(key) / "manifest.json"
        found = [path for name, path in paths.items() if self.tree.is_foreign(path) and not self.copies.find(name)]
        if self.tree.is_foreign(manifest) and not CheckedContent().knows(self._manifest_content(key)):
            found.append(manifest)
        return found

    def unchecked_shard(self, name: str) -> bytes:
        """The bytes of a shard that another user wrote, to be checked. OSError or CorruptError if there are none."""
        return read_regular(self.shard_path(name))

    def keep_checked(self, name: str, data: bytes) -> None:
        """Keep the bytes of a shard that were checked: from now on, this user reads them."""
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

    def mark_bad(self, name: str, why: str) -> None:
        """Mark a shard as damaged, so that the next `prepare` rebuilds it. Readers keep the current file until then."""
        self.tree.write(self.bad_path(name), why.encode(), "bad", durable=False)

    def shard_note(self, name: str) -> dict[str, Any]:
        """Counts and digest of a committed shard, recomputed from the shard if its note is lost."""
        path = self.shard_file(name)
        is_copy = path != self.shard_path(name)
        note = None if is_copy else self.read_note(name)  # the note is the other user's
        with contextlib.suppress(OSError):  # the note is only a cache of what the shard says
            if note is not None and note["bytes"] == path.stat().st_size:
                return note
        from penstock.store.shard import read_shard  # needs pyarrow, which a cache hit does not load

        _, meta = read_shard(path)
        return {"rejected": len(meta.rejected), "digest": file_digest(path), "bytes": path.stat().st_size}

    def tokenizer_json(self, name: str) -> bytes:
        """The bytes of a tokenizer.json, by digest; OSError if it is missing."""
        path = self.tokenizer_path(name)
        data = read_regular(path)
        if bytes_digest(data) != name:
            raise CorruptError(f"{path}: the tokenizer's bytes have changed. Delete it, then prepare again.")
        return data

    def store_tokenizer(self, tokenizer_json: bytes) -> str:
        """Store a tokenizer.json under its digest, so that datasets stay readable without the original folder."""
        name = bytes_digest(tokenizer_json)
        path = self.tokenizer_path(name)
        if self._digest_on_disk(path, len(tokenizer_json)) != name:
            self.tree.write(path, tokenizer_json, "tokenizer")
        return name


def is_cache_folder(tree: Tree) -> bool:
    """Whether the folder is a cache. False if it is missing or empty; StoreError if it holds anything else."""
    for pause in (*_RECHECK_PAUSES, None):
        if has_marker(tree):
            return True
        names = _content(tree)
        if not names:
            return False
        if pause is None or names - FOLDERS - {MARKER}:
            break
        time.sleep(pause)  # looks like a cache that another process is just creating
    raise StoreError(
        f"{tree.root} is not a Penstock cache: it holds other files and no {MARKER}. Nothing was changed. "
        "Choose a new or empty folder with --cache or PENSTOCK_CACHE."
    )


def write_marker(tree: Tree) -> None:
    """Make an empty folder a cache. Safe to run concurrently: every process writes the same bytes."""
    with explain_os_errors(tree.root, "can't be read"):
        readers = retry_transient(tree.root.stat)().st_mode & 0o444  # readable by everyone who can use the cache
    data = canonical({"format": FORMAT_VERSION})
    tree.write(tree.root / MARKER, data, "marker", in_root=True, mode=readers | 0o200)


def has_marker(tree: Tree) -> bool:
    """Whether there is a marker of the format version that this Penstock reads."""
    path = tree.root / MARKER
    with explain_os_errors(path, "can't be read"):
        try:
            data = tree.read(path)
        except (FileNotFoundError, NotADirectoryError):
            return False
    written = f"""echo '{{"format":{FORMAT_VERSION}}}' > {path}"""
    check_marker(data, path, f"If the folder is a Penstock cache, put it back: {written}")
    return True


def _content(tree: Tree) -> set[str]:
    with explain_os_errors(tree.root, "can't be read"):
        try:
            names = set(tree.names(tree.root))
        except (FileNotFoundError, NotADirectoryError):
            return set()
    return {name for name in names - FILE_SYSTEM_ENTRIES if not TEMPORARY.fullmatch(name)}
