"""Parquet rows with `tokens` and `labels`, which torchtune's packing and collators use directly."""

from __future__ import annotations

from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import Columns, ParquetFiles, TableFormat, input_ids, labels


def _columns(block: Block, rows: ExportRows) -> Columns:
    return {"tokens": input_ids(block), "labels": labels(block, rows)}


FORMAT = TableFormat(columns=_columns, container=ParquetFiles())
