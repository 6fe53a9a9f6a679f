"""Packed Parquet rows for NeMo's Megatron Bridge: `input_ids`, `loss_mask`, `seq_start_id`.

Its mask is shifted by one token from ours: entry t says whether the prediction of token t+1 counts.
"""

from __future__ import annotations

import numpy as np

from penstock.exchange.format import Supports
from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import Columns, ParquetFiles, TableFormat, input_ids, lists


def _columns(block: Block, rows: ExportRows) -> Columns:
    del rows
    starts = block.starts
    mask = np.zeros(len(block.ids), np.int8)
    mask[:-1] = block.trained[1:]
    mask[starts[1:] - 1] = 0  # the last token of a sequence predicts nothing
    row_starts = (np.cumsum(block.row_tokens) - block.row_tokens).repeat(block.counts)
    return {
        "input_ids": input_ids(block),
        "loss_mask": lists(mask, block.row_tokens, np.int8),
        "seq_start_id": lists(starts - row_starts, block.counts, np.int32),
    }


FORMAT = TableFormat(
    columns=_columns,
    container=ParquetFiles(".idx.parquet"),
    supports=Supports(packed=True),
)
