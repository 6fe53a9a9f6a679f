"""Recomputes a share of a dataset's rows from their sources with the reference engines, for all writers.

The sources are those that the dataset was last prepared from; they must still hold the same bytes. Costs about a second
per megabyte redone, plus reading the sources.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from penstock.build.checks.foreign_rows import differing_rows, inconsistency, random_share
from penstock.build.recipe import Recipe
from penstock.build.slices.pipeline import Pipeline
from penstock.errors import ObjectError, PenstockError, SourceError, StoreError
from penstock.sources import FileKind, Slice, SliceRows, SourceFile, fetch_each, read_rows, recorded_path
from penstock.store.cache import Cache
from penstock.store.dataset import StoredDataset
from penstock.store.manifest import read_manifest, recipe_digest
from penstock.store.shard import read_shard
from penstock.store.upkeep.verify import CacheProblem, VerifyReport, mark_bad_shard, source_name


def recheck(cache: Cache, folder: Path, share: float) -> VerifyReport:
    """Compares a random share of the rows of each shard. Shards that differ are marked as bad, as by `verify`."""
    found = VerifyReport()
    try:
        dataset = StoredDataset(cache, read_manifest(folder / "manifest.json"))
        pipeline = _pipeline(dataset)
    except (PenstockError, OSError) as error:
        found.findings.append(CacheProblem(f"its rows can't be redone: {error}", folder, dataset=folder.name))
        return found
    for source in sorted(set(dataset.manifest.shards.sources)):
        try:
            for number, rows in _rows_of(dataset, source):
                _compare(pipeline, dataset, number, rows, share, found)
        except (SourceError, ObjectError, OSError) as error:
            what = f"the rows of {source_name(dataset, source)} can't be redone: {error}"
            found.findings.append(CacheProblem(what, folder, dataset=dataset.key))
    return found


def _pipeline(dataset: StoredDataset) -> Pipeline:
    recipe = Recipe.from_json(dict(dataset.recipe))
    if recipe.digest != recipe_digest(dataset.recipe):
        raise StoreError("it was made with other versions of Penstock or its engines. Prepare it again.")
    return Pipeline(recipe, dataset.tokenizer_json, fast=False)


def _rows_of(dataset: StoredDataset, source: int) -> Iterator[tuple[int, SliceRows]]:
    """Yields the shard number and the rows of each slice of a source."""
    table, limit = dataset.manifest.shards, int(dataset.recipe["max_row_bytes"])
    columns = Recipe.from_json(dict(dataset.recipe)).mapping.read_columns
    numbers = [number for number, of in enumerate(table.sources) if of == source]
    file, parts = _recorded_source(dataset, source, numbers)
    for number, part, data in zip(numbers, parts, fetch_each(parts, file, max_row_bytes=limit), strict=True):
        yield number, read_rows(part, file.path, data=data, max_row_bytes=limit, columns=columns)


def _recorded_source(dataset: StoredDataset, source: int, numbers: list[int]) -> tuple[SourceFile, list[Slice]]:
    """Returns a source's file and slices from the dataset's notes; reading verifies the slices' digests."""
    table, notes = dataset.manifest.shards, dataset.notes
    try:
        entry: Any = notes["files"][source]
        file = SourceFile(source, recorded_path(entry["path"]), FileKind(entry["kind"]), entry["name"])
        parts = [Slice.from_json(notes["slices"][number]) for number in numbers]
    except (KeyError, IndexError, TypeError, ValueError):
        raise SourceError("its location is unknown. Run the same prepare again, which records it.") from None
    if [part.digest for part in parts] != [table.slices[number] for number in numbers]:
        raise SourceError("it was prepared again since, with other rows.")
    return file, parts


def _compare(
    pipeline: Pipeline, dataset: StoredDataset, number: int, rows: SliceRows, share: float, found: VerifyReport
) -> None:
    name, cache, table = dataset.shards[number], dataset.cache, dataset.manifest.shards
    try:
        columns, meta = read_shard(cache.shard_file(name))
    except StoreError:
        return  # `verify_cache` has reported it
    what = inconsistency(rows, columns, meta)
    if what is None:
        sample = random_share(rows, share)
        found.redone += len(sample)
        differing = differing_rows(pipeline, rows, sample, columns, meta.rejected)
        if not differing:
            return
        shown = ", ".join(str(table.first_rows[number] + row) for row in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        what = f"rows {shown}{more} are not what the references make of them"
    first = table.first_rows[number]
    found.findings.append(
        CacheProblem(
            mark_bad_shard(cache, name, f"{what} (written by {cache.writer(name)})"),
            cache.shard_path(name),
            dataset=dataset.key,
            shard=name,
            slice=number,
            source=source_name(dataset, table.sources[number]),
            rows=(first, first + table.rows[number] - 1),
        )
    )
