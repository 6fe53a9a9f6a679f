"""Finds the data files of a folder, and the split that each belongs to.

Supported are `save_to_disk` folders (a Dataset or a DatasetDict) and folders of data files. File names may imply
splits as they do for Hugging Face: `train.jsonl`, `data/test-00000-of-00002.parquet`, `validation/a.json`.
An ambiguous folder is an error, because a wrong guess would train on test data or on rows twice.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from functools import cached_property
from itertools import compress
from operator import not_
from pathlib import Path, PurePath, PurePosixPath
from typing import Any, NamedTuple, Protocol

import orjson

from penstock.errors import SourceError
from penstock.prepare.sources.kinds import BINARY_SUFFIXES, data_stem, has_data_suffix
from penstock.prepare.sources.remote import SourcePath

DEFAULT_SPLIT = "train"
DESCRIPTIONS = {"dataset_info.json", "dataset_infos.json", "state.json", "dataset_dict.json"}
SHARD = re.compile(r"(?P<split>\w+(\.\w+)*)-\d{5}-of-\d{5}")
WORD = re.compile(r"(?:^|[-._ 0-9/])([a-z]+)(?=[-._ 0-9/]|$)")
SPLIT_OF_WORD = (
    dict.fromkeys(("train", "training"), "train")
    | dict.fromkeys(("validation", "valid", "dev", "val"), "validation")
    | dict.fromkeys(("test", "testing", "eval", "evaluation"), "test")
)


class FoundFile(NamedTuple):
    """A data file found in a source, and its split."""

    path: SourcePath
    name: str
    split: str = DEFAULT_SPLIT


class FolderContents(NamedTuple):
    """The data files of a folder, and the names of other files in it."""

    files: list[FoundFile]
    ignored: list[str]


class Folder(Protocol):
    """A folder, wherever it is."""

    def names(self) -> list[PurePosixPath]:
        """The relative paths of all files in it, sorted."""

    def path(self, name: str) -> SourcePath | None:
        """A file by its relative path; None if there is none."""


class LocalFolder:
    """A folder on disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def names(self) -> list[PurePosixPath]:
        """The relative paths of all files in it, sorted."""
        return sorted(map(PurePosixPath, self._names), key=lambda path: path.parts)

    @cached_property
    def _names(self) -> set[str]:
        return set(_files_below(str(self._folder), ""))

    def path(self, name: str) -> Path | None:
        """A file by its relative path; None if there is none."""
        path = self._folder / name
        return path if name in self.__dict__.get("_names", ()) or path.is_file() else None


