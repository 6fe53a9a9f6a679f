"""Which shards an object store has, as listed a moment ago.

A small cache is listed as a whole, in one to three requests; of a large one, only the folders (two digits of the name)
of the shards in question, many at a time.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

from penstock.objects import ObjectInfo
from penstock.store.cache import validate_name
from penstock.store.remote.objects import CacheObjects
from penstock.store.tree import NAME

SMALL_CACHE = 3000  # objects that are listed at once; a request lists 1000
LISTING_AGE = 60.0  # seconds for which a listing that lacks a shard is used; a builder asks again after its claim
_SUFFIXES = re.compile(rf"(?P<name>{NAME})\.(?P<kind>arrow|index|bad)")

Kinds = dict[str, ObjectInfo]  # by kind: arrow, index, bad


class ShardListing:
    """The objects of each shard, listed when they are asked for."""

    def __init__(self, folder: CacheObjects) -> None:
        self._folder = folder
        self._listed: dict[str, tuple[float, dict[str, Kinds]]] = {}  # by the two digits of a folder
        self._is_large = False  # whether all shards are too many to list at once

    def refresh(self, names: Iterable[str]) -> None:
        """List the folders of these shards now."""
        wanted = sorted({validate_name(name)[3:5] for name in names})
        if wanted and not self._list_all():
            self._folder.each(self._list, wanted)

    def find(self, name: str) -> Kinds:
        """The objects of a shard; a folder in which it is missing is listed again after a while."""
        digits = validate_name(name)[3:5]
        listed = self._listed.get(digits)
        if listed is None or (name not in listed[1] and time.monotonic() - listed[0] > LISTING_AGE):
            self.refresh((name,))
        return self.known(name) or {}

    def known(self, name: str) -> Kinds | None:
        """The objects of a shard, as listed before; None if its folder was not listed."""
        listed = self._listed.get(name[3:5])
        return None if listed is None else listed[1].get(name, {})

    def forget(self, name: str) -> None:
        """List the folder of a shard again when it is asked for."""
        self._listed.pop(name[3:5], None)

    def _list_all(self) -> bool:
        """List all shards in one or a few requests; False if there are too many."""
        if self._is_large:
            return False
        listed = self._folder.few_objects("shards", SMALL_CACHE)
        if listed is None:
            self._is_large = True
            return False
        folders: dict[str, dict[str, Kinds]] = {f"{number:02x}": {} for number in range(256)}
        for name, kinds in by_name(listed).items():
            folders[name[3:5]][name] = kinds
        self._listed = {digits: (time.monotonic(), entries) for digits, entries in folders.items()}
        return True

    def _list(self, digits: str) -> None:
        self._listed[digits] = time.monotonic(), by_name(self._folder.objects(f"shards/{digits}"))


def by_name(objects: Mapping[str, ObjectInfo]) -> dict[str, Kinds]:
    """The objects of shards, by name and kind; others are left out."""
    found: dict[str, Kinds] = {}
    for path, info in objects.items():
        if parts := _SUFFIXES.fullmatch(path.rpartition("/")[2]):
            found.setdefault(parts["name"], {})[parts["kind"]] = info
    return found
