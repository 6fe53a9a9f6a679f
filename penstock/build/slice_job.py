"""Prepares one slice, from reading its rows to committing its shard; used by workers and by in-process builds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property

from penstock.build.progress import SliceReport
from penstock.prepare.chat.notes import rows_to_runs
from penstock.prepare.check import mismatches, sampled_rows
from penstock.prepare.encode import encoder
from penstock.prepare.encode.process_memory import resident_bytes
from penstock.prepare.pipeline import Pipeline
from penstock.prepare.recipe import Recipe
from penstock.prepare.slice_record import SliceRecord
from penstock.prepare.sources.reading import read_rows
from penstock.prepare.sources.remote import SourcePath
from penstock.prepare.sources.slices import Slice, SliceRows, TextRows
from penstock.store.cache import Cache
from penstock.store.shard import ShardMeta, encode_shard


class SliceJob:
    """Prepares the shards of one recipe."""

    def __init__(
        self, recipe: Recipe, tokenizer_json: bytes, cache: Cache, *, fast: bool = True, size: int = 0
    ) -> None:
        """`size` is that of the sources; of large ones, no text has to wait for the fast encoder."""
        self._recipe, self._tokenizer_json, self._cache = recipe, tokenizer_json, cache
        self._columns = recipe.mapping.read_columns
        self.pipeline = Pipeline(recipe, tokenizer_json, fast=fast)
        if size > encoder.SMALL_INPUT:
            self.pipeline.encoder.start_fast()

    def prepare(
        self, name: str, slice_: Slice, path: SourcePath, data: TextRows | None = None
    ) -> Callable[[], SliceReport]:
        """Reads, prepares and checks a slice. Returns a function that commits its shard, callable from any thread.

        That function only writes files: the encoder watches the memory of the process while it works.
        """
        rows = read_rows(slice_, path, data=data, max_row_bytes=self._recipe.max_row_bytes, columns=self._columns)
        record = self.pipeline.run(rows)
        sample = sampled_rows(slice_.digest, list(map(len, rows.rows)))
        if self.pipeline.fast:
            checked = sorted({*sample, *record.fresh})
            wrong = mismatches(self.pipeline, rows, checked, record)
            record = replace(
                self._redone(rows, record) if wrong else record, checked=len(checked), mismatches=len(wrong)
            )
        del rows  # frees memory for the shard
        noted = {note.value: rows_to_runs(numbers) for note, numbers in sorted(record.noted.items())}
        shard = encode_shard(record.columns, ShardMeta(record.ledger, record.rejected, {"rows": sample}, noted))
        report = SliceReport.of(name, record, resident_bytes())

        def commit() -> SliceReport:
            self._cache.commit_shard(name, shard, report.shard_record())
            return report

        return commit

    def preview(self, rows: Sequence[bytes]) -> str:
        """What to say about both modes of turns, from these rows."""
        from penstock.build.turns_preview import preview

        return preview(self._recipe, self._tokenizer_json, rows, self.pipeline.encoder)

    def _redone(self, rows: SliceRows, record: SliceRecord) -> SliceRecord:
        """Prepares a slice with the references only, after the spot check has found a difference."""
        for rendering in self.pipeline.renderings.values():
            rendering.renderer.forget_paths()  # so that each is compared again when a row takes it
        redone = self._reference.run(rows)
        redone.engines["spot check"] = Counter({"the spot check found a difference": redone.rows})
        return replace(redone, encoder=record.encoder)

    @cached_property
    def _reference(self) -> Pipeline:
        return Pipeline(self._recipe, self._tokenizer_json, fast=False)
