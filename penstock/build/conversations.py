"""Reads the conversations behind a dataset's examples, in the form that the template was given.

Re-reads the slice of the source file that an example came from, and checks that the row has not changed since.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from functools import cache, cached_property
from typing import Any

import numpy as np
import xxhash

from penstock.errors import SourceError
from penstock.prepare.chat.adapt import Adapter
from penstock.prepare.chat.conversation import Conversation
from penstock.prepare.chat.formats import ColumnMapping
from penstock.prepare.chat.rows import RowReader
from penstock.prepare.sources.joined import JoinedPath
from penstock.prepare.sources.reading import fetch_data, read_rows
from penstock.prepare.sources.remote import SourcePath, recorded_source
from penstock.prepare.sources.slices import Slice, SliceRows, SourceFile
from penstock.prepare.template.reference import Reference
from penstock.store.dataset import Dataset

NO_DATE = "1970-01-01"  # for templates that don't print the date


class ConversationReader:
    """Looks up the source conversations of a dataset's examples."""

    def __init__(self, dataset: Dataset) -> None:
        if dataset.recipe.get("adopted"):
            raise SourceError(f"{dataset.path}: the dataset was adopted as tokens, so it has no source conversations.")
        self._dataset = dataset
        self._recipe = dataset.recipe
        self._adapter = cache(self._make_adapter)
        self._rows: tuple[int, SliceRows] | None = None
        self._path = cache(lambda file: recorded_source(dataset.origins["files"][file]))

    def conversation(self, index: int) -> dict[str, Any]:
        """The conversation of an example; for a pair, both sides."""
        pairs = self._dataset.is_preference
        sides = self._sides(*self._dataset.shards.find(index * 2 if pairs else index))
        return {"chosen": sides[0], "rejected": sides[1]} if pairs else sides[0]

    def source_row(self, index: int) -> bytes:
        """The row of an example (or pair) as it stands in its source."""
        return self._row(*self._dataset.shards.find(index * 2 if self._dataset.is_preference else index))

    def source_rows(self) -> Iterator[bytes]:
        """The rows of all examples as they stand in their sources, each once."""
        for shard in range(len(self._dataset.shards)):
            rows = self._dataset.shards.columns(shard).rows
            firsts = np.flatnonzero(np.diff(rows.astype(np.int64), prepend=-1))
            yield from (self._row(shard, number) for number in firsts.tolist())

    def conversations(self) -> Iterator[dict[str, Any]]:
        """The conversations of all examples in order; for each pair, chosen before rejected."""
        step = 2 if self._dataset.is_preference else 1
        for shard, count in enumerate(self._dataset.shards.examples.tolist()):
            for number in range(0, count, step):
                yield from self._sides(shard, number)

    def _sides(self, shard: int, number: int) -> list[dict[str, Any]]:
        return [self._shown(side) for side in self._reader.conversations(self._row(shard, number))]

    def _row(self, shard: int, number: int) -> bytes:
        """The row of an example, which must be the same still."""
        columns = self._dataset.shards.columns(shard)
        row = self._slice_rows(shard).rows[int(columns.rows[number])]
        if xxhash.xxh3_64_intdigest(row) != int(columns.row_hashes[number]):
            table = self._dataset.manifest.shards
            row_number = table.first_rows[shard] + int(columns.rows[number])
            name: object = self._noted(shard)[1]
            if isinstance(name, JoinedPath):
                name, row_number = self._dataset.file_row(table.sources[shard], row_number)
            raise SourceError(f"{name}: row {row_number} has changed since the dataset was prepared. Prepare again.")
        return row

    @cached_property
    def _reader(self) -> RowReader:
        return RowReader(self._mapping)

    @cached_property
    def _mapping(self) -> ColumnMapping:
        return ColumnMapping.from_json(dict(self._recipe["mapping"]))

    # -- source rows ----------------------------------------------------------------------------------------------

    def _slice_rows(self, shard: int) -> SliceRows:
        if self._rows is None or self._rows[0] != shard:
            place, path = self._noted(shard)
            limit = self._recipe["max_row_bytes"]
            data = fetch_data(place, SourceFile(place.file, path, place.kind, path.name), max_row_bytes=limit)
            rows = read_rows(place, path, data=data, max_row_bytes=limit, columns=self._mapping.read_columns)
            self._rows = (shard, rows)
        return self._rows[1]

    def _noted(self, shard: int) -> tuple[Slice, SourcePath]:
        """The slice of a shard and the file it lies in, from the dataset's notes."""
        try:
            place = Slice.from_json(self._dataset.origins["slices"][shard])
            return place, self._path(place.file)
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise SourceError(
                f"{self._dataset.path}: the paths of the dataset's sources are not recorded. "
                "Run the same prepare command again to record them."
            ) from error

    # -- template input -------------------------------------------------------------------------------------------

    def _shown(self, side: Conversation) -> dict[str, Any]:
        if side.texts is not None:
            return {"text": "".join(text for _, text in side.texts)}
        tool_use = side.tools is not None and "tool_use" in self._recipe["templates"]
        adapted = self._adapter("tool_use" if tool_use else "default").adapt(side)
        variables = {**self._recipe["template_vars"], **(adapted.variables or {})}
        return {"messages": adapted.messages, "tools": adapted.tools, "variables": variables}

    def _make_adapter(self, template: str) -> Adapter:
        reference = Reference(
            self._recipe["templates"][template],
            special_tokens=self._recipe["special_tokens"],
            variables=self._recipe["template_vars"],
            date=datetime.date.fromisoformat(self._recipe["date"] or NO_DATE),
        )
        return Adapter(reference.plain)
