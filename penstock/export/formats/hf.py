"""A folder that `datasets.load_from_disk` opens: `input_ids` and `labels`, of pairs the two sides."""

from __future__ import annotations

from penstock.export.format import Takes
from penstock.export.tables import ArrowFolder, TableFormat, plain_columns

FORMAT = TableFormat(
    columns=plain_columns,
    container=ArrowFolder(),
    takes=Takes(pairs=True, packed=True, weights=True),
)
