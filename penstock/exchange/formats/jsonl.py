"""Human-readable JSON lines: text, tokens and loss mask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import orjson

from penstock.exchange.folder import ExportFolder
from penstock.exchange.format import ExportPart, Supports
from penstock.exchange.rows import Block, ExportRows, text_of
from penstock.exchange.tables import plain_columns


class Jsonl:
    """One line per row, with the columns of `hf` and the text of each list of ids."""

    supports = Supports(pairs=True, packed=True, weights=True)
    part_tokens = 1 << 24

    def check(self, rows: ExportRows) -> None:
        """Does nothing: all rows are supported."""

    def write(
        self, part: ExportPart, blocks: Iterator[Block], rows: ExportRows, folder: ExportFolder
    ) -> dict[str, int]:
        """Writes the part as one file."""
        name = f"data/train-{part.number:05}-of-{part.of:05}.jsonl"
        with folder.new(name) as file:
            for block in blocks:
                for line in _lines(block, rows):
                    file.write(orjson.dumps(line, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
            size = file.tell()
        return {name: size}

    def finish(self, parts: list[ExportPart], rows: ExportRows, folder: ExportFolder) -> dict[str, Any]:
        """Writes nothing: the lines describe themselves."""
        del parts, folder
        return {"rows": len(rows)}


def _lines(block: Block, rows: ExportRows) -> Iterator[dict[str, Any]]:
    columns = plain_columns(block, rows)
    if "labels" in columns:
        values = columns.pop("labels").values.to_numpy()
        columns["loss_mask"] = (values != -100).astype(np.int8), columns["input_ids"].offsets.to_numpy()
    split = {name: column if isinstance(column, tuple) else _flat(column) for name, column in columns.items()}
    for row in range(len(block.counts)):
        line = {name: values[bounds[row] : bounds[row + 1]] for name, (values, bounds) in split.items()}
        texts = {_text_name(name): text_of(rows, ids) for name, ids in line.items() if name.endswith("_ids")}
        yield {**texts, **line}


def _flat(column: Any) -> tuple[Any, Any]:
    return column.values.to_numpy(), column.offsets.to_numpy()


def _text_name(name: str) -> str:
    return "text" if name == "input_ids" else name.removesuffix("_ids")


FORMAT = Jsonl()
