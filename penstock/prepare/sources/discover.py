"""Resolves the sources that the user names (files, globs, folders, URLs, Hub datasets) to a `SourceSet`, in order.

Costs one small read per file. Files given by name belong to the split `train`; folders and Hub datasets may have named
splits, of which `train` (or the only one) is read by default.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import groupby
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple, Protocol

from penstock.addresses import check_source, scheme_of
from penstock.errors import ObjectMissing, SourceError
from penstock.objects import ObjectInfo, open_object_store, parse_url
from penstock.prepare.sources.folders import DEFAULT_SPLIT, Folder, FoundFile, LocalFolder, read_folder
from penstock.prepare.sources.hub import open_hub_store
from penstock.prepare.sources.joined import RUN_FILES, JoinedPath
from penstock.prepare.sources.kinds import FileKind, detect_kind, has_data_suffix
from penstock.prepare.sources.remote import ByteStore, ObjectPath, SourcePath, printable_name
from penstock.prepare.sources.slices import SLICE_SIZES, SourceFile, identity
from penstock.prepare.sources.source_set import SourceSet, Split, parse_split
from penstock.transient import retry_transient

# ---- finding ---------------------------------------------------------------------------------------------------------
#
# Finds the objects that a URL names: one object, a pattern such as `s3://bucket/data/*.jsonl`, or a folder.
#
# An object is looked up by one request, a pattern or a folder by a listing, which also has sizes and ETags.


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


# ---- hub -------------------------------------------------------------------------------------------------------------
#
# Hugging Face Hub datasets (or a local folder with a config), through the optional package `datasets`.
#
# `datasets` downloads and converts the requested splits in its own cache; Penstock reads the resulting Arrow files.


class HubDataset(NamedTuple):
    """A Hub dataset: name, config and revision."""

    name: str
    config: str | None = None
    revision: str | None = None

    def split_names(self) -> list[str]:
        """The names of the dataset's splits."""
        datasets = _datasets(self.name)
        try:
            return list(datasets.get_dataset_split_names(self.name, self.config, revision=self.revision))
        except Exception as error:  # `datasets` raises whatever its readers raise
            raise self._failure(error) from error

    def load(self, split: str) -> list[FoundFile]:
        """The files of one split, downloaded and converted if necessary."""
        datasets = _datasets(self.name)
        try:
            dataset = datasets.load_dataset(self.name, self.config, revision=self.revision, split=split)
        except Exception as error:
            raise self._failure(error) from error
        if dataset._indices is not None or not dataset.cache_files:
            raise SourceError(
                f"{self.name}: 'datasets' keeps this dataset in memory or behind an indices mapping. "
                "Save it first, dataset.flatten_indices().save_to_disk('folder'), and pass the folder."
            )
        paths = [Path(entry["filename"]) for entry in dataset.cache_files]
        return [FoundFile(path, f"{self.name}/{path.name}", split) for path in paths]

    def _failure(self, error: Exception) -> SourceError:
        config = f" with config {self.config!r}" if self.config else ""
        return SourceError(
            f"{self.name}: not a local file or folder, and it could not be loaded as a Hugging Face dataset{config}: "
            f"{type(error).__name__}: {error}. Check the name, the config, the revision and the network."
        )


def _datasets(name: str) -> Any:
    try:
        return importlib.import_module("datasets")
    except ImportError as error:
        raise SourceError(
            f"{name}: not a local file or folder, and loading a Hugging Face dataset needs the package 'datasets'. "
            "Install it: pip install 'penstock[hub]'."
        ) from error


# ---- discover --------------------------------------------------------------------------------------------------------


HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
WILD = re.compile(r"[*?\[]")
Recall = Callable[[Sequence[SourcePath]], Mapping[SourcePath, FileKind]]


class NamedFile(NamedTuple):
    """A file that holds what the user gave in another way, and its name for people."""

    path: SourcePath
    name: str


class _Source(NamedTuple):
    """One source as named by the user: its splits, and a function that returns the files of a split."""

    name: str
    splits: list[str]
    files: Callable[[str], list[FoundFile]]
    ignored: list[str]
    is_expanded: bool = False  # a glob or a folder: the user did not name the files


