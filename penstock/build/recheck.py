"""Recomputes a share of a dataset's rows from their sources with the reference engines, for all writers.

The sources are those that the dataset was last prepared from; they must still hold the same bytes. Costs about a second
per megabyte redone, plus reading the sources.
"""

from __future__ import annotations

import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from penstock.build.progress import Progress
from penstock.errors import CorruptError, ObjectError, PenstockError, SourceError, StoreError
from penstock.prepare.chat.notes import Note
from penstock.prepare.check import differing_rows
from penstock.prepare.encode.columns import Columns
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.kinds import FileKind
from penstock.prepare.sources.reading import fetch_each, read_rows
from penstock.prepare.sources.remote import SourcePath, recorded_source
from penstock.prepare.sources.slices import Slice, SliceRows, SourceFile
from penstock.store.cache import Cache
from penstock.store.dataset import Dataset
from penstock.store.manifest import read_manifest, recipe_digest, shard_name
from penstock.store.shard import ShardMeta, parse_shard, read_shard
from penstock.store.verify import CacheProblem, VerifyReport, mark_bad_shard

# ---- foreign rows ----------------------------------------------------------------------------------------------------
#
# Compares rows of a shard that another user wrote with the result of the reference engines.
#
# Nothing in the shard is trusted: first its structure and counts are checked against all rows of the slice, then the
# sampled rows are prepared again and compared.


SHARE = 0.005  # of a shard's bytes
LEAST_ROWS, MOST_BYTES = 8, 1 << 16  # at least this many rows, unless they are large


def unpredictable_sample(rows: SliceRows) -> list[int]:
    """Returns the row numbers of an unpredictable sample: about 0.5% of the bytes, and at least 8 rows if small."""
    order = list(range(len(rows.rows)))
    secrets.SystemRandom().shuffle(order)
    budget = min(SHARE * sum(map(len, rows.rows)), MOST_BYTES)
    chosen: list[int] = []
    spent = 0
    for row in order:
        if spent >= MOST_BYTES or (spent >= budget and len(chosen) >= LEAST_ROWS):
            break
        chosen.append(row)
        spent += len(rows.rows[row])
    return sorted(chosen)


def random_share(rows: SliceRows, share: float) -> list[int]:
    """Returns the row numbers of a random share of the rows, at least one."""
    total = len(rows.rows)
    return sorted(secrets.SystemRandom().sample(range(total), max(1, round(share * total)))) if total else []


def inconsistency(rows: SliceRows, columns: Columns, meta: ShardMeta) -> str | None:
    """Returns what is wrong with a shard that doesn't belong to these rows or doesn't add up. Runs no engine."""
    try:
        rejected = [entry["row"] for entry in meta.rejected]
        ledger = (meta.ledger["rows"], meta.ledger["kept"], meta.ledger["examples"], meta.ledger["tokens"])
        notes = {note: _counted(runs, len(rows.rows)) for note, runs in meta.noted.items()}
        noted = notes == {note: count for note, count in meta.ledger["notes"].items() if note != Note.ARROW_NULLS}
        kinds = meta.ledger["rejected"] == Counter(entry["kind"] for entry in meta.rejected)
    except (KeyError, TypeError, IndexError) as error:
        return f"it is not a whole shard ({error})"
    kept = np.unique(columns.rows)
    if sorted([*kept.tolist(), *rejected]) != list(range(len(rows.rows))):
        return "it does not hold the slice's rows, each once"
    hashes = np.fromiter(map(xxhash.xxh3_64_intdigest, rows.rows), np.uint64, len(rows.rows))
    if not np.array_equal(hashes[columns.rows], columns.row_hashes):
        return "its hashes are not those of the slice's rows"
    if not kinds or not noted or ledger != (len(rows.rows), len(kept), columns.examples, columns.tokens):
        return "its ledger does not add up"
    return None


def _counted(runs: list[int], rows: int) -> int:
    """Counts the rows in runs; -1 if the runs are not valid for a slice with this many rows."""
    in_order = all(a < b for a, b in pairwise(runs)) and len(runs) % 2 == 0
    return sum(runs[1::2]) - sum(runs[::2]) if in_order and runs[0] >= 0 and runs[-1] <= rows else -1


# ---- recheck ---------------------------------------------------------------------------------------------------------


def recheck(cache: Cache, folder: Path, share: float) -> VerifyReport:
    """Compares a random share of the rows of each shard. Shards that differ are marked as bad, as by `verify`."""
    found = VerifyReport()
    try:
        dataset = Dataset(cache, read_manifest(folder / "manifest.json"))
        pipeline = _pipeline(dataset)
    except (PenstockError, OSError) as error:
        found.findings.append(CacheProblem(f"its rows can't be redone: {error}", folder, dataset=folder.name))
        return found
    for source in sorted(set(dataset.manifest.shards.sources)):
        try:
            for number, rows in _rows_of(dataset, source):
                _compare(pipeline, dataset, number, rows, share, found)
        except (SourceError, ObjectError, OSError) as error:
            what = f"the rows of {dataset.source_name(source)} can't be redone: {error}"
            found.findings.append(CacheProblem(what, folder, dataset=dataset.key))
    return found


