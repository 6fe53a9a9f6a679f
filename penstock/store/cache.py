"""The cache folder: where shards, manifests and tokenizers are, and how they get there.

    CACHE/penstock-cache.json          makes the folder a cache; the first file in it
    CACHE/shards/ab/b3-abcdef….arrow   examples of one slice; `….json` beside it: counts, digest, engines
    CACHE/datasets/KEY/manifest.json   which shards make a dataset, in order
    CACHE/tokenizers/b3-….json         the tokenizer.json files that datasets were made with
    CACHE/inputs/ab/b3-….jsonl         rows that were given in memory or through a pipe, and are in no other file
    CACHE/retired/b3-….….arrow         shards that were replaced, while readers may still have them mapped
    CACHE/memo/…, claims/…, leases/…, tmp/…  conveniences; losing them only repeats work

A shard is there when its file is there: it gets its name by a rename, after its bytes are on disk. A file `….bad`
beside it says that `verify` found its bytes wrong: it counts as missing until it has been made again.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from penstock.addresses import scheme_of
from penstock.errors import CorruptError, StoreError
from penstock.store.files import bytes_digest, explained, fault, file_digest, is_there, make_folder, read_regular
from penstock.store.format import seal, unseal
from penstock.store.marker import is_marked, mark
from penstock.store.tree import NAME, Tree
from penstock.store.trust import Trust

CACHE_VARIABLE = "PENSTOCK_CACHE"


def default_cache() -> Path:
    """`PENSTOCK_CACHE`, or the usual place for caches."""
    given = os.environ.get(CACHE_VARIABLE)
    if given:
        return Path(given).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path("~/.cache").expanduser()) / "penstock"


def checked_name(name: object) -> str:
    """A digest from a file, fit to become part of a path; anything else is refused."""
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise CorruptError(f"{name!r} is not the name of a shard or dataset: names are b3- and 64 hexadecimal digits")
    return name


class Cache:
    """One cache folder. `trust` says whose shards count as being there."""

    def __init__(self, root: str | os.PathLike[str] | None = None, *, trust: Trust = Trust.CHECKED) -> None:
        given = default_cache() if root is None or not os.fspath(root) else Path(root)
        if scheme := scheme_of(given):
            raise StoreError(
                f"{root or os.environ[CACHE_VARIABLE]}: addresses are not served ({scheme}); the cache must be on a "
                "file system: object stores have no atomic rename. Use a local or NFS folder with --cache."
            )
        self.root = given.expanduser().absolute()
        self.tree = Tree(self.root)
        self.trust = trust

    def shard_path(self, name: str) -> Path:
        """Where the shard of that name is, or will be."""
        return self.root / "shards" / checked_name(name)[3:5] / f"{name}.arrow"

    def note_path(self, name: str) -> Path:
        """Where counts, digest and engines of a shard are noted."""
        return self.shard_path(name).with_suffix(".json")

    def bad_path(self, name: str) -> Path:
        """The mark that a shard's bytes are wrong."""
        return self.shard_path(name).with_suffix(".bad")

    def dataset_path(self, key: str) -> Path:
        """The folder of the dataset of that key."""
        return self.root / "datasets" / checked_name(key)

    def tokenizer_path(self, digest: str) -> Path:
        """Where the tokenizer.json with that digest is kept."""
        return self.root / "tokenizers" / f"{checked_name(digest)}.json"

    def check_marker(self) -> bool:
        """Is the folder marked as a cache? One that is missing or empty is not, yet; any other is a StoreError."""
        return is_marked(self.tree)

    def prepare_root(self) -> None:
        """Make and mark the cache folder; a StoreError with the remedy where that can't be."""
        make_folder(self.root)
        if not self.check_marker():
            mark(self.tree)
        with explained(self.root, "can't be written"):
            self.tree.make_folder(self.tree.tmp)
            if not os.access(self.tree.tmp, os.W_OK | os.X_OK):
                raise PermissionError(13, "Permission denied")

    def has_shard(self, name: str) -> bool:
        """Is the shard there for this user, and not known to be bad?"""
        path = self.shard_path(name)
        return is_there(path) and not self.bad_path(name).exists() and not self._is_refused(path)

    def _is_refused(self, path: Path) -> bool:
        return self.trust is Trust.OWN and self.tree.is_foreign(path)

    def all_present(self, names: Iterable[str]) -> bool:
        """Are all shards there, by fresh listings? A look at each file may be answered from an NFS client's cache."""
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
        """Put a shard and its note in place; the shard last. Readers may have mapped the one that is there.

        On NFS a mapped file must not vanish: its readers on other hosts would die of SIGBUS. So an equal shard stays,
        and one that has to be replaced is kept under another name until `gc` finds it old.
        """
        path, made = self.shard_path(name), bytes_digest(data)
        with explained(path, "can't be replaced"):
            stays = self._found_digest(path, len(data)) == made and not self._is_refused(path)
            if not stays or self._noted_digest(name) != made:
                noted = {**note, "digest": made, "bytes": len(data), "host": socket.gethostname()}
                self.tree.write(self.note_path(name), seal(b"note", noted), "note", durable=False)
            if stays:
                with contextlib.suppress(PermissionError):  # another user's
                    self.tree.touch(path)  # tells `gc` and others who were asked to make it anew
            else:
                with contextlib.suppress(FileNotFoundError):
                    self.tree.move(path, self.root / "retired" / f"{name}.{secrets.token_hex(6)}.arrow")
                fault("shard.retire")
                self.tree.write(path, data, "shard", keep=True)
        with explained(self.bad_path(name), "can't be removed, though the shard has been made again"):
            self.tree.remove(self.bad_path(name))

    def _found_digest(self, path: Path, size: int) -> str | None:
        try:
            return file_digest(path) if is_there(path) and path.stat().st_size == size else None
        except OSError:
            return None

    def _noted_digest(self, name: str) -> object:
        note = self.read_note(name)
        return note["digest"] if note is not None else None

    def read_note(self, name: str) -> dict[str, Any] | None:
        """What is noted beside a shard; None where the note is lost or damaged."""
        try:
            note = unseal(b"note", read_regular(self.note_path(name)))
        except (OSError, ValueError):
            return None
        kinds = {"digest": str, "bytes": int, "rejected": int}
        return note if all(type(note.get(key)) is kind for key, kind in kinds.items()) else None

    def mark_bad(self, name: str, why: str) -> None:
        """Have the next prepare make a shard again; readers keep what is there until then."""
        self.tree.write(self.bad_path(name), why.encode(), "bad", durable=False)

    def shard_note(self, name: str) -> dict[str, Any]:
        """Counts and digest of a committed shard; made anew from the shard where the note is lost."""
        note = self.read_note(name)
        with contextlib.suppress(OSError):  # a note is a convenience: the shard itself is the truth
            if note is not None and note["bytes"] == self.shard_path(name).stat().st_size:
                return note
        from penstock.store.shard import read_shard  # needs pyarrow, which a hit does without

        _, meta = read_shard(self.shard_path(name))
        return {
            "rejected": len(meta.rejected),
            "digest": file_digest(self.shard_path(name)),
            "bytes": self.shard_path(name).stat().st_size,
        }

    def tokenizer_json(self, name: str) -> bytes:
        """The tokenizer.json with that digest; OSError where it is gone."""
        path = self.tokenizer_path(name)
        data = read_regular(path)
        if bytes_digest(data) != name:
            raise CorruptError(f"{path}: the tokenizer's bytes have changed. Delete it, then prepare again.")
        return data

    def keep_tokenizer(self, tokenizer_json: bytes) -> str:
        """Keep a tokenizer.json by its digest, so that datasets can be shown without its folder."""
        name = bytes_digest(tokenizer_json)
        path = self.tokenizer_path(name)
        if self._found_digest(path, len(tokenizer_json)) != name:
            self.tree.write(path, tokenizer_json, "tokenizer")
        return name
