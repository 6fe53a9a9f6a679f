"""Parquet rows for SkyRL's `pretokenized_dataset_paths`: `input_ids` and a 0/1 `loss_mask` of the same length.

SkyRL trains the window that begins at the first 1 of the mask. The first token of a row is never in it, because
nothing predicts it.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import UsageError
from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import Columns, ParquetFiles, TableFormat, input_ids, lists


def check_predicted(rows: ExportRows) -> None:
    """Raises an error for rows of a single token."""
    short = int((rows.served.lengths < 2).sum())
    if short:
        raise UsageError(
            f"{short} rows have a single token, which nothing predicts, and SkyRL requires at least one prediction "
            "per row. Raise --max-length, or export to another format."
        )


def _columns(block: Block, rows: ExportRows) -> Columns:
    del rows
    mask = block.trained.copy()
    mask[block.starts] = False
    return {"input_ids": input_ids(block), "loss_mask": lists(mask.view(np.int8), block.row_tokens, np.int8)}


FORMAT = TableFormat(columns=_columns, container=ParquetFiles(), check_rows=check_predicted)