def _files_below(folder: str, inside: str) -> Iterator[str]:
    """The relative paths of all files; links to folders are not followed."""
    with contextlib.suppress(PermissionError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files_below(entry.path, f"{inside}{entry.name}/")
            elif entry.is_file():
                yield inside + entry.name


def read_folder(folder: Folder, name: str) -> FolderContents:
    """List the files of a folder, sorted by name within each split."""
    if (listed := folder.path("dataset_dict.json")) is not None:
        splits = [_inside(split, name, "dataset_dict.json") for split in _listed(listed, name, "splits")]
        return FolderContents([file for split in splits for file in _saved(folder, f"{split}/", name, split)], [])
    if (state := folder.path("state.json")) is not None:
        return FolderContents(_saved(folder, "", name, str(_json(state, name).get("_split") or DEFAULT_SPLIT)), [])
    return _data_files(folder, name)


def _saved(folder: Folder, inside: str, name: str, split: str) -> list[FoundFile]:
    """The Arrow files of a Dataset written by `save_to_disk`, in a subfolder `inside` that ends with a slash."""
    shown = f"{name}/{inside}".rstrip("/")
    path = folder.path(f"{inside}state.json")
    if path is None:
        raise SourceError(f"{shown}: state.json is missing, so the dataset is incomplete. Save it again.")
    state = _json(path, shown)
    if any(value for key, value in state.items() if key.startswith("_indices")):
        raise SourceError(
            f"{shown}: the dataset was saved with an indices mapping (after select, filter or shuffle). "
            "Save it again: dataset.flatten_indices().save_to_disk(...)."
        )
    found: list[FoundFile] = []
    for entry in _listed(path, shown, "_data_files"):
        listed = _inside(entry.get("filename") if isinstance(entry, dict) else entry, shown, "state.json")
        file = folder.path(inside + listed)
        if file is None:
            raise SourceError(f"{shown}: {listed}, which state.json lists, is missing. Copy or save the dataset again.")
        found.append(FoundFile(file, f"{shown}/{listed}", split))
    return found


def _listed(path: SourcePath, name: str, key: str) -> list[Any]:
    """A list in a JSON file of a saved dataset."""
    found = _json(path, name).get(key)
    if not isinstance(found, list):
        raise SourceError(f"{name}: {path.name} has no list {key!r}. Save the dataset again.")
    return found


def _inside(listed: object, name: str, by: str) -> str:
    """A name that a saved dataset lists, if it is that of something in the dataset's folder."""
    parts = PurePosixPath(listed).parts if isinstance(listed, str) else ()
    if not isinstance(listed, str) or not parts or parts[0] == "/" or ".." in parts or "\0" in listed:
        raise SourceError(f"{name}: {by} lists {listed!r}, which is not a file in this folder. Save the dataset again.")
    return listed


def _json(path: SourcePath, name: str) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            value = orjson.loads(file.read())
    except orjson.JSONDecodeError as error:
        raise SourceError(f"{name}: {path.name} is not valid JSON: {error}. Save the dataset again.") from error
    except OSError as error:
        raise SourceError(f"{name}: {path.name} can't be read: {error.strerror}.") from error
    if not isinstance(value, dict):
        raise SourceError(f"{name}: {path.name} is not a JSON object. Save the dataset again.")
    return value


def _data_files(folder: Folder, name: str) -> FolderContents:
    visible = [path for path in folder.names() if not any(part.startswith(".") for part in path.parts)]
    others = [path for path in visible if path.name not in DESCRIPTIONS]
    has_data = list(map(has_data_suffix, others))
    data = list(compress(others, has_data))
    ignored = [f"{name}/{path}" for path in compress(others, map(not_, has_data))]
    if not data:
        there = ", ".join(str(path) for path in visible[:5]) or "nothing"
        raise SourceError(
            f"{name}: no data files in this folder, which holds {there}. "
            "Supported are .jsonl, .json, .parquet and .arrow files (.jsonl and .json also with .gz or .zst), "
            "and folders written by save_to_disk."
        )
    _check_ambiguity(data, name)
    splits = [_split_of(path) for path in data]
    if any(splits) and not all(splits):
        unnamed = data[splits.index(None)]
        raise SourceError(
            f"{name}: some file names imply a split ({data[_first(splits)]}), others don't ({unnamed}). "
            "Name the files to read, or give a pattern such as 'folder/*.jsonl'."
        )
    named = zip(data, splits, strict=True)
    found = ((folder.path(str(path)), path, split or DEFAULT_SPLIT) for path, split in named)
    files = [FoundFile(file, f"{name}/{path}", split) for file, path, split in found if file is not None]
    order = list(dict.fromkeys(file.split for file in files))
    return FolderContents(sorted(files, key=lambda file: order.index(file.split)), ignored)


def _first(splits: list[str | None]) -> int:
    return next(index for index, split in enumerate(splits) if split)


def _check_ambiguity(data: list[PurePosixPath], name: str) -> None:
    """Reject files that probably hold the same rows."""
    stems: dict[str, PurePath] = {}
    for path in data:
        other = stems.setdefault(data_stem(path), path)
        if other is not path:
            raise SourceError(f"{name}: {other} and {path} probably hold the same rows. Name the files to read.")
    families = {path.suffix.lower() if path.suffix.lower() in BINARY_SUFFIXES else "text": path for path in data}
    if len(families) > 1:
        one, other, *_ = families.values()
        raise SourceError(
            f"{name}: files of different kinds, such as {one} and {other}, may hold the same rows. "
            "Name the files to read, or give a pattern such as 'folder/*.parquet'."
        )


def _split_of(path: PurePath) -> str | None:
    """The split that a path implies, if any."""
    shard = SHARD.match(path.name)
    if shard is not None:
        return shard["split"]
    words = WORD.findall(data_stem(path).lower())
    return next((SPLIT_OF_WORD[word] for word in words if word in SPLIT_OF_WORD), None)
