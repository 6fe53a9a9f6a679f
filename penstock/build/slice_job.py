"""Prepares one slice, from reading its rows to committing its shard; used by workers and by in-process builds."""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from penstock.build.progress import SliceReport
from penstock.prepare.chat.conversation import Part
from penstock.prepare.chat.notes import Note, rows_to_runs
from penstock.prepare.check import chain_mismatches, mismatches, sampled_rows
from penstock.prepare.encode.process_memory import resident_bytes
from penstock.prepare.modes import TurnsMode
from penstock.prepare.pipeline import Pipeline, SliceResult
from penstock.prepare.recipe import Recipe
from penstock.prepare.sources.reading import read_rows
from penstock.prepare.sources.remote import SourcePath
from penstock.prepare.sources.slices import Slice, SliceRows, TextRows
from penstock.store.cache import Cache
from penstock.store.manifest import shard_name
from penstock.store.shard import ShardMeta, encode_shard


class SliceJob:
    """Prepares the shards of one recipe."""

    def __init__(self, recipe: Recipe, tokenizer_json: bytes, cache: Cache, *, fast: bool = True) -> None:
        self._recipe = recipe
        self._tokenizer_json = tokenizer_json
        self._cache = cache
        self._digest = recipe.digest
        self.pipeline = Pipeline(recipe, tokenizer_json, fast=fast)
        self._reference: Callable[[], Pipeline] = lru_cache(1)(lambda: Pipeline(recipe, tokenizer_json, fast=False))

    def prepare(self, slice_: Slice, path: SourcePath, data: TextRows | None = None) -> Callable[[], SliceReport]:
        """Reads, prepares and checks a slice. Returns a function that commits the shard, callable from any thread.

        That function only writes files: the encoder watches the memory of the process while it works.
        """
        limit, columns = self._recipe.max_row_bytes, self._recipe.mapping.read_columns
        rows = read_rows(slice_, path, data=data, max_row_bytes=limit, columns=columns)
        sizes = [len(row) for row in rows.rows]
        sample = sampled_rows(slice_.digest, sizes)
        result = self.pipeline.run(rows)
        wrong: list[int] = []
        checked = sorted({*sample, *result.fresh}) if self.pipeline.fast else []
        if checked:
            wrong = self._mismatches(rows.rows, checked, result)
        if wrong:
            for rendering in self.pipeline.renderings.values():
                rendering.renderer.forget_paths()  # so that each is compared again when a row takes it
            result = self._reference().run(rows)
            result.engines["spot check"] = Counter({"the spot check found a difference": result.rows})
        rejected = rejected_entries(result, rows)
        del rows  # frees memory for the shard
        return self._encoded(slice_, result, rejected, sample, (len(checked), len(wrong)), sum(sizes))

    def _mismatches(self, rows: Sequence[bytes], checked: Sequence[int], result: SliceResult) -> list[int]:
        if self._recipe.turns is TurnsMode.FAITHFUL:
            return chain_mismatches(self.pipeline, self._reference(), rows, checked, result)
        return mismatches(self.pipeline, rows, checked, result)

    def _encoded(
        self,
        slice_: Slice,
        result: SliceResult,
        rejected: list[dict[str, Any]],
        sample: list[int],
        check: tuple[int, int],  # rows compared with the references, and those that differed
        size: int,
    ) -> Callable[[], SliceReport]:
        columns = result.columns
        kept = int(np.count_nonzero(np.diff(columns.rows, prepend=np.uint32(0xFFFFFFFF)))) if columns.examples else 0
        first_segment = columns.segment_offsets[:-1][np.diff(columns.segment_offsets) == 1]
        unknown = int(np.count_nonzero(columns.segment_parts[first_segment] == Part.GLUE))
        ledger: dict[str, Any] = {
            "rows": result.rows,
            "kept": kept,
            "rejected": dict(Counter(entry["kind"] for entry in result.rejected)),
            "examples": columns.examples,
            "tokens": columns.tokens,
            "regions_unknown": unknown,
            "notes": _counts(result),
            "warnings": self.pipeline.warnings,
        }
        noted = {note.value: rows_to_runs(rows) for note, rows in sorted(result.noted.items())}
        data = encode_shard(columns, ShardMeta(ledger, rejected, {"rows": sample}, noted))
        name = shard_name(self._digest, slice_.digest)
        engines = {stage: dict(why) for stage, why in result.engines.items() if why}
        taken = self.pipeline.paths[0]
        paths = taken, 0 if check[1] else taken  # every new path is compared, unless the slice was redone
        losses = sorted(note.value for note in result.noted if note.is_loss)
        note = {
            "rejected": len(rejected),
            "losses": losses,
            "engines": engines,
            "encoder": self.pipeline.encoder.engine,
            "checked": check[0],
            "mismatches": check[1],
            "paths": paths,
        }
        report = SliceReport(
            name=name,
            rows=result.rows,
            examples=columns.examples,
            tokens=ledger["tokens"],
            bytes=size,
            rejected=len(rejected),
            losses=losses,
            engines=engines,
            encoder=(self.pipeline.encoder.engine, self.pipeline.encoder.not_served),
            checked=check[0],
            mismatches=check[1],
            paths=paths,
            memory=resident_bytes(),
        )

        def commit() -> SliceReport:
            self._cache.commit_shard(name, data, note)
            return report

        return commit


def _counts(result: SliceResult) -> dict[str, int]:
    """Counts the rows with each note; for nulls that Arrow added, the fields."""
    counts = {note.value: len(rows) for note, rows in result.noted.items()}
    if result.nulls_dropped:
        counts[Note.ARROW_NULLS.value] = result.nulls_dropped
    return dict(sorted(counts.items()))


def rejected_entries(result: SliceResult, rows: SliceRows) -> list[dict[str, Any]]:
    """Returns the rejected rows as a shard stores them, including their data."""
    return [{**entry, "data": _shown(rows.rows[entry["row"]])} for entry in result.rejected]


def _shown(row: bytes) -> str | dict[str, str]:
    """Returns a rejected row as a JSON value: as text, or as base64 if it isn't UTF-8."""
    try:
        return row.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(row).decode()}