def _pipeline(dataset: Dataset) -> Pipeline:
    recipe = Recipe.from_json(dict(dataset.recipe))
    if recipe.digest != recipe_digest(dataset.recipe):
        raise StoreError("it was made with other versions of Penstock or its engines. Prepare it again.")
    return Pipeline(recipe, dataset.tokenizer_json, fast=False)


def _rows_of(dataset: Dataset, source: int) -> Iterator[tuple[int, SliceRows]]:
    """Yields the shard number and the rows of each slice of a source."""
    table, limit = dataset.manifest.shards, int(dataset.recipe["max_row_bytes"])
    columns = Recipe.from_json(dict(dataset.recipe)).mapping.read_columns
    numbers = [number for number, of in enumerate(table.sources) if of == source]
    file, parts = _recorded_source(dataset, source, numbers)
    for number, part, data in zip(numbers, parts, fetch_each(parts, file, max_row_bytes=limit), strict=True):
        yield number, read_rows(part, file.path, data=data, max_row_bytes=limit, columns=columns)


def _recorded_source(dataset: Dataset, source: int, numbers: list[int]) -> tuple[SourceFile, list[Slice]]:
    """Returns a source's file and slices from the dataset's notes; reading verifies the slices' digests."""
    table, notes = dataset.manifest.shards, dataset.origins
    try:
        entry: Any = notes["files"][source]
        file = SourceFile(source, recorded_source(entry), FileKind(entry["kind"]), entry["name"])
        parts = [Slice.from_json(notes["slices"][number]) for number in numbers]
    except (KeyError, IndexError, TypeError, ValueError):
        raise SourceError("its location is unknown. Run the same prepare again, which records it.") from None
    if [part.digest for part in parts] != [table.slices[number] for number in numbers]:
        raise SourceError("it was prepared again since, with other rows.")
    return file, parts


def _compare(
    pipeline: Pipeline, dataset: Dataset, number: int, rows: SliceRows, share: float, found: VerifyReport
) -> None:
    name, cache, table = dataset.shards.names[number], dataset.cache, dataset.manifest.shards
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
            source=dataset.source_name(table.sources[number]),
            rows=(first, first + table.rows[number] - 1),
        )
    )


# ---- foreign shards --------------------------------------------------------------------------------------------------
#
# Spot-checks the shards that other users wrote before a build or hit relies on them.
#
# A sample of each shard's rows that its writer can't predict is redone with the references. That makes it unlikely that
# much of a shard is wrong, but a few wrong rows may go unnoticed: `--trust own` reuses nothing that others wrote, and
# `cache verify --recheck` redoes any share of the rows. The bytes that were checked are kept where only this user can
# write (see `store.trust`), so only the first hit pays, and the writer can't change them afterwards.


class ForeignCheck:
    """Compares other users' shards of one recipe with the rows of their slices."""

    def __init__(
        self, cache: Cache, recipe: Recipe, tokenizer_json: bytes, files: Sequence[SourceFile], progress: Progress
    ) -> None:
        self._cache, self._recipe, self._tokenizer_json = cache, recipe, tokenizer_json
        self._files, self._progress = files, progress

    @cached_property
    def _pipeline(self) -> Pipeline:
        return Pipeline(self._recipe, self._tokenizer_json, fast=False)

    def refused(self, slices: Iterable[Slice], names: set[str], notice: Callable[[str], None]) -> dict[str, str]:
        """Returns the named shards that must not be used, with reasons; emits a notice with the writer of each."""
        left, bad = set(names), {}
        for part in slices:
            name = shard_name(self._recipe.digest, part.digest)
            if name not in left:
                continue
            left.discard(name)
            file = self._files[part.file]
            why = self._fault(name, part, file.path)
            if why is not None:
                where = f"{file.name}, rows {part.first_row} to {part.first_row + part.rows - 1}"
                notice(
                    f"{self._cache.shard_address(name)} ({where}), written by {self._cache.writer(name)}: {why}. "
                    "The shard is not used; its slice is rebuilt."
                )
                bad[name] = why
        self._progress.others_refused += len(bad)
        if left:
            raise SourceError("the sources changed while they were read. Run again once nothing writes to them.")
        return bad

    def _fault(self, name: str, part: Slice, path: SourcePath) -> str | None:
        limit, columns = self._recipe.max_row_bytes, self._recipe.mapping.read_columns
        rows = read_rows(part, path, data=part.data, max_row_bytes=limit, columns=columns)
        try:
            data = self._cache.unchecked_shard(name)
            stored, meta = parse_shard(data, self._cache.shard_path(name))
        except (CorruptError, OSError):
            return "it can't be read as a shard"
        wrong = inconsistency(rows, stored, meta)
        if wrong is not None:
            return wrong
        sample = unpredictable_sample(rows)
        self._progress.others_checked += 1
        self._progress.others_rows += len(sample)
        differing = differing_rows(self._pipeline, rows, sample, stored, meta.rejected)
        if not differing:
            self._cache.keep_checked(name, data)
            return None
        return f"{len(differing)} of {len(sample)} rows compared are not what the references make of them"
