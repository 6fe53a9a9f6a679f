"""Finishes a build or hit: writes the dataset's notes and the quarantine file, and the outcome as JSON."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson

from penstock.digests import canonical
from penstock.errors import CorruptError, StoreError
from penstock.prepare.sources.reading import fetch_data, read_rows
from penstock.prepare.sources.remote import SourcePath, text_of_path
from penstock.prepare.sources.slices import Slice, SourceFile
from penstock.prepare.sources.source_set import SourceSet
from penstock.store.cache import Cache
from penstock.store.files import is_readable_file, make_folder, read_regular
from penstock.store.local import LocalStorage
from penstock.store.manifest import Manifest, read_manifest

if TYPE_CHECKING:
    from penstock.build.run import Outcome

log = logging.getLogger("penstock")


def usable_manifest(cache: Cache, key: str) -> Manifest | None:
    """Returns a dataset's manifest, or None if it is missing, damaged or unreadable and must be rebuilt."""
    path = cache.find_dataset(key)
    if not is_readable_file(path):
        return None
    try:
        manifest = read_manifest(path)
    except CorruptError as error:
        log.warning("%s; rebuilding it", error)
        return None
    return manifest if manifest.key == key else None


def note_sources(cache: Cache, key: str, sources: SourceSet, slices: Sequence[Slice], tokenizer: str) -> None:
    """Records beside the dataset which files it was last prepared from, so that examples can be traced to rows."""
    notes = canonical(
        {
            "files": [{"path": _recorded(f.path), "name": f.name, "kind": f.kind.value} for f in sources.files],
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


def _recorded(path: SourcePath) -> str:
    return text_of_path(path.absolute()) if isinstance(path, Path) else str(path)


def row_locations(file: SourceFile, part: Slice, rows: list[int]) -> list[str]:
    """Returns `file:line` for rows of a slice. Counts lines in the file, since a shard only knows row numbers."""
    if not rows:
        return []
    if part.first_line is None:  # rows are counted instead of lines
        return [f"{file.name}:{part.first_row + row + 1}" for row in rows]
    data = fetch_data(part, file) if part.data is None else part.data
    lines = read_rows(part, file.path, data=data).lines
    return [f"{file.name}:{lines[row]}" for row in rows]


def write_quarantine(
    cache: Cache, manifest: Manifest, sources: SourceSet, slices: Sequence[Slice], target: Path | None
) -> Path:
    """Writes the rejected rows as JSON lines: location, reason, and the row itself."""
    path = (target or cache.dataset_path(manifest.key) / "quarantine.jsonl").absolute()
    lines: list[bytes] = []
    for name, part in zip(manifest.shards.names, slices, strict=True):
        rejected = cache.structure(name)[1].rejected
        locations = row_locations(sources.files[part.file], part, [entry["row"] for entry in rejected])
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
