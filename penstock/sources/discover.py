"""Resolves the sources that the user names (files, globs, folders, URLs, Hub datasets) to a `SourceSet`, in order.

Costs one small read per file. Files given by name belong to the split `train`; folders and Hub datasets may have named
splits, of which `train` (or the only one) is read by default.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import NamedTuple

from penstock.addresses import check_source, scheme_of
from penstock.errors import SourceError
from penstock.sources.folders import DEFAULT_SPLIT, Folder, FoundFile, LocalFolder, read_folder
from penstock.sources.hub import HubDataset
from penstock.sources.kinds import FileKind, detect_kind, has_data_suffix
from penstock.sources.remote.path import SourcePath, printable_name
from penstock.sources.slices import SourceFile
from penstock.sources.source_set import SourceSet
from penstock.sources.splits import Split, parse_split
from penstock.transient import retry_transient

HUB_NAME = re.compile(r"([\w-][\w.-]*/)?[\w-][\w.-]*")
WILD = re.compile(r"[*?\[]")
Recall = Callable[[SourcePath], FileKind | None]


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
    recall: Recall = lambda _: None,
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
    listed = [
        SourceFile(ordinal, file.path, recall(file.path) or detect_kind(file.path, file.name), file.name, file.split)
        for ordinal, file in enumerate(named)
    ]
    return SourceSet(tuple(listed), parsed, tuple(map(printable_name, ignored)), limit)


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
        from penstock.sources.remote.finding import local_of

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
    from penstock.sources.remote.finding import Remote

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
