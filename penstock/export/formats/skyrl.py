"""Rows as SkyRL's SFT trainer caches them: `loss_mask` covers only the last `num_actions` tokens.

That window begins at the first trained token, but not before the second token of the row: nothing predicts the first.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.errors import UsageError
from penstock.export.rows import Block, ExportRows
from penstock.export.tables import ArrowFolder, Columns, TableFormat, attention_mask, input_ids, lists
from penstock.pack.bins import ranges


def _check(rows: ExportRows) -> None:
    short = int((rows.served.lengths < 2).sum())
    if short:
        raise UsageError(
            f"{short} rows have a single token, which nothing predicts, and SkyRL requires at least one prediction "
            "per row. Raise --max-length, or export to another format."
        )


def _columns(block: Block, rows: ExportRows) -> Columns:
    del rows
    places = np.flatnonzero(block.trained)
    begins = np.maximum(places[np.searchsorted(places, block.starts)], block.starts + 1)
    window, _ = ranges(begins, block.starts + block.lengths)
    actions = block.starts + block.lengths - begins
    return {
        "input_ids": input_ids(block),
        "attention_mask": attention_mask(block),
        "num_actions": pa.array(actions),
        "loss_mask": lists(block.trained[window].view(np.int8), actions, np.int8),
    }


FORMAT = TableFormat(columns=_columns, container=ArrowFolder(), check_rows=_check)
