"""Parquet rows with `tokens` and `labels`, which torchtune's packing and collating take as they are."""

from __future__ import annotations

from penstock.export.rows import Block, ExportRows
from penstock.export.tables import Columns, ParquetFiles, TableFormat, input_ids, labels


def _columns(block: Block, rows: ExportRows) -> Columns:
    return {"tokens": input_ids(block), "labels": labels(block, rows)}


FORMAT = TableFormat(columns=_columns, container=ParquetFiles())
