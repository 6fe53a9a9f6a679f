"""Rows that Axolotl recognises as tokenized: exactly `input_ids`, `attention_mask` and `labels`."""

from __future__ import annotations

from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import ArrowFolder, Columns, TableFormat, attention_mask, input_ids, labels


def _columns(block: Block, rows: ExportRows) -> Columns:
    return {
        "input_ids": input_ids(block),
        "attention_mask": attention_mask(block),
        "labels": labels(block, rows),
    }


FORMAT = TableFormat(columns=_columns, container=ArrowFolder())
