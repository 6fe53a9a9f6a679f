"""Parquet rows with `input_ids` and a 0/1 `loss_mask` of the same length, for verl's SFT trainer."""

from __future__ import annotations

from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import Columns, ParquetFiles, TableFormat, input_ids, loss_mask


def _columns(block: Block, rows: ExportRows) -> Columns:
    return {"input_ids": input_ids(block), "loss_mask": loss_mask(block, rows)}


FORMAT = TableFormat(columns=_columns, container=ParquetFiles())
