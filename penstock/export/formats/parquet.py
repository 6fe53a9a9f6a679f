"""Parquet files for `datasets.load_dataset(FOLDER)` and any other reader, with the columns of `hf`."""

from __future__ import annotations

from penstock.export.format import Supports
from penstock.export.tables import ParquetFiles, TableFormat, plain_columns

FORMAT = TableFormat(
    columns=plain_columns,
    container=ParquetFiles(),
    supports=Supports(pairs=True, packed=True, weights=True),
)
