"""Spot-checks the shards that other users wrote before a build or hit relies on them.

A sample of each shard's rows that its writer can't predict is redone with the references. That makes it unlikely that
much of a shard is wrong, but a few wrong rows may go unnoticed: `--trust own` reuses nothing that others wrote, and
`cache verify --recheck` redoes any share of the rows. The bytes that were checked are kept where only this user can
write (see `store.copies`), so only the first hit pays, and the writer can't change them afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property

from penstock.build.checks.foreign_rows import differing_rows, inconsistency, unpredictable_sample
from penstock.build.progress import Progress
from penstock.build.recipe import Recipe
from penstock.build.slices.pipeline import Pipeline
from penstock.errors import CorruptError, SourceError
from penstock.sources import Slice, SourceFile, SourcePath, read_rows
from penstock.store.cache import Cache
from penstock.store.manifest import shard_name
from penstock.store.shard import parse_shard


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