def discover(
    sources: Sequence[str | Path | NamedFile] | str | Path,
    *,
    split: str | None = None,
    limit: int | None = None,
    config: str | None = None,
    revision: str | None = None,
    recall: Recall = lambda _: {},
) -> SourceSet:
    """Find the files of these sources, and the split to take from them. `recall` gives the kinds of known objects."""
    given = [sources] if isinstance(sources, str | Path) else list(sources)
    if not given:
        raise SourceError("no source given. Name a file, a folder, a pattern such as 'data/*.jsonl', or a dataset.")
    parsed = None if split is None else parse_split(split)
    found = [_source(source, config, revision) for source in given]
    files: list[FoundFile] = []
    ignored: list[str] = []
    for source in found:
        wanted = _wanted(source, parsed)
        files += [file for name in source.splits if name in wanted for file in source.files(name)]
        unread = [name for name in source.splits if name not in wanted]
        ignored += source.ignored + [f"{source.name} (split {name})" for name in unread]
    _check_repeats(files, found)
    named = [file._replace(name=printable_name(file.name)) for file in files]
    known = recall([file.path for file in named])
    listed = [
        SourceFile(ordinal, file.path, known.get(file.path) or detect_kind(file.path, file.name), file.name, file.split)
        for ordinal, file in enumerate(named)
    ]
    return SourceSet(tuple(_with_joined(listed)), parsed, tuple(map(printable_name, ignored)), limit)


def _with_joined(files: Sequence[SourceFile]) -> Iterator[SourceFile]:
    """The files, with a long run of small ones as one."""
    ordinal = 0
    for joins, group in groupby(files, _joins):
        run = list(group)
        if joins is not None and len(run) >= RUN_FILES:
            path = JoinedPath([file.path for file in run], [file.name for file in run])
            run = [SourceFile(0, path, FileKind.JOINED, path.name, run[0].split)]
        for file in run:
            yield file._replace(ordinal=ordinal)
            ordinal += 1


def _joins(file: SourceFile) -> tuple[type, str] | None:
    """What neighbours must have in common to be joined; None for a file that stays alone."""
    is_small = file.kind is FileKind.JSONL and identity(file.path).size < SLICE_SIZES.smallest
    return (type(file.path), file.split) if is_small else None


def _wanted(source: _Source, split: Split | None) -> set[str]:
    """The named splits to read from a source."""
    available = ", ".join(source.splits)
    if split is None:
        if DEFAULT_SPLIT in source.splits or len(source.splits) == 1:
            return {DEFAULT_SPLIT if DEFAULT_SPLIT in source.splits else source.splits[0]}
        raise SourceError(f"{source.name}: has the splits {available}. Choose one with --split.")
    names = {part.name for part in split.parts}
    for name in names - set(source.splits):
        raise SourceError(f"{source.name}: no split {name!r}; it has {available}. Choose one of them with --split.")
    return names


@retry_transient
def _source(source: str | Path | NamedFile, config: str | None, revision: str | None) -> _Source:
    if isinstance(source, NamedFile):
        return _Source(source.name, [DEFAULT_SPLIT], lambda _: [FoundFile(source.path, source.name)], [])
    text = str(source)
    if scheme := check_source(text):
        if scheme != "file":
            return _remote(text, config, revision)

        text = local_of(text)
    path = Path(text).expanduser()
    is_hub_name = not path.exists() and _may_be_hub_name(text)
    if is_hub_name and config is None and revision is None and (near := _near(path, 0.75)):
        raise SourceError(
            f"{text}: no such file or folder. Did you mean {near}? "
            "(A hub dataset with a name so like that of a file here is given with its --revision, such as main.)"
        )
    if (path.is_dir() and config is not None) or is_hub_name:
        return _hub(HubDataset(text, config, revision))
    if revision is not None or config is not None:
        raise SourceError(f"{text}: --config and --revision apply to Hugging Face datasets; this is a local source.")
    if path.is_dir():
        return _folder(path, text)
    if path.exists() and not path.is_file():
        raise SourceError(f"{text}: is a pipe or device. Read it through standard input: penstock prepare - < {text}")
    if path.exists():
        return _Source(text, [DEFAULT_SPLIT], lambda _: [FoundFile(path, text)], [])
    if WILD.search(text):
        return _glob(path, text)
    raise SourceError(f"{text}: no such file or folder.{_nearest(path)}")


