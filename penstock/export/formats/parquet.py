"""Parquet files that `datasets.load_dataset(FOLDER)` and any other reader open; the columns are those of `hf`."""

from __future__ import annotations

from penstock.export.format import Takes
from penstock.export.tables import ParquetFiles, TableFormat, plain_columns

FORMAT = TableFormat(
    columns=plain_columns,
    container=ParquetFiles(),
    takes=Takes(pairs=True, packed=True, weights=True),
)
