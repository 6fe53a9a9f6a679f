"""Finds the objects that a URL names: one object, a pattern such as `s3://bucket/data/*.jsonl`, or a folder.

An object is looked up by one request, a pattern or a folder by a listing, which also has sizes and ETags.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from pathlib import PurePosixPath
from typing import Protocol

from penstock.addresses import scheme_of
from penstock.errors import ObjectMissing, SourceError
from penstock.objects import ObjectInfo, open_object_store, parse_url
from penstock.sources.remote.hub_store import open_hub_store
from penstock.sources.remote.path import ByteStore, ObjectPath

WILD = re.compile(r"[*?\[]")
GLOB_PART = re.compile(r"\*|\?|\[!?\]?[^\]]*\]|.", re.DOTALL)


class ListedStore(ByteStore, Protocol):
    """A store that can list its objects."""

    def list(self, prefix: str = "") -> Iterator[ObjectInfo]: ...

    def children(self, folder: str = "") -> tuple[Sequence[ObjectInfo], Sequence[str]]: ...


class RemoteFolder:
    """The objects below a path, by their paths relative to it."""

    def __init__(self, store: ListedStore, folder: str) -> None:
        start = f"{folder}/" if folder else ""
        listed = {info.path.removeprefix(start): info for info in store.list(folder) if info.path != folder}
        parents = {str(parent) for name in listed for parent in PurePosixPath(name).parents}
        self._store = store
        self._found = {name: info for name, info in listed.items() if info.size or name not in parents}  # no markers

    def names(self) -> list[PurePosixPath]:
        """The relative paths of all objects, sorted."""
        return sorted(map(PurePosixPath, self._found))

    def path(self, name: str) -> ObjectPath | None:
        """An object by its relative path; None if there is none."""
        info = self._found.get(name)
        return None if info is None else ObjectPath.found(self._store.url(info.path), info)


class Remote:
    """What a URL names. `revision` applies to the Hub only."""

    def __init__(self, url: str, revision: str | None = None) -> None:
        self.is_web = scheme_of(url) in ("http", "https")
        self.url = str(parse_url(url)) if self.is_web else url
        self._store: ListedStore
        self._store, path = open_hub_store(url, revision) if scheme_of(url) == "hf" else open_object_store(url)
        self.path = path.rstrip("/")
        self._names_folder = path.endswith("/") or not path

    def __str__(self) -> str:
        return self._store.url(self.path)

    def object(self) -> ObjectPath | None:
        """The object with exactly this path; None if there is none."""
        if self._names_folder:
            return None
        try:
            info = self._store.head(self.path)
        except ObjectMissing:
            return None
        return ObjectPath.found(self.url if self.is_web else self._store.url(self.path), info)

    def folder(self) -> RemoteFolder | None:
        """The folder with this path; None if nothing is in it."""
        if self.is_web:
            return None
        found = RemoteFolder(self._store, self.path)
        return found if found.names() else None

    def matches(self) -> list[ObjectPath]:
        """The objects that match the path as a pattern, sorted by path."""
        if self.is_web:
            raise SourceError(f"{self.url}: a web server can't be searched for a pattern. Name the files one by one.")
        parts = self.path.split("/")
        wild = next(index for index, part in enumerate(parts) if WILD.search(part))
        pattern = _pattern(parts)
        hidden = parts[-1].startswith(".")
        found = [info for info in self._store.list("/".join(parts[:wild])) if pattern.fullmatch(info.path)]
        return [
            ObjectPath.found(self._store.url(info.path), info)
            for info in found
            if PurePosixPath(info.path).name.startswith(".") == hidden
        ]

    def hint(self) -> str:
        """For a path at which nothing is: the most similar name beside it, or what there is."""
        if self.is_web:
            return ""
        parent, _, name = self.path.rpartition("/")
        objects, folders = self._store.children(parent)
        names = [PurePosixPath(path).name for path in (*(info.path for info in objects), *folders)]
        where = self._store.url(parent) if parent else self._store.url("").rstrip("/")
        if near := get_close_matches(name, names, n=1, cutoff=0.6):
            return f" Did you mean {where}/{near[0]}?"
        if not names and parent:
            return f" There is nothing below {where} either."
        return f" {where} holds {', '.join(names[:5]) or 'nothing'}."


def _pattern(parts: list[str]) -> re.Pattern[str]:
    """A glob as a regular expression: `*` stays within a folder, `**` crosses folders."""
    regex = ""
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part == "**":
            regex += ".*" if is_last else "(?:[^/]+/)*"
        else:
            regex += GLOB_PART.sub(_translated, part) + ("" if is_last else "/")
    return re.compile(regex, re.DOTALL)


def _translated(found: re.Match[str]) -> str:
    text = found[0]
    if text in ("*", "?"):
        return "[^/]*" if text == "*" else "[^/]"
    if len(text) > 2 and text.startswith("["):
        inside = text[1:-1].replace("\\", "\\\\").replace("[", r"\[")
        return f"[^/{inside[1:]}]" if inside.startswith("!") else f"[{inside}]"
    return re.escape(text)


def local_of(url: str) -> str:
    """The path that a file:// URL names."""
    return "/" + parse_url(url).path
