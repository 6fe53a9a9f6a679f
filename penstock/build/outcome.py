"""Finishes a build or hit: refuses or quarantines bad rows, writes the dataset's notes, and gives the outcome."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from penstock.build.options import OnBadRow, OnDropped
from penstock.digests import canonical
from penstock.errors import RowError, SourceError, StoreError
from penstock.prepare.chat.formats import Format
from penstock.prepare.chat.notes import LOSSES, Note, reason_and_remedy
from penstock.prepare.modes import TurnsMode
from penstock.prepare.sources.joined import JoinedPath
from penstock.prepare.sources.reading import fetch_data, read_rows
from penstock.prepare.sources.remote import SourcePath, text_of_path
from penstock.prepare.sources.slices import Slice, SourceFile
from penstock.prepare.sources.source_set import SourceSet
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.files import is_readable_file, make_folder, read_regular
from penstock.store.local import LocalStorage
from penstock.store.manifest import Manifest

if TYPE_CHECKING:
    from penstock.build.auto_check import AutoCheck
    from penstock.build.find import Search
    from penstock.build.progress import Progress
    from penstock.build.workers.runner import SliceRunner

COMPARED_ROWS = 100  # of which both modes of turns are compared


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of `prepare`."""

    dataset: Dataset
    hit: bool
    progress: Progress
    warnings: tuple[str, ...]
    format: str
    quarantine: Path | None
    tokenizer: str = ""  # the result of the comparison with AutoTokenizer; '' for a hit


def finish(
    search: Search, manifest: Manifest, auto: AutoCheck | None, *, hit: bool, runner: SliceRunner | None = None
) -> Outcome:
    """Writes the notes and the quarantine file of a found or committed dataset, and opens it."""
    cache = search.cache
    if not is_readable_file(cache.tokenizer_path(search.recipe.tokenizer)):
        with contextlib.suppress(StoreError):  # only needed to show tokens; other users' caches may be read-only
            cache.store_tokenizer(search.model.tokenizer_json)
    note_sources(cache, manifest.key, search.sources, search.slices, search.model.name)
    quarantine = None
    if manifest.ledger["rejected"]:
        quarantine = write_quarantine(search, manifest, search.options.quarantine_file)
        if not manifest.ledger["kept"]:
            raise _nothing_kept(search, manifest, quarantine)
    if auto is not None and auto.warning:
        search.notice(auto.warning)
    if not hit and runner is not None:
        _compare_turns(search, manifest, runner)
    if manifest.lacks_regions:
        search.notice("no row has known regions, so only train_on='all_tokens' works; use another --template")
    warnings = (*search.notices, *manifest.ledger["warnings"])
    dataset = Dataset(cache, manifest)
    dataset.shards.mark_used(now=True)  # makes it the `latest` dataset
    if search.unchecked:
        cache.remember_checked(manifest.key)
    compared = "" if auto is None else auto.summary
    return Outcome(dataset, hit, search.progress, warnings, search.mapping.describe(), quarantine, compared)


def _compare_turns(search: Search, manifest: Manifest, runner: SliceRunner) -> None:
    """Warns, from a sample of rows, how much reasoning the template drops."""
    recipe, dropped = search.recipe, manifest.ledger["notes"].get(Note.REASONING_DROPPED.value)
    if not dropped or recipe.turns is TurnsMode.FAITHFUL or recipe.mapping.format is Format.PREFERENCE:
        return
    limit, columns = search.options.max_row_bytes, recipe.mapping.read_columns
    rows = search.sources.peek(COMPARED_ROWS, max_row_bytes=limit, columns=columns)
    if told := runner.preview(rows):
        search.notice(told)


def note_sources(cache: Cache, key: str, sources: SourceSet, slices: Sequence[Slice], tokenizer: str) -> None:
    """Records beside the dataset which files it was last prepared from, so that examples can be traced to rows."""
    notes = canonical(
        {
            "files": [_noted(file) for file in sources.files],
            "slices": [s.to_json() for s in slices],
            "tokenizer": tokenizer,
        }
    )
    path = cache.dataset_path(key) / "notes.json"
    with contextlib.suppress(OSError):
        if cache.read_file(path) == notes:
            return
    with contextlib.suppress(StoreError):  # optional: other users' caches may be read-only
        cache.write_file(path, notes, "notes", durable=False)


def _noted(file: SourceFile) -> dict[str, Any]:
    """What is recorded of a file. Of a run of files, also where each row is."""
    noted: dict[str, Any] = {"path": _recorded(file.path), "name": file.name, "kind": file.kind.value}
    if isinstance(file.path, JoinedPath):
        paths = [*map(_recorded, file.path.members)]
        noted["members"] = {"paths": paths, "names": file.path.names, "rows": file.path.rows}
    return noted


