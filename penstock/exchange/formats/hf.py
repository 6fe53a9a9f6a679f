"""A folder for `datasets.load_from_disk`: `input_ids` and `labels`, or both sides of each pair."""

from __future__ import annotations

from penstock.exchange.format import Supports
from penstock.exchange.tables import ArrowFolder, TableFormat, plain_columns

FORMAT = TableFormat(
    columns=plain_columns,
    container=ArrowFolder(),
    supports=Supports(pairs=True, packed=True, weights=True),
)