def _hub(dataset: HubDataset) -> _Source:
    return _Source(dataset.name, dataset.split_names(), dataset.load, [])


def _folder(path: Path, text: str) -> _Source:
    return _contents(LocalFolder(path), text)


def _contents(opened: Folder, text: str) -> _Source:
    folder = read_folder(opened, text.rstrip("/"))
    splits = list(dict.fromkeys(file.split for file in folder.files))
    return _Source(
        text, splits, lambda name: [file for file in folder.files if file.split == name], folder.ignored, True
    )


def _remote(url: str, config: str | None, revision: str | None) -> _Source:
    """An object, a pattern or a folder in a store, on a web server or on the Hub."""

    is_hub = scheme_of(url) == "hf"
    if config is not None or (revision is not None and not is_hub):
        option = "--config" if config is not None else "--revision"
        applies = "Hugging Face datasets by name" if config is not None else "Hugging Face datasets"
        raise SourceError(f"{url}: {option} applies to {applies}. Leave it out.")
    place = Remote(url, revision)
    if (found := place.object()) is not None:
        return _Source(url, [DEFAULT_SPLIT], lambda _: [FoundFile(found, str(found))], [])
    if WILD.search(place.path) and (place.is_web or not place.url.endswith("/")):
        matches = place.matches()
        if not matches:
            raise SourceError(f"{url}: no object matches this pattern. Check the pattern, and quote it for the shell.")
        return _Source(url, [DEFAULT_SPLIT], lambda _: [FoundFile(path, str(path)) for path in matches], [], True)
    folder = place.folder()
    if folder is None:
        raise SourceError(f"{place}: no such object or folder.{place.hint()}")
    return _contents(folder, str(place))


def _glob(pattern: Path, text: str) -> _Source:
    """Files that match; as in a shell, hidden files only match a pattern that starts with a dot."""
    parts = pattern.parts
    wild = next(index for index, part in enumerate(parts) if WILD.search(part))
    matches = sorted(Path(*parts[:wild]).glob(str(Path(*parts[wild:]))))
    hidden = parts[-1].startswith(".")
    paths = [path for path in matches if path.is_file() and path.name.startswith(".") == hidden]
    if not paths:
        raise SourceError(f"{text}: no file matches this pattern. Check the pattern, and quote it for the shell.")
    return _Source(text, [DEFAULT_SPLIT], lambda _: [FoundFile(path, str(path)) for path in paths], [], True)


def _may_be_hub_name(text: str) -> bool:
    """Whether a name that doesn't exist locally may be a Hub dataset: not a path, and not a data file's name."""
    path = Path(text)
    if not HUB_NAME.fullmatch(text) or has_data_suffix(path):
        return False
    return len(path.parts) == 1 or not path.parent.exists()


def _nearest(path: Path) -> str:
    """A hint: the most similar name in the folder, or what the folder holds."""
    if not path.parent.is_dir():
        return f" The folder {path.parent} does not exist either."
    near = _near(path, 0.6)
    if near:
        return f" Did you mean {near}?"
    names = sorted(entry.name for entry in path.parent.iterdir())
    return f" The folder {path.parent} holds {', '.join(names[:5]) or 'nothing'}."


def _near(path: Path, cutoff: float) -> Path | None:
    """What stands beside a path that does not exist, under nearly its name."""
    if WILD.search(str(path)) or not path.parent.is_dir():
        return None
    names = sorted(entry.name for entry in path.parent.iterdir() if not entry.name.startswith("."))
    near = get_close_matches(path.name, names, n=1, cutoff=cutoff)
    return path.with_name(near[0]) if near else None


def _check_repeats(files: list[FoundFile], sources: list[_Source]) -> None:
    """Reject a file that is reached twice through a glob or folder. Naming a file twice is allowed."""
    if len(sources) < 2 or not any(source.is_expanded for source in sources):
        return
    seen: set[Path | str] = set()
    for file in files:
        resolved = file.path.resolve() if isinstance(file.path, Path) else str(file.path)
        if resolved in seen:
            raise SourceError(f"{file.name}: selected twice, through a pattern or a folder. Name it once.")
        seen.add(resolved)
