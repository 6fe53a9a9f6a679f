"""A folder that `datasets.load_from_disk` opens: `input_ids` and `labels`, of pairs the two sides."""

from __future__ import annotations

from penstock.export.format import Takes
from penstock.export.tables import ArrowFolder, TableFormat, plain_columns

FORMAT = TableFormat(
    summary="Hugging Face datasets: a save_to_disk folder",
    columns=plain_columns,
    container=ArrowFolder(),
    takes=Takes(pairs=True, packed=True, weights=True),
)
