"""Rows as SkyRL's SFT trainer caches them up to 0.3: `loss_mask` covers only the last `num_actions` tokens.

That window begins at the first trained token, but not before the second token of the row: nothing predicts the first.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from penstock.exchange.formats.skyrl import check_predicted
from penstock.exchange.rows import Block, ExportRows
from penstock.exchange.tables import ArrowFolder, Columns, TableFormat, attention_mask, input_ids, lists
from penstock.load.packing import ranges


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


FORMAT = TableFormat(columns=_columns, container=ArrowFolder(), check_rows=check_predicted)
