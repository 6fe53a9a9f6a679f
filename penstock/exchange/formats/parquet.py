"""Parquet files for `datasets.load_dataset(FOLDER)` and any other reader, with the columns of `hf`."""

from __future__ import annotations

from penstock.exchange.format import Supports
from penstock.exchange.tables import ParquetFiles, TableFormat, plain_columns

FORMAT = TableFormat(
    columns=plain_columns,
    container=ParquetFiles(),
    supports=Supports(pairs=True, packed=True, weights=True),
)