def _recorded(path: SourcePath) -> str:
    return text_of_path(path.absolute()) if isinstance(path, Path) else str(path)


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    """Returns the outcome as a JSON object."""
    dataset, progress = outcome.dataset, outcome.progress
    counts = {f.name: getattr(progress, f.name) for f in fields(progress) if f.name not in ("started", "waiting")}
    build = {**counts, "engines": {stage: dict(why) for stage, why in progress.engines.items()}}
    return {
        "key": dataset.key,
        "path": dataset.address,
        "hit": outcome.hit,
        "examples": len(dataset),
        "tokens": dataset.tokens,
        "format": outcome.format,
        "ledger": dict(dataset.manifest.ledger),
        "proof": dict(dataset.manifest.proof),
        "warnings": list(outcome.warnings),
        "tokenizer": outcome.tokenizer,
        "quarantine": str(outcome.quarantine) if outcome.quarantine else None,
        "seconds": round(progress.seconds, 3),
        "build": build,
    }


# -- rejected rows ------------------------------------------------------------------------------------------------


def refuse_bad_rows(search: Search, manifest: Manifest) -> None:
    """Raises RowError for the first row of a dataset that `on_bad_row` or `on_dropped` refuses."""
    rejected, losses = bool(manifest.ledger["rejected"]), any(note in LOSSES for note in manifest.ledger["notes"])
    if rejected or losses:
        shards = list(zip(manifest.shards.names, search.slices, strict=True))
        for kind in ({"rejected": rejected}, {"losses": losses}):
            for name, part in shards:
                refuse_shard(search, name, part, **kind)


def refuse_shard(search: Search, name: str, part: Slice, *, rejected: object = False, losses: object = False) -> None:
    """Raises RowError if the options refuse a shard with rejected rows, or with parts that the model doesn't see."""
    if rejected and search.options.on_bad_row is OnBadRow.ERROR:
        error = _first_rejected(search, name, part)
        if error is not None:
            raise error
    if losses and search.options.on_dropped is OnDropped.ERROR:
        noted = {note: runs[0] for note, runs in search.cache.structure(name)[1].noted.items() if note in LOSSES}
        if noted:
            row, note = min((row, note) for note, row in noted.items())
            (where,) = row_locations(search.sources.files[part.file], part, [row])
            raise RowError(note, *reason_and_remedy(Note(note), search.recipe.as_json()), where)


def _first_rejected(search: Search, name: str, part: Slice) -> RowError | None:
    """Returns the error of the first rejected row of a shard."""
    for entry in search.cache.structure(name)[1].rejected:
        (where,) = row_locations(search.sources.files[part.file], part, [entry["row"]])
        return RowError(entry["kind"], entry["reason"], entry["remedy"], where)
    return None


def _nothing_kept(search: Search, manifest: Manifest, quarantine: Path) -> SourceError:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in manifest.ledger["rejected"].items())
    errors = (_first_rejected(search, *of) for of in zip(manifest.shards.names, search.slices, strict=True))
    return SourceError(
        f"no row is left: on_bad_row=quarantine set all {manifest.ledger['rows']:,} of them aside ({kinds}). "
        f"The first: {next(filter(None, errors))}. All are in {quarantine}."
    )


def row_locations(file: SourceFile, part: Slice, rows: list[int]) -> list[str]:
    """Returns `file:line` for rows of a slice. Counts lines in the file, since a shard only knows row numbers."""
    if not rows:
        return []
    if isinstance(file.path, JoinedPath):
        return file.path.locations([part.first_row + row for row in rows])
    if part.first_line is None:  # rows are counted instead of lines
        return [f"{file.name}:{part.first_row + row + 1}" for row in rows]
    data = fetch_data(part, file) if part.data is None else part.data
    lines = read_rows(part, file.path, data=data).lines
    return [f"{file.name}:{lines[row]}" for row in rows]


def write_quarantine(search: Search, manifest: Manifest, target: Path | None) -> Path:
    """Writes the rejected rows as JSON lines: location, reason, and the row itself."""
    cache = search.cache
    path = (target or cache.dataset_path(manifest.key) / "quarantine.jsonl").absolute()
    lines: list[bytes] = []
    for name, part in zip(manifest.shards.names, search.slices, strict=True):
        rejected = cache.structure(name)[1].rejected
        locations = row_locations(search.sources.files[part.file], part, [entry["row"] for entry in rejected])
        for where, entry in zip(locations, rejected, strict=True):
            lines.append(orjson.dumps({"where": where, **entry, "row": part.first_row + entry["row"]}))
    data = b"\n".join(lines) + b"\n"
    with contextlib.suppress(OSError):
        if read_regular(path) == data:
            return path
    try:
        if target is None:
            cache.write_file(path, data, "quarantine")
        else:
            make_folder(path.parent)
            LocalStorage(path.parent).write(path.name, data, "quarantine", in_root=True)
    except StoreError:
        if target is not None or not path.exists():
            raise
    return path
