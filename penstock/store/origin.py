"""From an example back to its row: the conversation as it was given to the template.

Reads the row's slice again from the file it was prepared from, and checks that the row is still the same.
"""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import xxhash

from penstock.chat.adapt import Adapter
from penstock.chat.conversation import Conversation
from penstock.chat.engine import TemplateEngine
from penstock.chat.formats import Mapping as ColumnMapping
from penstock.chat.rows import Normaliser
from penstock.errors import SourceError
from penstock.sources import Slice, discover, read_rows
from penstock.store.dataset import StoredDataset


def conversation(dataset: StoredDataset, index: int) -> dict[str, Any]:
    """The conversation of an example, or of both sides of a pair, in the form its template was given."""
    row = source_row(dataset, index * 2 if dataset.is_preference else index)
    sides = Normaliser(ColumnMapping.from_json(dict(dataset.recipe["mapping"]))).conversations(row)
    shown = [_shown(dataset, side) for side in sides]
    return {"chosen": shown[0], "rejected": shown[1]} if dataset.is_preference else shown[0]


def source_row(dataset: StoredDataset, example: int) -> bytes:
    """The JSON bytes of the row an example was made from."""
    shard, number = dataset.find(example)
    columns = dataset.columns(shard)
    place, path = _slice(dataset, shard)
    row = read_rows(
        place, path, data=_data(place, path), max_row_bytes=dataset.recipe["max_row_bytes"]
    ).rows[int(columns.rows[number])]
    if xxhash.xxh3_64_intdigest(row) != int(columns.row_hashes[number]):
        raise SourceError(f"{path}: the row of example {example} has changed since the dataset was prepared")
    return row


def _slice(dataset: StoredDataset, shard: int) -> tuple[Slice, Path]:
    notes = dataset.notes
    try:
        place = Slice.from_json(notes["slices"][shard])
        return place, Path(notes["files"][place.file]["path"])
    except (KeyError, IndexError, TypeError) as error:
        raise SourceError(
            f"{dataset.path}: it is not known where the dataset's sources are. Run the same prepare again: it notes them."
        ) from error


def _data(place: Slice, path: Path) -> bytes | None:
    if not place.kind.is_streamed:
        return None
    for found in discover([path]).slices():
        if found.first_row <= place.first_row < found.first_row + found.rows:
            return found.data
    raise SourceError(f"{path}: the rows are not there any more")


def _shown(dataset: StoredDataset, side: Conversation) -> dict[str, Any]:
    if side.pieces is not None:
        return {"text": "".join(text for _, text in side.pieces)}
    recipe = dataset.recipe
    named = recipe["templates"]
    template = named["tool_use"] if side.tools is not None and "tool_use" in named else named["default"]
    date = recipe["date"]
    engine = TemplateEngine(
        template,
        special_tokens=recipe["special_tokens"],
        variables=recipe["template_vars"],
        date=datetime.date.fromisoformat(date or "1970-01-01"),
        fast=False,
    )
    adapted = Adapter(engine.plain).adapt(side)
    return {
        "messages": adapted.messages,
        "tools": adapted.tools,
        "variables": {**recipe["template_vars"], **(adapted.variables or {})},
    }
